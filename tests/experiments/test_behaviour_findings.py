"""The headings of the behaviour page: each rule against small tables, clear ones and noise."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.behaviour import sections
from nope_probe.experiments.behaviour.sections import headline


def cells(column: str, value: float, low: float, high: float) -> dict[str, float]:
    return {column: value, f"{column}_low": low, f"{column}_high": high}


def difference(measure: str, condition: str, *numbers: float) -> dict[str, object]:
    return {"measure": measure, "condition": condition, **cells("difference", *numbers)}


def test_the_removal_that_raises_the_loss_most_is_named() -> None:
    rows = [
        difference("order", "mask", 9.0, 8.0, 10.0),
        difference("loss_suffix", "rope", 0.5, 0.4, 0.6),
        difference("loss_suffix", "mask", 2.0, 1.5, 2.5),
        difference("loss_suffix", "w_q:mean", 5.0, -1.0, 11.0),
        difference("loss_suffix", "mlp", np.nan, np.nan, np.nan),
    ]
    assert sections.difference_finding(pd.DataFrame(rows)) == (
        "Without the causal mask the suffix's loss rises most: +2 nats"
    )
    assert sections.difference_finding(pd.DataFrame(rows[3:])) == (
        "No removal raises the suffix's loss beyond the noise"
    )
    assert sections.difference_finding(pd.DataFrame(rows[:1])) == (
        "Without the causal mask the order rises most: +9 nats"
    )


@pytest.mark.parametrize(
    ("measure", "numbers", "ending"),
    [
        ("in_context", (0.9, 0.5, 1.3), "Loss: the intact model's falls by 0.9 nats along it"),
        ("in_context", (-0.9, -1.3, -0.5), "Loss: the intact model's rises by 0.9 nats along it"),
        ("extrapolation", (0.9, 0.5, 1.3), "Loss: the intact model's rises by 0.9 nats along it"),
        (
            "extrapolation",
            (-0.9, -1.3, -0.5),
            "Loss: the intact model's falls by 0.9 nats along it",
        ),
        ("in_context", (0.9, -0.1, 1.9), "change along it is not distinguishable from noise"),
        ("in_context", (np.nan, np.nan, np.nan), "Loss"),
    ],
)
def test_the_loss_along_the_window(
    measure: str, numbers: tuple[float, float, float], ending: str
) -> None:
    rows = [
        {"measure": measure, "condition": "intact", **cells("value", *numbers)},
        {"measure": measure, "condition": "mask", **cells("value", 7.0, 6.0, 8.0)},
        {"measure": "loss", "condition": "intact", **cells("value", 5.0, 4.0, 6.0)},
    ]
    heading = sections.window_finding(pd.DataFrame(rows), measure, "Loss", "along it")
    assert heading.startswith("Loss")
    assert heading.endswith(ending)


def test_position_is_readable_where_the_interval_ends_below_chance() -> None:
    table = pd.DataFrame(
        [
            {"condition": name, "layer": layer, "chance": 9.0, **cells("distance", *numbers)}
            for name, layer, numbers in (
                ("intact", 0, (4.0, 3.0, 5.0)),
                ("intact", 1, (2.0, 1.0, 3.0)),
                ("mask", 1, (8.5, 8.0, 9.5)),
            )
        ]
    )
    assert sections.decodability_finding(table) == (
        "Position can be read from the residual stream to 2.0 positions (chance 9.0), without "
        "the causal mask to 8.5"
    )
    noisy = table.assign(distance_high=9.5)
    assert "cannot be read" in sections.decodability_finding(noisy)
    behaviour = pd.DataFrame(columns=["measure", "condition", "value", "difference"])
    for rows, said in ((table, "can be read"), (noisy, "cannot be read")):
        tables = {"behaviour": behaviour, "decodability": rows}
        [sentence] = headline({"model": {"name": "m"}}, tables)
        assert sentence.startswith(f"Position {said} from the residual stream of m ")


def test_correlations_over_all_layers_head_the_bridge() -> None:
    rows = [("all", "loss", 0.5), ("all", "copy", np.nan), (0, "loss", -0.9)]
    table = pd.DataFrame(
        [
            {"over": "conditions", "layer": layer, "effect": effect, "rho": rho, "n": 7}
            for layer, effect, rho in rows
        ]
    )
    heads = pd.DataFrame([{"over": "heads", "layer": "all", "effect": "loss", "rho": 0.9, "n": 16}])
    table = pd.concat([table, heads], ignore_index=True)
    assert sections.bridge_finding(table) == (
        "Pattern and behaviour: rank correlation over 7 removals, loss +0.50"
    )
    assert "too few" in sections.bridge_finding(table[1:2])
    assert sections.correlation_finding(table).endswith("between L0 and loss, -0.90")
    assert "too few" in sections.correlation_finding(table[:2])


def test_the_head_that_the_loss_needs_most() -> None:
    table = pd.DataFrame(
        [
            {"layer": 2, "head": 1, **cells("loss", 0.25, 0.1, 0.4)},
            {"layer": 3, "head": 0, **cells("loss", 0.5, -0.1, 1.1)},
        ]
    )
    assert sections.head_finding(table) == (
        "Heads: without the W_Q of L2H1 the loss rises most, +0.25 nats"
    )
    assert sections.head_finding(table[1:]).endswith("not distinguishable from noise")
