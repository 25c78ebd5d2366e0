"""The headings of the behaviour page: each rule against small tables, clear ones and noise."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.behaviour import findings


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
    assert findings.difference_finding(pd.DataFrame(rows)) == (
        "Without the causal mask the loss rises most: +2 nats"
    )
    assert findings.difference_finding(pd.DataFrame(rows[3:])) == (
        "No removal raises the loss beyond the noise"
    )
    assert findings.difference_finding(pd.DataFrame(rows[:1])) == (
        "Without the causal mask the order rises most: +9 nats"
    )


@pytest.mark.parametrize(
    ("slope", "half", "ending"),
    [
        (-0.1, 0.01, "the intact model's falls from 8.00 to 7.10 nats"),
        (0.1, 0.01, "the intact model's rises from 8.00 to 8.90 nats"),
        (-0.1, 5.0, "change along the window is not distinguishable from noise"),
    ],
)
def test_the_loss_along_the_window(slope: float, half: float, ending: str) -> None:
    rows = [
        {"condition": name, "position": at, **cells("loss", loss, loss - half, loss + half)}
        for name, shift in (("intact", 0.0), ("mask", 3.0))
        for at in range(11)
        for loss in [8.0 + slope * (at - 1) + shift]
    ]
    heading = findings.position_finding(pd.DataFrame(rows), "Loss by position")
    assert heading.startswith("Loss by position: ")
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
    assert findings.decodability_finding(table) == (
        "Position can be read from the residual stream to 2.0 positions (chance 9.0), without "
        "the causal mask to 8.5"
    )
    noisy = table.assign(distance_high=9.5)
    assert "cannot be read" in findings.decodability_finding(noisy)


def test_correlations_over_all_layers_head_the_bridge() -> None:
    rows = [("all", "loss", 0.5), ("all", "copy", np.nan), (0, "loss", -0.9)]
    table = pd.DataFrame(
        [{"layer": layer, "effect": effect, "rho": rho, "n": 7} for layer, effect, rho in rows]
    )
    assert findings.bridge_finding(table) == (
        "Pattern and behaviour: rank correlation over 7 removals, loss +0.50"
    )
    assert "too few" in findings.bridge_finding(table[1:2])


def test_the_head_that_the_loss_needs_most() -> None:
    table = pd.DataFrame(
        [
            {"layer": 2, "head": 1, **cells("loss", 0.25, 0.1, 0.4)},
            {"layer": 3, "head": 0, **cells("loss", 0.5, -0.1, 1.1)},
        ]
    )
    assert findings.head_finding(table) == (
        "Heads: without the W_Q of L2H1 the loss rises most, +0.25 nats"
    )
    assert findings.head_finding(table[1:]).endswith("not distinguishable from noise")
