"""Splits of a score map without any ablation: bands of RoPE, mean and covariance.

A score is a sum over RoPE's pairs of coordinates and the coordinates that do not turn. A score map
is therefore the sum of the maps of bands of pairs, and of the unrotated rest.

Song and Zhong (arXiv 2310.04861) split a vector h of sequence c at position t into the global mean,
a positional part pos_t (the mean over sequences, less the global mean), a context part ctx_c (the
mean over positions, less the global mean), and a residual. Put into queries and keys, a mean score
has four blocks, with mean_t = global mean + pos_t and rest = ctx_c + residual:

    mean . mean    the mean term <E q_i, E k_j>: every position has its own mean vector
    mean . rest    0 by construction: <E q_i, E rest_j>, and E rest_j = 0 over sequences
    rest . mean    0 by construction, likewise
    rest . rest    the covariance term, of q_i and k_j over sequences: tokens that share their past
                   resemble each other

The cross terms vanish cell by cell for any model, so the score map is the first block plus the
last. Within the last block, `split_covariance` separates ctx_c from the residual. Its four parts
need not be 0, but ctx.ctx is a single number and residual.ctx a number per query, and softmax
ignores both. No block depends on the basis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log2, pi
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    jackknife,
)
from nope_probe.analyses.pattern_rows import exceeds_rounding
from nope_probe.analyses.recover import Rotation
from nope_probe.maps.estimates import Estimates, fold_weights
from nope_probe.maps.layers import LayerMaps, Pattern

UNROTATED = "unrotated"
BandChoice = int | Literal["octaves"]


@dataclass(frozen=True, kw_only=True)
class Band:
    """One band of one layer.

    Attributes:
        layer: the layer, from 0.
        name: for octaves, its wavelengths in positions, such as `8-16`; else its number from 0,
            fast pairs first; or `unrotated`.
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
    choice: BandChoice,
    layers: Sequence[int] | None = None,
) -> list[list[Band]]:
    """Return the bands of each layer; all layers have the same band names.

    Args:
        rotations: the rotation of each layer.
        d_head: coordinates of a head.
        choice: `octaves` (wavelengths from 2^k to 2^(k+1) positions), or how many bands of
            consecutive pairs.
        layers: the layers' numbers; from 0 by default.

    Raises:
        ValueError: if no layer has RoPE, or for more bands than pairs.

    Example:
        >>> from nope_probe.analyses.recover import Rotation
        >>> pairs = torch.tensor([[0, 2], [1, 3]])
        >>> turns = Rotation(pairs=pairs, frequencies=torch.tensor([1.0, 0.1]), size=1.0)
        >>> [band.name for band in make_bands([turns], 4, "octaves")[0]]
        ['4-8', '32-64']
    """
    most = max((len(rotation.pairs) for rotation in rotations), default=0)
    if most == 0:
        raise ValueError("no layer has RoPE: there are no frequencies to split a score by")
    if choice != "octaves" and not 1 <= choice <= most:
        raise ValueError(f"expected from 1 to {most} bands (rotary pairs), got {choice}")
    keys = [
        [_key(rotation, f, choice) for f in range(len(rotation.pairs))] for rotation in rotations
    ]
    names = sorted({key for some in keys for key in some})
    has_rest = any(2 * len(rotation.pairs) < d_head for rotation in rotations)
    return [
        [
            *(_band(layer, turns, key, of_pairs, choice) for key in names),
            *([_rest(layer, turns, d_head)] if has_rest else []),
        ]
        for layer, turns, of_pairs in zip(
            range(len(rotations)) if layers is None else layers, rotations, keys, strict=True
        )
    ]


def _key(rotation: Rotation, pair: int, choice: BandChoice) -> int:
    """Return the band of a pair as a number; bands are in the order of these numbers."""
    if choice == "octaves":
        return floor(log2(_wavelength(rotation, pair)))
    return pair * choice // len(rotation.pairs)


def _wavelength(rotation: Rotation, pair: int) -> float:
    return 2 * pi / abs(float(rotation.frequencies[pair]))


def _band(layer: int, turns: Rotation, key: int, keys: list[int], choice: BandChoice) -> Band:
    pairs = tuple(f for f, band in enumerate(keys) if band == key)
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


@dataclass(frozen=True, kw_only=True)
class MeanCovariance:
    """One layer's mean and covariance terms.

    Attributes:
        layer: the layer, from 0.
        mean, covariance: shares <term, v(all)> / <v(all), v(all)>; they add to 1.
        mean_rms, covariance_rms: RMS of each term's pattern, nats.
        dimensions: how many dimensions the positions' mean keys span (participation ratio).

    A pattern or term within the rounding of the scores is 0, and shares of it are undefined.
    """

    layer: int
    mean: Interval
    covariance: Interval
    mean_rms: Interval
    covariance_rms: Interval
    dimensions: Interval


