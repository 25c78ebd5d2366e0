"""What tables say in words, clear cases and noise."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.run.folder import Run
from nope_probe.studies import behaviour
from nope_probe.studies.circuit import inversion
from nope_probe.studies.tidy import preferred_keys
from tests.support.manifests import manifest_of

Estimate = tuple[float, float, float]
CLEAR = (0.9, 0.8, 1.0)
MINUS = (-0.5, -0.7, -0.3)
NOISY = (0.3, -0.1, 0.7)
NONE = (np.nan, np.nan, np.nan)


def cells(column: str, estimate: Estimate) -> dict[str, float]:
    return dict(zip((column, f"{column}_low", f"{column}_high"), estimate, strict=True))


@pytest.mark.parametrize(
    ("locality", "keys"), [(CLEAR, "near"), (MINUS, "far"), (NOISY, "neither"), (NONE, "neither")]
)
def test_keys_are_preferred_where_the_interval_says_so(locality: Estimate, keys: str) -> None:
    assert preferred_keys(locality) == keys


@pytest.mark.parametrize(
    ("stages", "becomes"),
    [
        ({"f": CLEAR, "g": MINUS, "h": CLEAR}, "restored"),
        ({"f": CLEAR, "g": MINUS, "h": NOISY}, "inverted"),
        ({"f": MINUS, "g": CLEAR}, "inverted"),
        ({"f": CLEAR, "g": NOISY, "h": CLEAR}, "kept"),
        ({"f": CLEAR, "g": NONE}, "no order"),
        ({"g": CLEAR, "h": CLEAR}, "undefined"),
    ],
)
def test_an_inversion_is_named_only_if_intervals_are_on_opposite_sides_of_zero(
    stages: dict[str, Estimate], becomes: str
) -> None:
    assert inversion(stages) == becomes


def test_the_cost_of_the_mask_is_told_first_and_the_table_shows_position_alone() -> None:
    rows = [
        {"measure": "loss_suffix", "removed": name, "replacement": "none", "value": 2.5}
        | {"value_low": 2.0, "value_high": 3.0, "note": ""}
        | cells("difference", estimate)
        for name, estimate in (
            ("intact", NONE),
            ("mlp", (7.9, 7.5, 8.3)),
            ("mask", (0.125, 0.1, 0.15)),
            ("rope", (2.0, 1.5, 2.5)),
        )
    ]
    tables = {"behaviour": pd.DataFrame(rows), "decodability": pd.DataFrame({"chance": [31.7]})}
    lead = behaviour.headline(Run(manifest=manifest_of(model={"name": "m"}), tables=tables))
    assert lead.sentence == (
        "Without the causal mask, the suffix loss of m behind a bidirectional prefix changes by "
        "+0.12 nats [+0.10, +0.15]."
    )
    assert lead.table["without"].tolist() == ["(intact)", "causal mask", "RoPE"]
    assert lead.table.iloc[2].tolist() == ["RoPE", "+2.00 [+1.50, +2.50]"]
