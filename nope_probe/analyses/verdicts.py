"""What numbers settle: rules from estimates with their bounds to one of a few words.

A rule asks the bounds of an estimate first. What they leave open is `unclear`, or None.
Pages ask these rules too, so they need no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ValueAndBounds = tuple[float, float, float]
MOST = 0.5  # of the pattern; of the strongest writer's share, too
HALF = 0.5  # of the intact value
LEVEL = 0.95  # of the intervals
EIGHT_FOLDS = (1,) * 8  # the sizes of the default folds, where a run states none
UNIFORM = 0.01  # nats of information: with less, a head attends uniformly
MOSTLY = 0.5  # of the information among the other keys, with which a head is one of order


def most_of(shares: Mapping[str, ValueAndBounds]) -> str | None:
    """Return the term that surely is most of the pattern, and surely more than any other term.

    Terms can cancel, so several can have more than half.

    Example:
        >>> most_of({"rotation": (0.55, 0.54, 0.56), "written": (0.95, 0.94, 0.96)})
        'written'
        >>> most_of({"rotation": (0.6, -2.0, 3.2), "written": (0.4, -2.2, 3.0)}) is None
        True
    """
    for name, (_, low, _) in shares.items():
        highest = max(
            (high for other, (_, _, high) in shares.items() if other != name), default=low
        )
        if low > MOST and low >= highest:
            return name
    return None


def main_writers(shares: Mapping[str, ValueAndBounds]) -> list[str]:
    """Return the writers with at least half the strongest writer's share, the largest first.

    Only what the lower bounds settle counts, so a writer within its noise is none of them.

    Args:
        shares: by writer, in keys and queries together.

    Example:
        >>> main_writers({"L0H1": (0.5, 0.1, 0.9), "MLP0": (0.6, 0.5, 0.7), "embed": (0.9, 0.8, 1)})
        ['embed', 'MLP0']
    """
    lows = {name: low for name, (_, low, _) in shares.items() if low > 0}
    least = MOST * max(lows.values(), default=0.0)
    main = [name for name, low in lows.items() if low >= least]
    return sorted(main, key=lambda name: -shares[name][0])


def mostly_lost(intact: ValueAndBounds, left: ValueAndBounds) -> bool | None:
    """Return whether less than half of a value is left; None if the value is within its noise.

    Args:
        intact: the intact model's value, with its bounds.
        left: the value under an intervention.

    Example:
        >>> mostly_lost((-8.0, -8.2, -7.8), (-1.0, -1.2, -0.8)), mostly_lost((2, 1, 3), (1.4, 0, 2))
        (True, False)
        >>> mostly_lost((0.1, -0.1, 0.3), (0.0, -0.1, 0.1)) is None
        True
    """
    value, low, high = intact
    if not (low > 0 or high < 0):
        return None
    return left[0] * value < HALF * value**2


def exceeds_noise(
    amplitude: float, low: float, n_patterns: int, fold_sizes: Sequence[int] = ()
) -> bool:
    """Return whether a pattern's amplitude is above 0, as one of several that were looked at.

    The interval of its square is widened so that the chance of a bound above 0 holds for all of
    them together (Bonferroni).

    Args:
        amplitude: its RMS, nats.
        low: the lower bound of its 95% interval, nats.
        n_patterns: number of layers or heads that were looked at.
        fold_sizes: sequences per fold, which the interval's degrees of freedom follow from.

    Example:
        >>> exceeds_noise(0.01, 0.002, 1), exceeds_noise(0.01, 0.002, 24)
        (True, False)
        >>> exceeds_noise(2.6, 2.5, 24)
        True
    """
    from scipy.special import stdtrit

    square, lowest = amplitude * abs(amplitude), low * abs(low)
    beyond, sizes = (1 - LEVEL) / 2, fold_sizes or EIGHT_FOLDS
    freedom = sum(sizes) ** 2 / sum(size**2 for size in sizes) - 1
    wider = stdtrit(freedom, 1 - beyond / n_patterns) / stdtrit(freedom, 1 - beyond)
    return bool(square > wider * (square - lowest))


def kinds_of(table: pd.DataFrame) -> pd.Series[str]:
    """Return the kind of each head: sink, order or content; empty if it is not classed.

    A head is a sink if more of its position is about the first key than about the others. Of the
    others, a head is one of order if half of its information among the other keys, or more, is
    position. All else looks by content. A head that attends uniformly is not classed, nor one of
    too few texts or of one text.

    Args:
        table: `attention.csv`.
    """
    import numpy as np
    import pandas as pd

    share, first = table["others_share"], table["first_position"]
    is_sink = first > table["others_position"].clip(lower=0)
    known = (table["information"] >= UNIFORM) & (is_sink | share.notna())
    kinds = np.select([~known, is_sink, share >= MOSTLY], ["", "sink", "order"], "content")
    return pd.Series(kinds, table.index)
