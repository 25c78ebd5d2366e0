"""The tables of a run, as in its CSV files: one row per layer and item, one column per number.

A table without rows keeps its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import pandas as pd

from nope_probe.analyses.attention import AttentionSplit
from nope_probe.analyses.jackknife import Interval, Intervals
from nope_probe.analyses.pattern import Measures
from nope_probe.analyses.positions import position_terms, readers, written_terms
from nope_probe.analyses.reader import Side
from nope_probe.figures.intervals import bound_columns
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.positions import PositionSums
from nope_probe.removal import Writer
from nope_probe.run.folder import REPLICATES

TableRow = dict[str, Any]
WEIGHTS = (  # of a head's attention weights
    "information",
    "first_position",
    "first_content",
    "others_position",
    "others_content",
    "positional_share",
    "others_share",
    "first_weight",
)
ATTENTION = (*WEIGHTS, "pattern_missed")
GAPS = ("positional_share_gap", "others_share_gap")


def interval_columns(**intervals: Interval) -> TableRow:
    """Return each interval as columns: its name, name_low, name_high, and its replicates.

    A run takes the columns of replicates out of its tables, and keeps them in a file.
    """
    columns: TableRow = {}
    for name, interval in intervals.items():
        columns |= interval.columns(name)
    replicates = {f"{name}{REPLICATES}": i.replicates for name, i in intervals.items()}
    return columns | {name: kept for name, kept in replicates.items() if kept is not None}


def table_of(rows: Iterable[TableRow] | pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a table with some columns, if it has rows or not, and their replicates."""
    table = pd.DataFrame(rows)
    replicates = [name for name in table if str(name).endswith(REPLICATES)]
    return table.reindex(columns=[*columns, *replicates])


def mean_columns(name: str, means: Intervals) -> dict[str, list[Any]]:
    """Return means over sequences as columns, a row for each: see `interval_columns`."""
    ends = zip(interval_names(name), (means.value, means.low, means.high), strict=True)
    values = means.replicates.flatten(1).T
    replicates = [Estimates(values=row, weights=means.weights) for row in values]
    columns: dict[str, list[Any]] = {column: end.flatten().tolist() for column, end in ends}
    return {**columns, f"{name}{REPLICATES}": replicates}


def interval_names(*names: str) -> list[str]:
    """Return the columns of some intervals.

    Example:
        >>> interval_names("share", "rms")
        ['share', 'share_low', 'share_high', 'rms', 'rms_low', 'rms_high']
    """
    return [column for name in names for column in (name, *bound_columns(name))]


def columns_of(holder: object, names: Iterable[str]) -> TableRow:
    """Return the columns of the intervals that an object has as attributes of these names."""
    return interval_columns(**{name: getattr(holder, name) for name in names})


def attention_table(
    splits: Mapping[tuple[int, int], AttentionSplit], names: Sequence[str] = ATTENTION
) -> pd.DataFrame:
    """Return the table of attention: layer, head, the parts (nats) and shares, with their bounds.

    `information` is the sum of its four parts. `positional_share`, `others_share`, `first_weight`
    and `pattern_missed` are shares. The two columns of gaps are the upper less the lower
    bound of the first two.

    Args:
        splits: the attention of each head, by layer and head.
        names: the columns.
    """
    rows: list[TableRow] = []
    for (layer, head), split in splits.items():
        parts = {name: getattr(split, name) for name in names}
        intervals = {
            name: part if isinstance(part, Interval) else split.interval(name)
            for name, part in parts.items()
        }
        gaps = {name: getattr(split, name) for name in GAPS}
        rows.append({"layer": layer, "head": head, **interval_columns(**intervals), **gaps})
    return pd.DataFrame(rows)


def measures_table(
    measured: Iterable[tuple[TableRow, Sequence[Measures]]],
    layers: Sequence[int],
    labels: Sequence[str] = ("removed",),
) -> pd.DataFrame:
    """Return the table of pattern measures: layer, the labels, and each measure with its bounds.

    Args:
        measured: groups of layers, each with its values of the labels.
        layers: the layers' numbers.
        labels: the columns that name the groups.
    """
    names = tuple(Measures.__dataclass_fields__)
    rows = [
        {"layer": layer, **values, **interval_columns(**vars(measures))}
        for values, of_group in measured
        for layer, measures in zip(layers, of_group, strict=True)
    ]
    return table_of(rows, ["layer", *labels, *interval_names(*names)])


def term_table(sums: PositionSums) -> pd.DataFrame:
    """Return the terms of the lead and of the pattern of every reader, a row each.

    A reader is a layer, or a head if heads were kept.
    """
    return pd.DataFrame(
        {**names, "of": asked.question, "term": name, **interval_columns(**vars(term))}
        for names, reader in readers(sums)
        for asked in reader.questions()
        for name, term in position_terms(asked).items()
    )


def writer_table(sums: PositionSums) -> pd.DataFrame:
    """Return what each writer brings to the written terms of every lead and pattern.

    There is a row for each side, keys and queries, in the order in which writers write. The rows of
    a lead or pattern add up to its three written terms; see `written_terms`.
    """
    return pd.DataFrame(
        {
            **{**names, "of": asked.question, "side": side, "writer": writer},
            **interval_columns(**vars(terms[writer])),
        }
        for names, reader in readers(sums)
        for asked in reader.questions()
        for side in get_args(Side)
        for terms in [written_terms(asked, side)]
        for writer in sorted(terms, key=lambda name: Writer(name).order)
    )
