"""The differences of the runs to the first one: of their maps, and of every number they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from nope_probe.analyses.jackknife import Interval, standard_error
from nope_probe.analyses.pattern_changes import (
    independent_difference,
    measure_differences,
    pattern_difference,
)
from nope_probe.errors import UserError
from nope_probe.experiments.compare.members import INTACT, Map, Member, share_sequences
from nope_probe.figures.intervals import bound_columns, interval_text
from nope_probe.figures.words import MEASURES
from nope_probe.maps.centred import kept_cells, row_centred
from nope_probe.maps.folds import unpack_triangle

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
# Profiles hold a number per distance: hundreds, which would hide all others.
PROFILES = ("offsets", "head_offsets")
# Tables in the order of the page; others follow.
TABLE_ORDER = ("pattern", "stages", "layers", "sources", "players")
RESULTS = ("verdict",)  # words that are results, not names of rows


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of one map's pattern to the first run's.

    Attributes:
        values: the other pattern less the first, nats (inner products for a Gram map).
        rms: its RMS, corrected for noise; bounds are NaN where the runs kept no fold maps.
        noise: the typical standard error of a cell; NaN if it is not known.
        paired: whether it was taken fold by fold.
    """

    values: Map
    rms: Interval
    noise: float
    paired: bool

    @property
    def is_significant(self) -> bool | None:
        """Whether it exceeds the noise; None if that is not known."""
        return None if np.isnan(self.rms.low) else self.rms.low > 0

    def __str__(self) -> str:
        if self.is_significant is False:
            return "no difference beyond noise"
        if self.is_significant is None:
            return f"{self.rms.value:.3g}"
        return interval_text((self.rms.value, self.rms.low, self.rms.high), ".3g")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One map in all runs.

    Attributes:
        name: its name, such as `L2` or `(f)`.
        patterns: by run, the map less each row's mean over the kept keys.
        differences: by run but the first.
    """

    name: str
    patterns: dict[str, Map]
    differences: dict[str, Difference]


def compare_maps(members: Sequence[Member]) -> list[Compared]:
    """Return the maps that all runs have, with their differences.

    Raises:
        UserError: if they have no map in common, though some have maps.
    """
    names = [name for name in members[0].maps if all(name in each.maps for each in members)]
    if not names and any(each.maps for each in members):
        raise UserError("the runs have no maps in common")
    found = [_compare(name, members) for name in names if _is_whole(name, members)]
    return found


def _is_whole(name: str, members: Sequence[Member]) -> bool:
    """Return whether no run hides keys before the query in this map, as a sliding window does."""
    return all(
        np.isfinite(each.maps[name][kept_cells(len(each.maps[name])).numpy()]).all()
        for each in members
    )


def _compare(name: str, members: Sequence[Member]) -> Compared:
    skip_keys = members[0].skip_keys
    patterns = {
        each.label: row_centred(torch.from_numpy(each.maps[name]).double(), skip_keys).numpy()
        for each in members
    }
    return Compared(
        name=name,
        patterns=patterns,
        differences={
            each.label: _difference(name, members[0], each, patterns) for each in members[1:]
        },
    )


def _difference(name: str, base: Member, other: Member, patterns: dict[str, Map]) -> Difference:
    values = patterns[other.label] - patterns[base.label]
    paired = share_sequences([base, other])
    one, two = (each.folds(name) for each in (other, base))
    if one is None or two is None:
        rms, noise = _without_folds(name, base, other, values)
        return Difference(values=values, rms=rms, noise=noise, paired=False)
    x, y = (unpack_triangle(torch.from_numpy(each)) for each in (one, two))
    paired = paired and x.shape == y.shape
    n_x, n_y = (
        None if each.fold_sizes is None else torch.tensor(each.fold_sizes) for each in (other, base)
    )
    rms = pattern_difference(x, y, skip_keys=base.skip_keys, paired=paired, counts=(n_x, n_y))
    parts = (
        [standard_error(x - y, n_x)] if paired else [standard_error(x, n_x), standard_error(y, n_y)]
    )
    noise = float(np.sqrt(sum(float(each.square().nanmean()) for each in parts)))
    return Difference(values=values, rms=rms, noise=noise, paired=paired)


def _without_folds(
    name: str, base: Member, other: Member, values: Float[np.ndarray, "query_pos key_pos"]
) -> tuple[Interval, float]:
    """Return the RMS of a difference less its noise, from the standard errors of single cells."""
    errors = [each.errors(name) for each in (base, other)]
    square, noise = float(np.nanmean(values**2)), float("nan")
    if errors[0] is not None and errors[1] is not None:
        noise = float(np.sqrt(sum(np.nanmean(each**2) for each in errors if each is not None)))
        square -= noise**2
    rms = float(np.sign(square) * abs(square) ** 0.5)
    return Interval(value=rms, low=float("nan"), high=float("nan")), noise


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
    for name in sorted(shared, key=lambda each: (*TABLE_ORDER, each).index(each)):
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