def split_mean_covariance(layer: int, pattern: Pattern) -> MeanCovariance:
    """Return the mean and covariance terms of one layer's pattern.

    Args:
        layer: the layer, from 0.
        pattern: of the layer's scores, from `capture_scores(..., mean_term=True)`.

    Raises:
        ValueError: for scores without their mean term.
    """
    scores = pattern.maps
    if scores.mean_term is None or scores.key_means is None:
        raise ValueError("the scores lack a mean term; capture_scores(mean_term=True) keeps it")
    mean_pattern = replace(pattern, maps=scores.mean_term)
    gram = ContrastGram.of({"scores": pattern, "mean": mean_pattern})
    gram.score_squares[:] = gram.score_squares[0]  # the mean term has the scores' rounding
    whole, mean, covariance = {"scores": 1.0}, {"mean": 1.0}, {"scores": 1.0, "mean": -1.0}
    key_means = scores.key_means[...][:, pattern.cells.skip_keys :].double()
    return MeanCovariance(
        layer=layer,
        mean=gram.share(mean, whole),
        covariance=gram.share(covariance, whole),
        mean_rms=gram.size(mean),
        covariance_rms=gram.size(covariance),
        dimensions=participation_ratio(key_means, scores.weights),
    )


@dataclass(frozen=True, kw_only=True)
class CovarianceParts:
    """The parts of a covariance term; their sum is the term, in its unit.

    Attributes:
        context: ctx.ctx, the same in every cell.
        query_residual: residual.ctx, the same for all keys of a query.
        key_residual: ctx.residual, the same for all queries of a key.
        residual: residual.residual.
    """

    context: Float[Tensor, ""]
    query_residual: Float[Tensor, " query_pos"]
    key_residual: Float[Tensor, " key_pos"]
    residual: Float[Tensor, "query_pos key_pos"]


def split_covariance(covariance: Float[Tensor, "query_pos key_pos"]) -> CovarianceParts:
    """Return the parts of the covariance term from context and residual.

    ctx_c is the mean of the rest over positions. The parts are therefore means of the covariance
    term over queries and keys, and need no further sums over sequences.

    Args:
        covariance: the covariance term over all queries and keys (j > i too), nats.

    Raises:
        ValueError: for a masked cell.

    Example:
        >>> parts = split_covariance(torch.tensor([[3.0, 1.0], [1.0, 3.0]]))
        >>> float(parts.context), parts.residual.tolist()
        (2.0, [[1.0, -1.0], [-1.0, 1.0]])
    """
    if not covariance.isfinite().all():
        raise ValueError("context is a mean over all positions: expected no masked cell")
    by_query, by_key, context = covariance.mean(1), covariance.mean(0), covariance.mean()
    return CovarianceParts(
        context=context,
        query_residual=by_query - context,
        key_residual=by_key - context,
        residual=covariance - by_query[:, None] - by_key[None] + context,
    )


def participation_ratio(
    means: Float[Tensor, "fold pos width"], weights: Float[Tensor, " fold"] | None = None
) -> Interval:
    """Return (tr C)^2 / tr C^2 of the covariance C of the positions' means, with its interval.

    C is taken between different folds, so that noise adds no dimensions. The ratio is undefined
    where the trace does not exceed its noise or the means' rounding, since all positions then have
    the same mean.
    """
    centred, folds = means - means.mean(1, keepdim=True), list(range(len(means)))
    weights = fold_weights(len(means)) if weights is None else weights
    rests = [[f for f in folds if f != out] for out in (None, *folds)]
    grams = [_gram(centred[rest], weights[rest]) for rest in rests]
    traces = Estimates(values=torch.stack([gram.trace() for gram in grams]), weights=weights)
    square = means.square().sum((1, 2)).mean()
    if not (jackknife(traces).low > 0 and exceeds_rounding(traces, square)):
        return UNDEFINED
    squares = torch.stack([gram.square().sum() for gram in grams])
    return jackknife(traces.with_values(traces.values.square() / squares))


def _gram(
    folds: Float[Tensor, "fold pos width"], weights: Float[Tensor, " fold"]
) -> Float[Tensor, "pos pos2"]:
    """Return the mean inner products of positions over pairs of different folds, by weight."""
    weighted = weights[:, None, None] * folds
    total, same = weighted.sum(0), torch.einsum("fpw,fqw->pq", weighted, weighted)
    return (total @ total.T - same) / (weights.sum().square() - weights.square().sum())
