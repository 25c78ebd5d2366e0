"""What tables say in words, clear cases and noise."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.first_line import assert_numbers_are_cells

from nope_probe import Run
from nope_probe.reports.page import Headline
from nope_probe.studies import behaviour
from nope_probe.studies.circuit import preference
from tests.support.manifests import manifest_of

Estimate = tuple[float, float, float]
CLEAR = (0.9, 0.8, 1.0)
MINUS = (-0.5, -0.7, -0.3)
NOISY = (0.3, -0.1, 0.7)
NONE = (np.nan, np.nan, np.nan)


def cells(column: str, estimate: Estimate) -> dict[str, float]:
    return dict(zip((column, f"{column}_low", f"{column}_high"), estimate, strict=True))


@pytest.mark.parametrize(
    ("locality", "said"),
    [
        (CLEAR, "near (+0.90±0.10)"),
        (MINUS, "far (-0.50±0.20)"),
        (NOISY, "neither (+0.30±0.40)"),
        (NONE, "no order"),
    ],
)
def test_keys_are_preferred_where_the_interval_says_so(locality: Estimate, said: str) -> None:
    assert preference(cells("locality", locality)) == said


def costs(measure: str, **differences: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Return rows of `behaviour.csv`, given the differences by what is removed."""
    whole = {"replacement": "none", "value": 2.5, "value_low": 2.0, "value_high": 3.0, "note": ""}
    whole |= cells("beyond_null", NONE)
    return [
        {"measure": measure, "removed": name, **whole, **cells("difference", estimate)}
        for name, estimate in {"intact": NONE, **differences}.items()
    ]


def headline_of(rows: list[dict[str, Any]]) -> Headline:
    tables = {"behaviour": pd.DataFrame(rows), "decodability": pd.DataFrame({"chance": [31.7]})}
    return behaviour.headline(Run(manifest=manifest_of(model={"name": "m"}), tables=tables))


def test_the_largest_change_of_behaviour_is_a_cell_of_its_table() -> None:
    mask, rope, both = (0.25, 0.125, 0.5), (2.0, 1.5, 2.5), (3.0, 2.5, 3.5)
    suffix = costs("loss_suffix", mask=mask, rope=rope, **{"mask+rope": both})
    lead = headline_of(suffix)
    assert lead.table is not None
    assert lead.table.to_numpy().tolist() == [
        ["intact", "0 of 2.50"],
        ["without the causal mask", "0.25±0.25"],
        ["without RoPE", "2.00±0.50"],
        ["without mask + RoPE", "3.00±0.50"],
    ]
    assert_numbers_are_cells(lead)
    assert "changes most, by 2.00±0.50 nats: without RoPE." in lead.sentence
    # Of a mask that is removed the loss is unknown, and a null is taken off written position alone.
    written = costs("loss", mask=NONE, written=(0.3, 0.2, 0.4), written_null=(9.0, 8.0, 9.9))
    beyond = {"beyond_null": 0.25, "beyond_null_low": 0.125, "beyond_null_high": 0.375}
    rows = [row | (beyond if row["removed"] == "written" else {}) for row in written]
    lead = headline_of([*rows, *costs("loss_suffix", mask=mask)])
    assert lead.table is not None
    assert lead.table.iloc[:, :2].to_numpy().tolist() == [
        ["intact", "0 of 2.50"],
        ["without the causal mask", ""],
        ["without written position", "0.25±0.12"],
    ]
    assert [*lead.table][1] == "cost"
    only_mask = headline_of([*costs("loss", mask=NONE), *costs("loss_suffix", mask=mask)])
    assert "the suffix loss changes most, by 0.25±0.25" in only_mask.sentence


def test_a_guess_of_the_position_stands_next_to_its_error() -> None:
    table = headline_of(costs("position", rope=(2.0, 1.5, 2.5))).table
    assert table is not None
    assert [*table] == ["nats ±95%", "position\nerror\n(chance 31.7)"]
