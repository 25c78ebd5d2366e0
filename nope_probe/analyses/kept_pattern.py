"""What an ablation leaves of the intact model's positional pattern."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    cross_products,
    jackknife,
    leave_one_out,
    rms,
    share,
)
from nope_probe.analyses.pattern import kept_cells, row_centred
from nope_probe.analyses.rounding import beyond_rounding
from nope_probe.analyses.trends import TrendSums, query_stride


@dataclass(frozen=True, kw_only=True)
class KeptPattern:
    """Measures of one positional pattern v beside the intact model's u, with 95% intervals.

    Attributes:
        amplitude: RMS of v, corrected for noise; nats for scores.
        locality: as `Measures.locality`, -1 to 1; of every `query_stride(n)`-th query.
        share: <v, u> / <u, u>, the share of the intact positional pattern that is left: 1 for the
            intact model, undefined where u cannot be told from noise.
    """

    amplitude: Interval
    locality: Interval
    share: Interval


def kept_patterns(
    maps: Float[Tensor, "fold map query_pos key_pos"],
    intact: Float[Tensor, "fold map query_pos key_pos"],
    skip_keys: int = 0,
    counts: Int[Tensor, " fold"] | None = None,
) -> list[KeptPattern]:
    """Measure the positional pattern of each map, beside the intact model's.

    All is undefined for a map that hides keys before the query, as a sliding window does.

    Args:
        maps: fold means of scores, or of Gram maps, with some components removed.
        intact: the same of the intact model, on the same sequences.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.

    Example:
        >>> folds = torch.randn(4, 1, 11, 11)
        >>> kept_patterns(2 * folds, folds)[0].share.value
        nan
        >>> folds = folds + torch.arange(11.0)
        >>> round(kept_patterns(2 * folds, folds)[0].share.value, 6)
        2.0
    """
    return [
        _kept(maps[:, index].double(), intact[:, index].double(), skip_keys, counts)
        for index in range(maps.shape[1])
    ]


def _kept(
    one: Float[Tensor, "fold query_pos key_pos"],
    intact: Float[Tensor, "fold query_pos key_pos"],
    skip_keys: int,
    counts: Int[Tensor, " fold"] | None,
) -> KeptPattern:
    cells = kept_cells(one.shape[-1], skip_keys)
    if not (one[:, cells].isfinite().all() and intact[:, cells].isfinite().all()):
        return KeptPattern(amplitude=UNDEFINED, locality=UNDEFINED, share=UNDEFINED)
    patterns, whole = row_centred(one, skip_keys), row_centred(intact, skip_keys)
    both = torch.stack([patterns[:, cells], whole[:, cells]])
    products = cross_products(both, both, counts)
    ours, theirs = (
        beyond_rounding(products[:, index, index], each[:, cells].square().mean())
        for index, each in enumerate((one, intact))
    )
    trend = jackknife(_locality(patterns, skip_keys, counts), counts)
    return KeptPattern(
        amplitude=rms(ours, counts),
        locality=trend if ours.any() else UNDEFINED,
        share=share(products[:, 0, 1], theirs, counts),
    )


def _locality(
    patterns: Float[Tensor, "fold query_pos key_pos"],
    skip_keys: int,
    counts: Int[Tensor, " fold"] | None,
) -> Float[Tensor, " one_plus_folds"]:
    """Return the locality on all folds and without each, of the queries that `measure` orders."""
    n = patterns.shape[-1]
    trends = TrendSums(1 + len(patterns), skip_keys, query_stride(n))
    for query in trends.chosen(0, n):
        trends.add(leave_one_out(patterns[:, query, skip_keys:query], counts))
    return trends.locality
