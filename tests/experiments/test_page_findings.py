"""The headings of the pages of scores, circuit, simulate and compare, against tables by hand."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.circuit import sections as circuit
from nope_probe.experiments.scores import sections as scores
from nope_probe.experiments.simulation import sections as simulation
from nope_probe.figures.theory import Curves

NAN = np.nan


def pattern(*rows: tuple[int, float, float, float, float]) -> pd.DataFrame:
    columns = ["layer", "amplitude", "amplitude_low", "locality_low", "locality_high"]
    return pd.DataFrame(rows, columns=columns).assign(relative_r2=0.87)


def stages(**localities: tuple[float, float, float]) -> pd.DataFrame:
    """A row per stage; names that end in _ are of the ablated model."""
    names = ("locality", "locality_low", "locality_high")
    return pd.DataFrame(
        [
            {"stage": name[0], "model": "ablated" if name.endswith("_") else "intact"}
            | dict(zip(names, each, strict=True))
            for name, each in localities.items()
        ]
    )


def test_the_strongest_layer_is_named_with_the_keys_that_it_prefers() -> None:
    table = pattern((0, 0.5, 0.4, 0.2, 0.3), (1, 2.618, 2.5, -0.9, -0.7), (2, 9.0, -1.0, 0.1, 0.2))
    assert scores.pattern_finding(table) == (
        "The positional pattern is strongest in L1, 2.6 nats, and prefers far keys there"
    )
    assert scores.distance_finding(table) == (
        "Diagonal-normalised scores: distance alone explains 87% of L1's positional pattern"
    )


def test_without_a_clear_layer_nothing_is_said_of_keys_or_distance() -> None:
    table = pattern((0, 0.5, -0.4, 0.2, 0.3))
    assert "not distinguishable from noise" in scores.pattern_finding(table)
    assert "not distinguishable from noise" in scores.distance_finding(table)


def test_the_level_of_the_rows_is_their_share_of_the_variance() -> None:
    within = np.array([[NAN, NAN, NAN], [-1.0, 1.0, NAN], [-1.0, 1.0, NAN]])
    level = np.array([0.0, 3.0, -3.0])[:, None]
    # variance 1 within the rows, 9 between them
    found = scores.level_finding(np.nan_to_num(within) + level, within, 5)
    assert "90% of L5's variance is row means" in found
    assert "do not differ" in scores.level_finding(np.zeros((3, 3)), within, 5)


def test_the_head_of_a_measure_is_the_one_farthest_from_zero_beyond_its_interval() -> None:
    heads = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "locality": [0.5, -0.8, 0.9]})
    heads["locality_low"], heads["locality_high"] = [0.4, -0.9, -0.1], [0.6, -0.7, 1.0]
    assert scores.head_finding(heads, "locality") == (
        "Heads: locality is farthest from 0 in L0H1, -0.8"
    )
    assert scores.head_finding(heads[2:], "locality") == (
        "Heads: locality is not distinguishable from noise"
    )


def test_the_drawn_model_is_the_ablated_one() -> None:
    table = stages(c=(0.8, 0.7, 0.9), g=(0.5, 0.4, 0.6), c_=(0.75, 0.7, 0.8), g_=(-0.5, -0.6, -0.4))
    assert circuit.flow_finding(table, ("mask",)) == (
        "Near keys have larger values at (c); far keys have larger values at (g)"
    )
    assert circuit.flow_finding(table, ()) == "Near keys have larger values at (c) and (g)"


@pytest.mark.parametrize("worst", [0, 3])
def test_the_simulation_names_the_worst_gap_and_the_layers_in_order(worst: int) -> None:
    table = pd.DataFrame({"alpha": [0.0, 0.0, 0.2, 0.2], "layer": [0, 1, 0, 1]})
    table["verdict"] = ["flat", "increasing", "falling", "flat"]
    table["gap_rms"] = [0.03 if row == worst else 0.001 for row in range(4)]
    where = {0: "L0 at alpha = 0", 3: "L1 at alpha = 0.2"}[worst]
    assert simulation.gap_finding(table).endswith(f"differ by 0.03 nats RMS at most, in {where}")
    assert simulation.order_finding(table) == (
        "Layers in which nearer keys score higher: L1 at alpha = 0; none at alpha = 0.2"
    )


def test_the_spread_of_scores_is_that_of_the_layer_with_the_largest() -> None:
    scores = np.array([[[np.nan, np.nan], [1.0, np.nan]], [[np.nan, 2.0], [2.75, np.nan]]])
    assert simulation.scale_finding("alpha = 0", scores, 1.0) == (
        "Scores at alpha = 0, on the paper's scale of 0 to 1 nat: a layer's span 0.75 at most"
    )


def test_layers_whose_scores_are_flat_are_not_named() -> None:
    rows = pd.DataFrame({"layer": [0, 1, 2, 3], "verdict": ["flat", *["increasing"] * 3]})
    assert simulation.layers_finding("a", rows).endswith("those of L1 to L3 depend on distance")
    assert simulation.layers_finding("a", rows[:1]).endswith("none depend on distance")


def test_what_is_no_function_of_distance_is_named_where_it_exceeds_its_noise() -> None:
    maps = np.full((2, 3, 3), 0.5)
    maps[1] = -1.3
    quiet, loud = np.full((2, 3, 3), 0.5), np.full((2, 3, 3), 2.0)
    for normalised, errors, expected in (
        ({"a": maps, "b": maps / 2}, {"a": quiet, "b": quiet}, "1.2 nats RMS are no function of "),
        ({"a": maps}, {"a": loud}, "nothing but distance matters beyond the noise"),
    ):
        found = simulation.rest_finding(normalised, errors)
        assert found.startswith(f"Diagonal-normalised scores: {expected}")
        assert found.endswith("in L1 at a") == (errors["a"] is quiet)


def test_scores_count_as_near_theory_within_their_errors() -> None:
    values = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    row = Curves(
        x=np.arange(5.0),
        values=values,
        errors=np.full((1, 5), 0.5),
        theory=values + np.array([0.4, -0.4, 0.6, 0.0, 9.0]),
    )
    assert simulation.row_finding([row]) == (
        "The last query's scores: 60% are within two standard errors of theory"
    )


def test_the_variance_ratios_are_those_of_the_layers_that_have_variance() -> None:
    rows = pd.DataFrame({"layer": [0, 1, 2], "variance_ratio": [1e13, 528.8, 57.4]})
    assert simulation.variance_finding(rows).endswith("the variance by 57 to 529 after L0")
    assert simulation.variance_finding(rows[:1]) == "The numbers of every layer"
