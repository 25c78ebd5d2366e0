"""Differences of a layer's positional pattern between two models, or two states of a model.

Every function takes patterns in the kept cells, their products between folds, then the jackknife.
If both models ran on the same sequences, dealt to the same folds, differences are taken fold by
fold (paired), so the sequences' common noise cancels. Otherwise variances add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Estimates,
    Interval,
    ProductSums,
    cross_products,
    jackknife,
    leave_one_out,
    rms,
    rms_difference,
    signed_root,
)
from nope_probe.analyses.pattern import FoldCounts, locality, measure_estimates, query_stride
from nope_probe.analyses.pattern_rows import (
    ContrastGram,
    Folds,
    NonRelativeRows,
    as_layer,
    beyond_rounding,
    exceeds_rounding,
    mean_squares,
    pattern_distance_sums,
)
from nope_probe.maps.centred import KeptCells, centred_rows
from nope_probe.maps.rows import QueryPositions, row_blocks
from nope_probe.maps.stored_maps import LayerFolds, TensorFolds, shared_cells

FoldMaps = LayerFolds | Float[Tensor, "fold row key_pos"]
OtherFoldMaps = LayerFolds | Float[Tensor, "other_fold row key_pos"]
BothCounts = tuple[FoldCounts | None, FoldCounts | None]


@dataclass(frozen=True, kw_only=True)
class KeptPattern:
    """Measures of one positional pattern v beside the intact model's u, with 95% intervals.

    Attributes:
        amplitude: RMS of v, corrected for noise; nats for scores.
        locality: as `Measures.locality`, -1 to 1, from every `query_stride(n_rows)`-th row.
        share: <v, u> / <u, u>, the share of the intact positional pattern that is left: 1 for the
            intact model, undefined where u does not exceed its noise.
    """

    amplitude: Interval
    locality: Interval
    share: Interval


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """RMS of the non-relative part with and without the mask, nats (the paper's section 5).

    Attributes:
        difference: the RMS with the mask less the RMS without it, paired.
    """

    with_mask: Interval
    without_mask: Interval
    difference: Interval


def kept_patterns(
    maps: Float[Tensor, "fold map row key_pos"],
    intact: Float[Tensor, "fold map row key_pos"],
    skip_keys: int = 0,
    counts: FoldCounts | None = None,
    query_positions: QueryPositions = None,
) -> list[KeptPattern]:
    """Measure the positional pattern of each map, beside the intact model's.

    A map is measured on the cells that the intact model sees too.

    Args:
        maps: fold means of scores, or of Gram maps, with some components removed.
        intact: fold means of the intact model, on the same sequences.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
        query_positions: the queries of the rows; all by default.

    Example:
        >>> folds = torch.randn(4, 1, 11, 11)
        >>> kept_patterns(2 * folds, folds)[0].share.value
        nan
        >>> folds = folds + torch.arange(11.0)
        >>> round(kept_patterns(2 * folds, folds)[0].share.value, 6)
        2.0
    """
    return [
        _kept(
            TensorFolds(maps[:, index].double(), query_positions),
            TensorFolds(intact[:, index].double(), query_positions),
            skip_keys,
            counts,
        )
        for index in range(maps.shape[1])
    ]


def _kept(
    maps: TensorFolds, intact: TensorFolds, skip_keys: int, counts: FoldCounts | None
) -> KeptPattern:
    layers = {"v": maps, "u": intact}
    cells = shared_cells(layers.values(), skip_keys)
    if not all(layer.folds[:, cells.mask].isfinite().all() for layer in layers.values()):
        return KeptPattern(amplitude=UNDEFINED, locality=UNDEFINED, share=UNDEFINED)
    gram = ContrastGram.of_layers(layers, skip_keys, counts)
    amplitude = gram.rms({"v": 1.0})
    patterns = centred_rows(maps.folds, cells.mask).where(cells.mask, torch.nan)
    queries, stride = maps.query_positions, query_stride(len(maps.query_positions))
    trend = locality(leave_one_out(patterns, counts), skip_keys, stride, queries)
    return KeptPattern(
        amplitude=amplitude,
        locality=jackknife(trend, counts) if amplitude.value else UNDEFINED,
        share=gram.share({"v": 1.0}, {"u": 1.0}),
    )


def positional_part(
    scores: FoldMaps,
    content: FoldMaps,
    skip_keys: int = 0,
    counts: FoldCounts | None = None,
) -> Float[Tensor, "fold cell"]:
    """Return p, the pattern less the pattern without the sources, in the kept cells, nats.

    p is 0 where it does not exceed the rounding of the scores.

    Args:
        scores: score maps, nats.
        content: score maps of the same model without mask and position encoding.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
    """
    layers = as_layer(scores), as_layer(content)
    cells, both = shared_cells(layers, skip_keys), [layer.maps.double() for layer in layers]
    part = _pattern_cells(both[0] - both[1], cells)
    score_square = sum(maps[..., cells.mask].square().mean() for maps in both)
    exceeds = exceeds_rounding(_inner(part, part, counts), score_square)
    return part if exceeds else torch.zeros_like(part)


def pattern_lost(
    whole: Float[Tensor, "fold cell"],
    left: Float[Tensor, "fold cell"],
    counts: FoldCounts | None = None,
) -> Interval:
    """Return the loss of one layer's positional part p(all) by a removal, in nats.

    The loss is <p(all) - p(left), p(all)> / RMS of p(all): the RMS if the part is gone, 0 if it
    stays, more if it is reversed. It is undefined where p(all) does not exceed its noise.

    Args:
        whole: the positional part of the intact model.
        left: the positional part of the model without the removed components.
        counts: sequences per fold; all the same by default.
    """
    square, kept = _inner(whole, whole, counts), _inner(left, whole, counts)
    if not jackknife(square, counts).low > 0 or not (square > 0).all():
        return UNDEFINED
    return jackknife((square - kept) / square.sqrt(), counts)


def mask_effect(
    with_mask: Folds,
    without_mask: Folds,
    skip_keys: int = 0,
    counts: FoldCounts | None = None,
) -> MaskEffect:
    """Return the RMS of one layer's non-relative part with and without the mask, and its change.

    Args:
        with_mask: fold maps of the intact model's score, nats.
        without_mask: fold maps without the mask, on the same sequences.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
    """
    layers = as_layer(with_mask), as_layer(without_mask)
    cells = shared_cells(layers, skip_keys)
    with_square, without_square = (non_relative_squares(layer, cells, counts) for layer in layers)
    return MaskEffect(
        with_mask=rms(with_square, counts),
        without_mask=rms(without_square, counts),
        difference=rms_difference(with_square, without_square, counts),
    )


def non_relative_squares(
    folds: LayerFolds, cells: KeptCells, counts: FoldCounts | None
) -> Estimates:
    """Return the mean square of the non-relative part, on all folds and without each fold.

    The square is 0 within the rounding of the scores.
    """
    products = ProductSums()
    rest = NonRelativeRows(pattern_distance_sums(folds, cells), cells)
    score_square = torch.zeros((), dtype=torch.float64)
    for start, stop in row_blocks(folds.query_positions, folds.n, folds.n_folds):
        raw = folds.rows(start, stop).double()
        score_square += mean_squares(raw, start, cells).mean()
        products.add(rest.of(centred_rows(raw, cells.rows(start, stop)), start)[None])
    return beyond_rounding(products.cross_products(cells.count, counts)[:, 0, 0], score_square)


def measure_differences(
    one: FoldMaps,
    other: OtherFoldMaps,
    *,
    skip_keys: int = 0,
    paired: bool,
    counts: BothCounts = (None, None),
) -> dict[str, Interval]:
    """Return the measures of a model's pattern less the measures of another model's pattern.

    Args:
        one: fold means of scores of one layer, nats.
        other: fold means of the model to compare with.
        skip_keys: how many first keys to leave out.
        paired: whether fold f holds the same sequences in both.
        counts: the sequences per fold of both models; all the same by default.

    Returns:
        Differences by the names of `Measures`; undefined where the measure is.

    Example:
        >>> import torch
        >>> folds = torch.randn(4, 13, 13, generator=torch.Generator().manual_seed(0))
        >>> change = measure_differences(folds + 1, folds, paired=True)
        >>> abs(change["amplitude"].value) < 1e-6, abs(change["locality"].value) < 1e-6
        (True, True)
    """
    x = _measure_estimates(one, skip_keys, counts[0])
    y = _measure_estimates(other, skip_keys, counts[1])
    differences = {"relative_r2": UNDEFINED}
    for name in (name for name in x if name in y):
        is_square = name.endswith("_squared")
        if paired and is_square:
            change = rms_difference(x[name], y[name], counts[0])
        elif paired:
            change = jackknife(x[name] - y[name], counts[0])
        else:
            alone = rms if is_square else jackknife
            change = independent_difference(alone(x[name], counts[0]), alone(y[name], counts[1]))
        differences[name.removesuffix("_squared")] = change
    return differences


def pattern_difference(
    one: FoldMaps,
    other: OtherFoldMaps,
    *,
    skip_keys: int = 0,
    paired: bool,
    counts: BothCounts = (None, None),
) -> Interval:
    """Return the RMS of the difference of two patterns, nats, with noise subtracted.

    The arguments are as in `measure_differences`.
    """
    layers = as_layer(one), as_layer(other)
    cells = shared_cells(layers, skip_keys)
    x, y = (_pattern_cells(layer.maps, cells) for layer in layers)
    n_x, n_y = counts
    if paired:
        return rms(_inner(x - y, x - y, n_x), n_x)
    x_x, y_y = _inner(x, x, n_x), _inner(y, y, n_y)
    x_means, y_means = leave_one_out(x, n_x), leave_one_out(y, n_y)
    x_y, y_x = (x_means * y_means[0]).mean(-1), (y_means * x_means[0]).mean(-1)
    # <x, x> - 2 <x, y> + <y, y>: the folds of x and of y vary independently.
    arms = (
        jackknife(estimates, counts)
        for estimates, counts in ((x_x - 2 * x_y, n_x), (y_y - 2 * y_x, n_y))
    )
    half = hypot(*(arm.high - arm.value for arm in arms))
    square = float(x_x[0] - 2 * x_y[0] + y_y[0])
    return Interval(
        value=signed_root(square), low=signed_root(square - half), high=signed_root(square + half)
    )


def independent_difference(one: Interval, other: Interval) -> Interval:
    """Return the difference of estimates from independent data.

    The interval keeps asymmetric arms, as those of an RMS or a ratio are (Zou and Donner 2008). Its
    lower arm adds, in squares, the lower arm of `one` and the upper arm of `other`; its upper arm
    adds the opposite arms.

    Example:
        >>> one = Interval(value=5.0, low=2.0, high=17.0)
        >>> other = Interval(value=1.0, low=-4.0, high=5.0)
        >>> independent_difference(one, other)
        4 [-1, 17]
    """
    value = one.value - other.value
    down = hypot(one.value - one.low, other.high - other.value)
    up = hypot(one.high - one.value, other.value - other.low)
    return Interval(value=value, low=value - down, high=value + up)


def _measure_estimates(
    folds: FoldMaps, skip_keys: int, counts: FoldCounts | None
) -> dict[str, Estimates]:
    """Return `measure_estimates`, and the relative share if defined."""
    estimates = measure_estimates(folds, skip_keys, counts)
    p_p, r_r = estimates["amplitude_squared"], estimates["non_relative_squared"]
    if jackknife(p_p, counts).low > 0:
        estimates["relative_r2"] = 1 - r_r / p_p
    return estimates


def _pattern_cells(
    maps: Float[Tensor, "fold row key_pos"], cells: KeptCells
) -> Float[Tensor, "fold cell"]:
    """Return the patterns of fold maps in the kept cells, in float64."""
    return centred_rows(maps.double(), cells.mask)[:, cells.mask]


def _inner(
    x: Float[Tensor, "fold cell"], y: Float[Tensor, "fold cell"], counts: FoldCounts | None
) -> Estimates:
    """Return <x, y> between different folds, on all folds and without each fold."""
    return cross_products(x[None], y[None], counts)[:, 0, 0]
