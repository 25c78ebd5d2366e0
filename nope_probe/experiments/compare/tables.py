"""The runs' tables side by side, with the difference of every number to the first run's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern_changes import independent_difference, measure_differences
from nope_probe.experiments.compare.members import INTACT, Member, share_sequences
from nope_probe.figures.intervals import bound_columns
from nope_probe.figures.words import MEASURES

PAIRED, UNPAIRED = "paired", "unpaired"
OF_OTHER = " of other"  # ends the columns of the second run
COLUMNS = ["table", "item", "measure", "run", "value", "low", "high", "base_value"]
COLUMNS += ["difference", "difference_low", "difference_high", "method"]
LABELS = (
    "alpha",
    "layer",
    "head",
    "lag",
    "skip_keys",
    "step",
    "position",
)  # numbers that name rows
CLEAREST = 12
# Profiles hold a number per distance: hundreds, which would hide all others.
PROFILES = ("offsets", "head_offsets")
# Tables in the order of the page; others follow.
ORDER = ("pattern", "stages", "layers", "sources", "players")
RESULTS = ("verdict",)  # words that are results, not names of rows


def differences_table(members: Sequence[Member]) -> pd.DataFrame:
    """Return every number that the runs share, profiles aside, and its difference to the first's.

    One row per table, item (a layer, head, stage, ...), measure and run but the first. The measures
    of a pattern are compared fold by fold where the runs had the same sequences and kept their fold
    maps; all other differences are those of independent estimates.

    Args:
        members: the runs; the first is the base.
    """
    rows = [row for other in members[1:] for row in _rows(members[0], other)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(base: Member, other: Member) -> Iterator[dict[str, Any]]:
    paired = share_sequences([base, other])
    shared = [each for each in base.tables if each in other.tables and each not in PROFILES]
    for name in sorted(shared, key=lambda each: (*ORDER, each).index(each)):
        one, two = base.tables[name], other.tables[name]
        keys = [key for key in _keys(one) if key in two]
        measures = [each for each in _measures(one) if each in two]
        if not keys or not measures or not len(one) or not len(two):
            continue
        both = one.merge(two, on=keys, suffixes=("", OF_OTHER), how="inner")
        for _, row in both.iterrows():
            found = _paired(base, other, name, row) if paired else {}
            for measure in measures:
                yield {
                    "table": name,
                    "item": _item(row, keys),
                    "measure": measure,
                    "run": other.label,
                    **_compared(row, measure, found.get(measure)),
                }


def _keys(table: pd.DataFrame) -> list[str]:
    """Return the columns that name a table's rows: words, and numbers such as the layer."""
    return [
        str(name)
        for name in table.columns
        if name in LABELS
        or (name not in RESULTS and not pd.api.types.is_numeric_dtype(table[name]))
    ]


def _measures(table: pd.DataFrame) -> list[str]:
    """Return the columns that have bounds."""
    return [
        str(name)
        for name in table.columns
        if {*bound_columns(str(name))} <= {*table.columns} and name not in LABELS
    ]


def _item(row: pd.Series, keys: Sequence[str]) -> str:
    """Return what a row is about, such as `L2, mask`."""
    parts = []
    for key in sorted(keys, key=lambda key: (key != "layer", key != "head")):
        value = row[key]
        if key in ("layer", "head"):
            parts.append(f"{key[0].upper()}{value:.0f}")
        elif key in LABELS:
            parts.append(f"{key} = {value:g}")
        elif not (key == "kept" and value == INTACT):
            parts.append(str(value))
    return ", ".join(parts).replace(", H", "H", 1) if "head" in keys else ", ".join(parts)


def _compared(row: pd.Series, measure: str, paired: Interval | None) -> dict[str, Any]:
    low, high = bound_columns(measure)
    names = {"value": measure, "low": low, "high": high}
    before, after = (
        Interval(**{name: float(row[f"{column}{suffix}"]) for name, column in names.items()})
        for suffix in ("", OF_OTHER)
    )
    difference = independent_difference(after, before) if paired is None else paired
    return {
        **{"value": after.value, "low": after.low, "high": after.high},
        "base_value": before.value,
        "difference": difference.value,
        "difference_low": difference.low,
        "difference_high": difference.high,
        "method": UNPAIRED if paired is None else PAIRED,
    }


def _paired(base: Member, other: Member, table: str, row: pd.Series) -> dict[str, Interval]:
    """Return the paired differences of the measures of a row's pattern; none for other tables."""
    if table not in ("pattern", "stages"):
        return {}
    import torch

    from nope_probe.maps.folds import unpack_triangle

    name = f"({row['stage']})" if table == "stages" else f"L{row['layer']:.0f}"
    if table == "stages" and {_shown(base), _shown(other)} != {row["model"]}:
        return {}
    kept = str(row.get("kept", INTACT))
    cells = [each.folds(name, kept) for each in (other, base)]
    if cells[0] is None or cells[1] is None or cells[0].shape != cells[1].shape:
        return {}
    one, two = (unpack_triangle(torch.from_numpy(each)) for each in cells if each is not None)
    counts = None if base.fold_sizes is None else torch.tensor(base.fold_sizes)
    found = measure_differences(
        one, two, skip_keys=base.skip_keys, paired=True, counts=(counts, counts)
    )
    return {name: each for name, each in found.items() if name in MEASURES}


def _shown(member: Member) -> str:
    """Return of which model a circuit run keeps the folds: the ablated one, if there is one."""
    return "ablated" if member.manifest.get("removed") else INTACT


def clearest(table: pd.DataFrame, most: int = CLEAREST) -> list[tuple[str, ...]]:
    """Return the differences that are largest for their intervals, as text.

    Each is what it is of, the run, its value, the first run's, the difference, and whether that is
    paired. Controls and other further tables are left out where there are main ones.
    """
    main = table[table["table"].isin(ORDER)]
    table = main if len(main) else table
    arm = (table["difference_high"] - table["difference_low"]) / 2
    order = (table["difference"].abs() / arm.where(arm > 0)).dropna().sort_values(ascending=False)
    return [_text(table.loc[index]) for index in order.index[:most]]


def _text(row: pd.Series) -> tuple[str, ...]:
    measure = MEASURES[row["measure"]].title if row["measure"] in MEASURES else row["measure"]
    bounds = f"[{row['difference_low']:+.3g}, {row['difference_high']:+.3g}]"
    return (
        f"{row['item']}, {measure.replace('_', ' ')}",
        str(row["run"]),
        f"{row['value']:.3g}",
        f"{row['base_value']:.3g}",
        f"{row['difference']:+.3g} {bounds}",
        str(row["method"]),
    )
