"""The differences of runs to the first run, in every number that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from nope_probe.analyses.attention import split_attention
from nope_probe.analyses.head_changes import head_changes
from nope_probe.analyses.jackknife import UNDEFINED, Interval, jackknife, rms_difference
from nope_probe.analyses.pattern import Measures, measure_pattern
from nope_probe.analyses.pattern_changes import (
    independent_difference,
    measure_differences,
    pattern_difference,
)
from nope_probe.errors import UserError, kind_of
from nope_probe.figures.intervals import bound_columns
from nope_probe.figures.words import MEASURES, Column
from nope_probe.maps.layers import shared_patterns
from nope_probe.maps.maps import AttentionMaps, ScoreMaps
from nope_probe.removal import INTACT
from nope_probe.studies.compare.heads import change_columns
from nope_probe.studies.compare.members import Member, share_sequences
from nope_probe.studies.tables import TableRow, interval_columns

PAIRED, UNPAIRED = "paired", "unpaired"
OF_OTHER = " of other"  # ends the columns of the second run
COLUMNS = ["table", "item", "measure", "run", "value", "low", "high", "base_value"]
COLUMNS += ["difference", "difference_low", "difference_high", "method"]
# Numeric columns that name rows.
LABELS = ("layer", "head", "position")
# Profiles hold hundreds of numbers, one per distance, which would hide all other numbers.
OF_FIGURE_5 = "edge_contrast"  # of the paper's figure alone: softmax does not see it
PROFILES = ("offsets", "queries")
# Tables in the order of the page; others follow.
TABLE_ORDER = ("pattern", "terms", "stages")
NUMBERS = {**MEASURES, "with_mask": MEASURES["non_relative"]}
NUMBERS |= {"without_mask": MEASURES["non_relative"], "rms": MEASURES["amplitude"]}
RESULTS = ("verdict",)  # words that are results, not names of rows


def difference(
    base: ScoreMaps | AttentionMaps, other: ScoreMaps | AttentionMaps, *, paired: bool = True
) -> pd.DataFrame:
    """Compare the positional patterns of two models, or two states of a model, as `compare` does.

    Differences are `other` less `base`. Paired differences are taken fold by fold, so that the
    sequences' common noise cancels.

    Args:
        base: the maps to compare with, as `capture_scores` or `capture_attention` returns them.
        other: the maps of the other model, of as many positions and with rows of the same queries.
        paired: whether both were captured on the same sequences, dealt to the same folds.

    Returns:
        Of attention, a row for each head and quantity, as in `compare`'s changes.csv: `layer`,
        `head`, `quantity`, `change` with its bounds (nats), `p_holm` and `changed`. Of scores, a
        row for each common layer and each measure of `measure`, with the columns of `compare`'s
        differences.csv: `item`, `measure`, `value` with its bounds, `base_value`, `difference` with
        its bounds, and `method`. The row `pattern` has the RMS of the difference of the two
        patterns, in nats, and no values.

    Raises:
        TypeError: for what are no maps of `capture_scores` or, both, of `capture_attention`.
        ValueError: for maps without a common layer, of unlike positions, rows or first keys, or,
            if paired, of different folds.

    Example:
        >>> from nope_probe import Ablation, ablated, capture_scores, difference, load, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=24)
        >>> intact = capture_scores(loaded.model, data)
        >>> with ablated(loaded.model, Ablation(remove=["mask"])):
        ...     table = difference(intact, capture_scores(loaded.model, data))
        >>> amplitudes = table[table["measure"] == "amplitude"].set_index("item")
        >>> bool(amplitudes.loc["L2", "difference_high"] < 0)
        True
    """
    if isinstance(base, AttentionMaps) and isinstance(other, AttentionMaps):
        _validate_alike(base, other, paired)
        of_heads = head_changes(split_attention(base), split_attention(other), paired=paired)
        return pd.DataFrame(change_columns(change) for change in of_heads)
    for maps in (base, other):
        if not isinstance(maps, ScoreMaps):
            raise TypeError(f"expected maps of `capture_scores`, got {kind_of(maps)}")
    assert isinstance(base, ScoreMaps)
    assert isinstance(other, ScoreMaps)
    layers = [layer for layer in base.layers if layer in other.layers]
    if not layers:
        raise UserError(f"no layer in common: {[*base.layers]} and {[*other.layers]}")
    _validate_alike(base, other, paired)
    both = [maps.by_layer for maps in (other, base)]
    rows: list[TableRow] = []
    for layer in layers:
        shared = shared_patterns([maps[layer] for maps in both])
        changes = {"pattern": pattern_difference(*shared, paired=paired)}
        x, y = (maps[layer].pattern for maps in both)
        changes |= measure_differences(x, y, paired=paired)
        after, before = (vars(measure_pattern(pattern)) for pattern in (x, y))
        for name in ("pattern", *Measures.__dataclass_fields__):
            value = after.get(name, UNDEFINED)
            row = {"item": f"L{layer}", "measure": name, **interval_columns(value=value)}
            row |= {"base_value": before.get(name, UNDEFINED).value}
            row |= interval_columns(difference=changes[name])
            rows.append({**row, "method": PAIRED if paired else UNPAIRED})
    return pd.DataFrame(rows).rename(columns={"value_low": "low", "value_high": "high"})


def _validate_alike(
    base: ScoreMaps | AttentionMaps, other: ScoreMaps | AttentionMaps, paired: bool
) -> None:
    if base.skip_keys != other.skip_keys:
        counts = f"{base.skip_keys} and {other.skip_keys}"
        raise UserError(f"the maps count {counts} keys as first: capture both on like inputs")
    if paired and not base.counts.equal(other.counts):
        raise UserError("the maps have unlike folds: pass paired=False for other sequences")


def differences_table(members: Sequence[Member], changes: pd.DataFrame) -> pd.DataFrame:
    """Return every number that the runs share, except profiles, and its difference to the first.

    Rows are by table, item (a layer, head, stage, ...), measure and run but the first. Numbers are
    compared fold by fold if the runs had the same sequences, but for differences of two RMS. All
    other differences treat the estimates as independent.

    Args:
        members: the runs; the first is the base.
        changes: the changes of heads between runs of `attention`; see `changes_table`.
    """
    of_runs = {} if changes.empty else {str(run): rows for run, rows in changes.groupby("run")}
    rows = [
        row
        for other in members[1:]
        for row in _rows(members[0], other, of_runs.get(other.label, changes))
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(base: Member, other: Member, changes: pd.DataFrame) -> Iterator[TableRow]:
    paired = share_sequences([base, other])
    of_heads: dict[tuple[int, int], dict[str, Interval]] = defaultdict(dict)
    for tested in changes.to_dict("records"):
        of_heads[tested["layer"], tested["head"]][tested["quantity"]] = _interval(tested, "change")
    shared = [name for name in base.tables if name in other.tables and name not in PROFILES]
    for name in sorted(shared, key=lambda name: (*TABLE_ORDER, name).index(name)):
        one, two = base.tables[name], other.tables[name]
        keys = [key for key in _keys(one) if key in two]
        measures = [column for column in _measures(one) if column in two]
        if not keys or not measures or not len(one) or not len(two):
            continue
        one, two = (table.assign(place=range(len(table))) for table in (one, two))
        for _, row in one.merge(two, on=keys, suffixes=("", OF_OTHER), how="inner").iterrows():
            fold_by_fold = _paired(base, other, name, row) if paired else {}
            if name == "attention":
                fold_by_fold |= of_heads[row["layer"], row["head"]]
            for column in measures:
                before, after = _interval(row, column), _interval(row, column, OF_OTHER)
                change = fold_by_fold.get(column) or independent_difference(after, before)
                yield {
                    "table": name,
                    "item": _item(row, keys),
                    "measure": column,
                    "run": other.label,
                    **{"value": after.value, "low": after.low, "high": after.high},
                    "base_value": before.value,
                    **interval_columns(difference=change),
                    "method": PAIRED if paired and column in fold_by_fold else UNPAIRED,
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
        if {*bound_columns(str(name))} <= {*table.columns} and name not in (*LABELS, OF_FIGURE_5)
    ]


def _item(row: pd.Series, keys: Sequence[str]) -> str:
    """Return the item of a row, such as `L2, mask`."""
    parts = []
    for key in sorted(keys, key=lambda key: (key != "layer", key != "head")):
        value = row[key]
        if key in ("layer", "head"):
            parts.append(f"{key[0].upper()}{value:.0f}")
        elif key in LABELS:
            parts.append(f"{key} = {value:g}")
        elif not (key == "removed" and value == INTACT.name) and value:
            parts.append(str(value))
    return ", ".join(parts).replace(", H", "H", 1) if "head" in keys else ", ".join(parts)


def _interval(row: pd.Series | Mapping[Any, Any], measure: str, suffix: str = "") -> Interval:
    columns = (measure, *bound_columns(measure))
    value, low, high = (float(row[f"{column}{suffix}"]) for column in columns)
    return Interval(value=value, low=low, high=high)


def _paired(base: Member, other: Member, table: str, row: pd.Series) -> dict[str, Interval]:
    """Return the differences of a row's numbers that both runs keep replicates of, fold by fold.

    Those of an RMS are taken of its squares.
    """
    differences = {}
    for key in base.replicates:
        name, _, column = key.partition("/")
        if name == table and key in other.replicates:
            places = int(row[f"place{OF_OTHER}"]), int(row["place"])
            x, y = (run.estimates(key, at) for run, at in zip((other, base), places, strict=True))
            if not x.weights.equal(y.weights):
                continue
            if NUMBERS.get(column, Column(column)).noise:
                squares = (z.with_values(z.values * z.values.abs()) for z in (x, y))
                differences[column] = rms_difference(*squares)
            else:
                differences[column] = jackknife(x - y)
    return differences
