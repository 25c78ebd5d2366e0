"""A score map by RoPE frequency: an exact split without any ablation.

A score is a sum over RoPE's pairs of coordinates, and over the coordinates that do not turn. So a
score map is the sum of the maps of bands of pairs, and of the unrotated rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log2, pi
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, cross_products, rms, share
from nope_probe.analyses.pattern_rows import beyond_rounding
from nope_probe.analyses.recover import Rotation
from nope_probe.maps.centred import kept_cells, row_centred

UNROTATED = "unrotated"
BandChoice = int | Literal["octaves"]


@dataclass(frozen=True, kw_only=True)
class Band:
    """One band of one layer.

    Attributes:
        layer: the layer, from 0.
        name: for octaves, its wavelengths in positions, such as `8-16`; else its number from 0,
            fast pairs first; or `unrotated`.
        pairs: the rotary pairs of the layer that are in it, by number; none in `unrotated`.
        wavelengths: of these pairs, in positions.
        coordinates: of each head, those in the band.
    """

    layer: int
    name: str
    pairs: tuple[int, ...]
    wavelengths: tuple[float, ...]
    coordinates: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BandPattern:
    """What a band has of its layer's pattern v(all).

    Attributes:
        band: the band.
        amplitude: the RMS of its pattern, nats.
        share: <band, v(all)> / <v(all), v(all)>; the shares of a layer's bands add to 1.
    """

    band: Band
    amplitude: Interval
    share: Interval


def make_bands(rotations: Sequence[Rotation], d_head: int, choice: BandChoice) -> list[list[Band]]:
    """Return the bands of each layer, of the same names in all.

    Args:
        rotations: what each layer turns.
        d_head: coordinates of a head.
        choice: `octaves` (wavelengths from 2^k to 2^(k+1) positions), or how many bands of
            consecutive pairs.

    Raises:
        ValueError: if no layer has RoPE, or for more bands than pairs.

    Example:
        >>> from nope_probe.analyses.recover import Rotation
        >>> pairs = torch.tensor([[0, 2], [1, 3]])
        >>> turns = Rotation(pairs=pairs, frequencies=torch.tensor([1.0, 0.1]), size=1.0)
        >>> [band.name for band in make_bands([turns], 4, "octaves")[0]]
        ['4-8', '32-64']
    """
    most = max((len(each.pairs) for each in rotations), default=0)
    if most == 0:
        raise ValueError("no layer has RoPE: there are no frequencies to split a score by")
    if choice != "octaves" and not 1 <= choice <= most:
        raise ValueError(f"expected from 1 to {most} bands (rotary pairs), got {choice}")
    keys = [[_key(each, f, choice) for f in range(len(each.pairs))] for each in rotations]
    names = sorted({key for some in keys for key in some})
    has_rest = any(2 * len(each.pairs) < d_head for each in rotations)
    return [
        [
            *(_band(layer, turns, key, keys[layer], choice) for key in names),
            *([_rest(layer, turns, d_head)] if has_rest else []),
        ]
        for layer, turns in enumerate(rotations)
    ]


def _key(rotation: Rotation, pair: int, choice: BandChoice) -> int:
    """Return a number that the pairs of a band share, and by which bands are in order."""
    if choice == "octaves":
        return floor(log2(_wavelength(rotation, pair)))
    return pair * choice // len(rotation.pairs)


def _wavelength(rotation: Rotation, pair: int) -> float:
    return 2 * pi / abs(float(rotation.frequencies[pair]))


def _band(layer: int, turns: Rotation, key: int, keys: list[int], choice: BandChoice) -> Band:
    pairs = tuple(f for f, each in enumerate(keys) if each == key)
    return Band(
        layer=layer,
        name=f"{2**key}-{2 ** (key + 1)}" if choice == "octaves" else str(key),
        pairs=pairs,
        wavelengths=tuple(_wavelength(turns, f) for f in pairs),
        coordinates=tuple(int(c) for f in pairs for c in turns.pairs[f]),
    )


def _rest(layer: int, turns: Rotation, d_head: int) -> Band:
    turned = set(turns.pairs.flatten().tolist())
    rest = tuple(c for c in range(d_head) if c not in turned)
    return Band(layer=layer, name=UNROTATED, pairs=(), wavelengths=(), coordinates=rest)


def split_bands(
    scores: Float[Tensor, "fold layer query_pos key_pos"],
    maps: Float[Tensor, "fold layer band query_pos key_pos"],
    bands: Sequence[Sequence[Band]],
    skip_keys: int = 0,
    *,
    counts: Int[Tensor, " fold"] | None = None,
) -> list[BandPattern]:
    """Return what each band has of its layer's pattern; a layer's empty bands are left out.

    A pattern within the rounding of its map is 0, and nothing has a share of it.

    Args:
        scores: fold maps of the scores, nats.
        maps: fold maps of each band, as `capture_bands` returns them.
        bands: the bands of each layer.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
    """
    cells = kept_cells(scores.shape[-1], skip_keys)
    found: list[BandPattern] = []
    for layer, of_layer in enumerate(bands):
        whole = scores[:, layer].double()
        for index, band in enumerate(of_layer):
            if band.coordinates:
                part = maps[:, layer, index].double()
                amplitude, of_whole = _band_pattern(part, whole, cells, skip_keys, counts)
                found.append(BandPattern(band=band, amplitude=amplitude, share=of_whole))
    return found


def _band_pattern(
    part: Float[Tensor, "fold query_pos key_pos"],
    whole: Float[Tensor, "fold query_pos key_pos"],
    cells: Bool[Tensor, "query_pos key_pos"],
    skip_keys: int,
    counts: Int[Tensor, " fold"] | None,
) -> tuple[Interval, Interval]:
    """Return the amplitude of a band's pattern, and its share of the whole one."""
    both = torch.stack([row_centred(each, skip_keys)[:, cells] for each in (part, whole)])
    gram = cross_products(both, both, counts)
    ours, theirs = (
        beyond_rounding(gram[:, index, index], each[:, cells].square().mean())
        for index, each in enumerate((part, whole))
    )
    return rms(ours, counts), share(gram[:, 0, 1], theirs, counts)
