"""What a run of `circuit` found, one sentence per section: the headings of its page."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import pandas as pd

from nope_probe.experiments.wording import capitalised, listed
from nope_probe.figures.intervals import ValueAndBounds, interval_of

Rows = dict[str, ValueAndBounds]


def localities(table: pd.DataFrame, model: str) -> Rows:
    """Return per stage the rank correlation of a value with its key's position.

    Args:
        table: `stages.csv`.
        model: intact or ablated.
    """
    if not len(table):
        return {}
    rows = table[table["model"] == model]
    return {str(row["stage"]): interval_of(row, "locality") for _, row in rows.iterrows()}


def preferences(rows: Rows) -> str:
    """Return at which stages near keys have larger values, and at which far keys."""
    near = [stage for stage, (_, low, _) in rows.items() if low > 0]
    far = [stage for stage, (_, _, high) in rows.items() if high < 0]
    neither = [stage for stage in rows if stage not in (*near, *far)]
    kinds = {
        "near keys have larger values": near,
        "far keys have larger values": far,
        "no significant trend": neither,
    }
    parts = [f"{kind} at {stage_list(stages)}" for kind, stages in kinds.items() if stages]
    return "; ".join(parts) or "a sliding window hides keys at every stage"


def have_opposite_signs(one: ValueAndBounds, other: ValueAndBounds) -> bool:
    """Return whether two stages' correlations significantly differ in sign."""
    return bool((one[1] > 0 and other[2] < 0) or (one[2] < 0 and other[1] > 0))


def most_changed(rows: Rows, intact: Rows, n: int = 2) -> list[str]:
    """Return the stages whose correlation an ablation changes most, the first the most."""
    both = [s for s in rows if s in intact and not isnan(rows[s][0] - intact[s][0])]
    return sorted(both, key=lambda stage: -abs(rows[stage][0] - intact[stage][0]))[:n]


def flow_finding(table: pd.DataFrame, removed: Sequence[str]) -> str:
    """Return which keys each stage of the drawn model prefers."""
    return capitalised(preferences(localities(table, "ablated" if removed else "intact")))


def inversion_finding(table: pd.DataFrame, removed: Sequence[str]) -> str:
    """Return at which stages the positional pattern changes its sign."""
    rows = localities(table, "ablated" if removed else "intact")
    order = sorted(stage for stage, (value, _, _) in rows.items() if not isnan(value))
    flips: list[str] = []
    last = ""
    for stage in order:
        if rows[stage][1] > 0 or rows[stage][2] < 0:
            if last and have_opposite_signs(rows[last], rows[stage]):
                flips.append(stage)
            last = stage
    if not flips:
        return "No stage significantly inverts the positional pattern"
    return f"The positional pattern is inverted at {stage_list(flips)}"


def change_finding(table: pd.DataFrame) -> str:
    """Return the stage that an ablation changes most."""
    rows, intact = localities(table, "ablated"), localities(table, "intact")
    most = most_changed(rows, intact, 1)
    if not most:
        return "Stage by stage: intact, ablated, difference"
    [stage] = most
    change = f"from {intact[stage][0]:+.2f} to {rows[stage][0]:+.2f}"
    return f"Stage by stage: locality changes most at ({stage}), {change}"


def stage_list(stages: Sequence[str]) -> str:
    """Return stages by letter, runs of three and more as such.

    Example:
        >>> stage_list("abcdefgi"), stage_list("fg")
        ('(a) to (g) and (i)', '(f) and (g)')
    """
    runs: list[str] = []
    for stage in sorted(stages):
        if runs and ord(stage) == ord(runs[-1][-1]) + 1:
            runs[-1] += stage
        else:
            runs.append(stage)
    words = [
        [f"({run[0]}) to ({run[-1]})"] if len(run) > 2 else [f"({stage})" for stage in run]
        for run in runs
    ]
    return listed([word for each in words for word in each])
