"""The tables of a run: their columns, with and without rows."""

from io import StringIO

import pandas as pd
import pytest

from nope_probe.analyses.attribution import Attribution, LayerAttribution, Loss, Term
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern import Measures
from nope_probe.analyses.pattern_changes import MaskEffect
from nope_probe.analyses.splits import MeanCovariance
from nope_probe.studies.tables import (
    mean_covariance_table,
    measures_table,
    non_relative_table,
    sources_table,
    terms_table,
    weights_table,
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


def loss(lost: float) -> Loss:
    return Loss(
        lost=interval(lost),
        amplification=interval(13),
        from_sources=interval(11),
        size=interval(14),
    )


def attribution(size: float) -> Attribution:
    losses = {"mask": loss(7), "rope[0:5]": loss(8), "mlp": loss(9), "w_q": loss(10)}
    return Attribution(
        size=interval(size),
        without_sources=interval(2),
        from_sources=interval(1),
        terms={"mask": Term(size=interval(3), share=interval(4))},
        losses=losses | {"mask+window": loss(12)},
    )


LAYER = LayerAttribution(layer=0, lead=attribution(5), pattern=attribution(6))
MEASURES = Measures(**{name: interval(1) for name in Measures.__dataclass_fields__})
TERMS = MeanCovariance(
    layer=0,
    mean=interval(1),
    covariance=interval(2),
    mean_rms=interval(3),
    covariance_rms=interval(4),
)
LABELS = ("tokens", "removed")
LABELLED = ({"tokens": "text", "removed": "mask"}, [MEASURES])
TABLES = {
    "sources": (sources_table([LAYER]), sources_table([])),
    "terms": (terms_table([LAYER]), terms_table([])),
    "weights": (weights_table({"none": [LAYER], "mean": [LAYER]}), weights_table({})),
    "non_relative": (
        non_relative_table({"text": [EFFECT]}, [0]),
        non_relative_table({"text": []}, []),
    ),
    "pattern": (measures_table([LABELLED], [0], LABELS), measures_table([], [], LABELS)),
    "mean_covariance": (mean_covariance_table([TERMS]), mean_covariance_table([])),
}
FIRST_ROWS = {
    "sources": {"layer": 0, "of": "lead", "source": "mask", **bounds(lost=7)},
    "terms": {"layer": 0, "of": "lead", "term": "mask", **bounds(share=4, size=3)},
    "weights": {"layer": 0, "of": "lead", "removed": "mlp", "replacement": "none"}
    | bounds(lost=9, amplification=13),
    "mean_covariance": {"layer": 0, "of": "pattern", "term": "mean", **bounds(share=1, size=3)},
    "pattern": {"layer": 0, "tokens": "text", "removed": "mask"}
    | bounds(**dict.fromkeys(Measures.__dataclass_fields__, 1)),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_rows_keeps_its_columns_on_disk(name: str):
    full, empty = TABLES[name]
    read = pd.read_csv(StringIO(empty.to_csv(index=False)))
    assert len(read) == 0
    assert list(read) == list(full)


@pytest.mark.parametrize("name", FIRST_ROWS)
def test_each_number_stands_with_its_bounds(name: str):
    assert TABLES[name][0].iloc[0].to_dict() == FIRST_ROWS[name]


def test_a_loss_stands_in_one_table_alone():
    sources, weights = TABLES["sources"][0], TABLES["weights"][0]
    assert sources["source"].tolist() == ["mask", "rope[0:5]"] * 2, "bands are of a source"
    assert weights["removed"].tolist() == ["mlp", "mlp", "w_q", "w_q"]
    assert weights["replacement"].tolist() == ["none", "none", "mean", "mean"]
    assert weights["of"].tolist() == ["lead", "pattern"] * 2
    terms = TABLES["terms"][0]
    assert terms["term"].tolist() == ["mask", "without_sources"] * 2
    assert terms["share"].isna().tolist() == [False, True] * 2
