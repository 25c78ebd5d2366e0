"""Which heads attend differently in another model, part by part, each change tested.

A head has five quantities: the information of its attention and the four parts of it. The change of
a quantity is tested by t with the folds' degrees of freedom, and all tests of two models together
by the rule of Holm (1979): the chance of naming any head that did not change is at most 5%.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf

import numpy as np
from scipy.special import stdtr, stdtrit

from nope_probe.analyses.attention import LOWERED, AttentionSplit
from nope_probe.analyses.jackknife import Interval, error_of, freedom
from nope_probe.errors import UserError

QUANTITIES = (
    *("information", "first_position", "first_content"),
    *("others_position", "others_content"),
)
LEVEL = 0.05  # of the chance to name any head that did not change
FEW_FOLDS = 16  # with fewer, t has heavy tails: hardly any change of hundreds of heads is named
ROUNDING = 2**-20  # nats, and relative: what float32 weights of two equal models may differ by


@dataclass(frozen=True, kw_only=True)
class HeadChange:
    """The change of one quantity of a head, from a model to another.

    Attributes:
        layer: the head's layer.
        head: its number.
        quantity: one of `QUANTITIES`.
        change: the other model's less the first model's, nats.
        p_holm: the chance of so large a change without one, times the tests left by Holm's rule.
    """

    layer: int
    head: int
    quantity: str
    change: Interval
    p_holm: float

    @property
    def changed(self) -> bool:
        """Whether the change survives Holm's rule over all heads and quantities."""
        return self.p_holm <= LEVEL


def head_changes(
    base: Mapping[tuple[int, int], AttentionSplit],
    other: Mapping[tuple[int, int], AttentionSplit],
    *,
    paired: bool,
) -> list[HeadChange]:
    """Test the change of every quantity of the heads that two models share.

    Args:
        base: the attention of the first model's heads, by layer and head.
        other: that of the other model's heads.
        paired: whether fold f holds the same sequences in both, so that their noise cancels.

    Raises:
        ValueError: for no head in common, or fewer than 4 folds.
    """
    heads = [head for head in base if head in other]
    if not heads:
        raise UserError("the two models have no head in common")
    tests = [
        (*head, quantity, *_test(base[head], other[head], quantity, paired))
        for head in heads
        for quantity in QUANTITIES
    ]
    adjusted = holm([p for *_, p in tests])
    return [
        HeadChange(layer=layer, head=head, quantity=quantity, change=change, p_holm=p)
        for (layer, head, quantity, change, _), p in zip(tests, adjusted, strict=True)
    ]


def _test(
    base: AttentionSplit, other: AttentionSplit, quantity: str, paired: bool
) -> tuple[Interval, float]:
    """Return the change of a quantity with its 95% interval, and the p of no change.

    As in the intervals of a part, position may be less than estimated by an eighth of the gap of
    its bounds, and content more. What the gaps of both models share cancels.
    """
    x, y = getattr(other, quantity), getattr(base, quantity)
    change = float(x.values[0] - y.values[0])
    if paired:
        error, degrees = error_of(x - y), freedom(x.weights)
    else:
        errors = [error_of(estimates) for estimates in (x, y)]
        error, degrees = hypot(*errors), _welch(errors, [freedom(z.weights) for z in (x, y)])
    part, _, kind = quantity.partition("_")
    of_gaps = 0.0
    if kind:
        of_gaps = LOWERED * (getattr(other, f"{part}_gap") - getattr(base, f"{part}_gap"))
    bias = of_gaps if kind == "position" else -of_gaps
    half = float(stdtrit(degrees, 0.975)) * error
    interval = Interval(
        value=change, low=change - half - max(bias, 0.0), high=change + half - min(bias, 0.0)
    )
    toward_zero = max(bias if change > 0 else -bias, 0.0)
    distance = abs(change) - toward_zero
    if not distance > ROUNDING * max(1.0, abs(float(y.values[0]))):
        return interval, 1.0 if np.isfinite(change) else float("nan")
    t = distance / error if error else inf
    return interval, float(2 * stdtr(degrees, -t))


def _welch(errors: Sequence[float], degrees: Sequence[float]) -> float:
    """Return the degrees of freedom of a difference of independent estimates (Welch 1947)."""
    squares = [error**2 for error in errors]
    below = sum(square**2 / n for square, n in zip(squares, degrees, strict=True))
    return sum(squares) ** 2 / below if below else min(degrees)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's rule; tests that are NaN do not count.

    Example:
        >>> holm([0.01, 0.5, 0.02, float("nan")])
        [0.03, 0.5, 0.04, nan]
    """
    p = np.array(p_values, dtype=float)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    left = len(order) - np.arange(len(order))
    adjusted = p.copy()
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * left), 1.0)
    return [float(value) for value in adjusted]
