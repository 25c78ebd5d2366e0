"""A score map split into bands of RoPE's pairs, without any ablation.

A score is a sum over RoPE's pairs of coordinates and the coordinates that do not turn. A score map
is therefore the sum of the maps of bands of pairs, and of the unrotated rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import pi

from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.analyses.jackknife import (
    Interval,
)
from nope_probe.errors import UserError
from nope_probe.maps.layers import LayerMaps, Pattern
from nope_probe.maps.rotation import Rotation

UNROTATED = "unrotated"


@dataclass(frozen=True, kw_only=True)
class Band:
    """One band of one layer.

    Attributes:
        layer: the layer, from 0.
        name: its number from 0, fast pairs first; or `unrotated`.
        pairs: the numbers of the layer's rotary pairs in the band; `unrotated` has none.
        wavelengths: the wavelengths of these pairs, in positions.
        coordinates: the coordinates of each head in the band.
    """

    layer: int
    name: str
    pairs: tuple[int, ...]
    wavelengths: tuple[float, ...]
    coordinates: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BandPattern:
    """A band's part of its layer's pattern v(all).

    Attributes:
        band: the band.
        amplitude: the RMS of its pattern, nats.
        share: <band, v(all)> / <v(all), v(all)>; the shares of a layer's bands add to 1.
    """

    band: Band
    amplitude: Interval
    share: Interval


def make_bands(
    rotations: Sequence[Rotation],
    d_head: int,
    n_bands: int,
    layers: Sequence[int] | None = None,
) -> list[list[Band]]:
    """Return the bands of each layer; all layers have the same band names.

    Args:
        rotations: the rotation of each layer.
        d_head: coordinates of a head.
        n_bands: how many bands of consecutive pairs.
        layers: the layers' numbers; from 0 by default.

    Raises:
        NotImplementedError: if the pairs of a rotation are not known.
        UserError: if no layer has RoPE, or for more bands than pairs.

    Example:
        >>> from nope_probe.maps.rotation import Rotation
        >>> angles = torch.arange(2)[:, None] * torch.tensor([1.0, 0.1])
        >>> pairs = torch.tensor([[0, 2], [1, 3]])
        >>> rotation = Rotation(pairs=pairs, cos=angles.cos(), sin=angles.sin())
        >>> [band.pairs for band in make_bands([rotation], 4, 2)[0]]
        [(0,), (1,)]
    """
    turning = [rotation.turning for rotation in rotations]
    most = max((len(rotation.known_pairs) for rotation in turning), default=0)
    if most == 0:
        raise UserError("no layer has RoPE: there are no frequencies to split a score by")
    if not 1 <= n_bands <= most:
        raise UserError(f"expected from 1 to {most} bands (rotary pairs), got {n_bands}")
    keys = [_keys(rotation, n_bands) for rotation in turning]
    names = {key: str(key) for key in sorted({key for of_layer in keys for key in of_layer})}
    numbers = range(len(turning)) if layers is None else layers
    bands = [
        [*_bands(layer, rotation, of_pairs, names), _rest(layer, rotation, d_head)]
        for layer, rotation, of_pairs in zip(numbers, turning, keys, strict=True)
    ]
    has_rest = any(of_layer[-1].coordinates for of_layer in bands)
    return bands if has_rest else [of_layer[:-1] for of_layer in bands]


def _wavelengths(rotation: Rotation) -> list[float]:
    return (2 * pi / rotation.frequencies.abs()).tolist()


def _keys(rotation: Rotation, n_bands: int) -> list[int]:
    """Return the band of each pair as a number; bands are in the order of these numbers."""
    n_pairs = len(rotation.known_pairs)
    return [pair * n_bands // n_pairs for pair in range(n_pairs)]


def _bands(
    layer: int, rotation: Rotation, keys: Sequence[int], names: Mapping[int, str]
) -> Iterator[Band]:
    pairs, wavelengths = rotation.known_pairs.tolist(), _wavelengths(rotation)
    for key, name in names.items():
        in_band = tuple(pair for pair, band in enumerate(keys) if band == key)
        yield Band(
            layer=layer,
            name=name,
            pairs=in_band,
            wavelengths=tuple(wavelengths[pair] for pair in in_band),
            coordinates=tuple(chain.from_iterable(pairs[pair] for pair in in_band)),
        )


def _rest(layer: int, rotation: Rotation, d_head: int) -> Band:
    turned = {*rotation.known_pairs.flatten().tolist()}
    rest = tuple(c for c in range(d_head) if c not in turned)
    return Band(layer=layer, name=UNROTATED, pairs=(), wavelengths=(), coordinates=rest)


def split_bands(
    pattern: Pattern, band_maps: Float[Tensor, "fold band row key_pos"], bands: Sequence[Band]
) -> list[BandPattern]:
    """Return each band's part of its layer's pattern; empty bands are left out.

    A pattern within the rounding of its map is 0, and shares of it are undefined.

    Args:
        pattern: of the layer's scores.
        band_maps: fold maps of each band, as `capture_bands` returns them.
        bands: the layer's bands.
    """
    scores = pattern.maps
    patterns: list[BandPattern] = []
    band, whole = {"band": 1.0}, {"scores": 1.0}
    for index, of_pairs in enumerate(bands):
        if of_pairs.coordinates:
            maps = LayerMaps.of(band_maps[:, index], scores.counts, scores.queries)
            gram = ContrastGram.of({"band": replace(pattern, maps=maps), "scores": pattern})
            amplitude, share = gram.size(band), gram.share(band, whole)
            patterns.append(BandPattern(band=of_pairs, amplitude=amplitude, share=share))
    return patterns
