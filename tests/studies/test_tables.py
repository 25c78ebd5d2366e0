"""The tables of a run: their columns, with and without rows."""

from io import StringIO

import pandas as pd
import pytest

from nope_probe.analyses.attribution import LayerValues, MeanValue, Values
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern import Measures
from nope_probe.analyses.pattern_changes import MaskEffect
from nope_probe.analyses.splits import MeanCovariance
from nope_probe.studies.tables import (
    head_pattern_table,
    mean_covariance_table,
    mean_table,
    measures_table,
    non_relative_table,
    pattern_table,
    terms_table,
)


def interval(value: float) -> Interval:
    return Interval(value=float(value), low=value - 1.0, high=value + 2.0)


def bounds(**values: float) -> dict[str, float]:
    """The columns of some intervals."""
    row = {}
    for name, value in values.items():
        row |= {name: value, f"{name}_low": value - 1, f"{name}_high": value + 2}
    return row


EFFECT = MaskEffect(with_mask=interval(0.3), without_mask=interval(0.2), difference=interval(0.1))
VALUES = Values(lead=interval(5), amplitude=interval(6), kept=interval(7))
HEAD = LayerValues(layer=1, head=2, conditions={"mask": VALUES}, terms={})
MEASURES = Measures(**{name: interval(1) for name in Measures.__dataclass_fields__})
TERMS = MeanCovariance(layer=0, mean=interval(3), covariance=interval(4))
MEANS = {"lead": MeanValue(mean=interval(8), n_layers=30, n_below_half=11)}
LABELS, NAMED = ("tokens", "removed"), {"removed": "w_q", "replacement": "mean"}
LABELLED = ({"tokens": "text", "removed": "mask"}, [MEASURES])
TABLES = {
    "non_relative": (
        non_relative_table({"text": [EFFECT]}, [0]),
        non_relative_table({"text": []}, []),
    ),
    "controls": (measures_table([LABELLED], [0], LABELS), measures_table([], [], LABELS)),
    "mean_covariance": (mean_covariance_table([TERMS]), mean_covariance_table([])),
}
ROWS = {
    "terms": (
        terms_table([({"layer": 0}, {"lead": {"mask": interval(3)}})]),
        {"layer": 0, "of": "lead", "term": "mask", **bounds(size=3)},
    ),
    "pattern": (
        pattern_table([(NAMED, [MEASURES])], [VALUES], [0]),
        {"layer": 0, **NAMED}
        | bounds(**dict.fromkeys(Measures.__dataclass_fields__, 1))
        | bounds(kept=7),
    ),
    "head_pattern": (
        head_pattern_table([HEAD]),
        {"layer": 1, "head": 2, "removed": "mask", **bounds(lead=5, amplitude=6, kept=7)},
    ),
    "over_layers": (
        mean_table([(NAMED, MEANS)]),
        {**NAMED, **bounds(lead=8), "lead_layers": 30, "lead_below_half": 11},
    ),
    "mean_covariance": (
        TABLES["mean_covariance"][0],
        {"layer": 0, "of": "pattern", "term": "mean", **bounds(size=3)},
    ),
    "controls": (
        TABLES["controls"][0],
        {"layer": 0, "tokens": "text", "removed": "mask"}
        | bounds(**dict.fromkeys(Measures.__dataclass_fields__, 1)),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_rows_keeps_its_columns_on_disk(name: str):
    full, empty = TABLES[name]
    read = pd.read_csv(StringIO(empty.to_csv(index=False)))
    assert len(read) == 0
    assert list(read) == list(full)


@pytest.mark.parametrize("name", ROWS)
def test_each_number_stands_with_its_bounds(name: str):
    table, row = ROWS[name]
    assert [*table] == [*row]
    assert table.iloc[0].to_dict() == row
