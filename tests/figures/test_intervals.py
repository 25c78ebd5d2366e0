"""Estimates with intervals: as columns, as text, as error bars; noise is drawn as flat."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import Dots, over_layers
from nope_probe.figures.intervals import (
    FLAT,
    axis_range,
    bound_columns,
    interval_of,
    interval_text,
    is_noise,
    percent,
)
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.shares import band_amplitudes, interactions, player_shares


def test_bounds_have_the_name_of_their_estimate() -> None:
    row = {"share": 0.5, "share_low": 0.4, "share_high": 0.6, "rms": 3, "rms_low": 2, "rms_high": 4}
    assert interval_of(row, "share") == (0.5, 0.4, 0.6)
    assert interval_of(pd.Series(row), "rms") == (3.0, 2.0, 4.0)
    assert bound_columns("lost") == ("lost_low", "lost_high")


def test_text_has_the_unit_behind_the_estimate_and_no_negative_zero() -> None:
    assert interval_text((-0.0001, -0.2, 0.3)) == "0.000 [-0.200, 0.300]"
    assert interval_text(percent((0.25, -0.125, 0.5)), "z.1f", "%") == "25.0% [-12.5, 50.0]"
    assert interval_text((np.nan, np.nan, np.nan), "+.2f", "%") == "no pattern"


def series(values: list[float], half: float) -> Dots:
    at = np.array(values)
    estimates = np.stack([at, at - half, at + half])
    return Dots(name="mask", label="mask", layers=[0, 1], estimates=estimates)


def texts(figure: go.Figure) -> list[str]:
    return [note.text for note in figure.layout.annotations]


def test_numbers_are_noise_if_no_interval_leaves_zero_out() -> None:
    assert is_noise([0.1, -0.1, np.nan], [-0.1, -0.3, np.nan], [0.3, 0.1, np.nan])
    assert not is_noise([0.1, 0.5], [-0.1, 0.4], [0.3, 0.6])
    assert not is_noise([-0.5], [-0.6], [-0.4])
    assert not is_noise([np.nan], [np.nan], [np.nan])


def test_an_axis_never_spans_less_than_a_hundredth() -> None:
    assert axis_range([3e-7], [2e-7], [4e-7]) == (0.0, 0.01)
    assert axis_range([-3e-7], [-4e-7], [-2e-7]) == (-0.01, 0.01)
    assert axis_range([np.nan], [np.nan], [np.nan]) is None


def test_a_panel_of_noise_is_flat_and_noted_and_its_neighbour_is_not() -> None:
    panels = {"noise": [series([2e-7, -2e-7], 3e-7)], "clear": [series([0.5, 0.7], 0.1)]}
    figure = over_layers(panels, "title")
    assert figure.layout.yaxis.range == (-0.01, 0.01)
    assert figure.layout.yaxis2.range is None
    [note] = [each for each in figure.layout.annotations if each.text == FLAT]
    assert note.xref == "x domain"
    assert figure.layout.xaxis2.matches == "x"


def test_the_first_keys_set_no_colour_limits() -> None:
    maps = np.zeros((1, 7, 7))
    maps[..., 0] = 50.0
    maps[..., 1:] = np.linspace(0, 1, 6)
    assert score_maps(maps, skip_keys=1).layout.coloraxis.cmax <= 1.0
    assert score_maps(maps).layout.coloraxis.cmax == 50.0


def test_a_layer_within_noise_has_the_scale_of_the_strongest_and_says_so() -> None:
    maps = np.stack([1e-7 * np.ones((5, 5)), 3.0 * np.ones((5, 5))])
    noise = {"all": [0], "mask": [0, 1]}
    figure = term_maps({"all": maps, "mask": maps}, title="t", flat=noise)
    np.testing.assert_array_equal(figure.layout.meta["scales"], [[-3, 3], [-3, 3]])
    assert texts(figure) == [
        "whole pattern<br><i>within noise</i>",
        "causal mask<br><i>within noise</i>",
    ]
    assert figure.layout.meta["patches"][1] == {
        "annotations[0].text": "whole pattern",
        "annotations[1].text": "causal mask<br><i>within noise</i>",
    }
    assert figure.layout.sliders[0].steps[1].args[1]["annotations[0].text"] == "whole pattern"


def players(*replacements: str) -> pd.DataFrame:
    numbers = {
        f"{part}{end}": value + shift
        for part, value in (("share", 0.5), ("lost", 0.9), ("alone", 0.1), ("amplification", 2.0))
        for end, shift in (("", 0.0), ("_low", -0.05), ("_high", 0.05))
    }
    rows: list[dict[str, Any]] = [
        {"layer": layer, "player": player, "replacement": name, **numbers}
        | ({"lost": 0.3, "lost_low": 0.2, "lost_high": 0.4} if name == "mean" else {})
        for name in replacements
        for layer in (0, 1)
        for player in ("mask", "w_q")
    ]
    return pd.DataFrame(rows)


def test_each_replacement_has_a_row_of_panels_on_the_same_scales() -> None:
    figure = player_shares(players("identity", "mean"))
    assert texts(figure)[1::4] == ["identity: lost without it", "mean: lost without it"]
    drawn = {trace.yaxis: list(trace.y) for trace in figure.data if trace.name == "causal mask"}
    assert drawn["y2"] == [0.9, 0.9]
    assert drawn["y6"] == [0.3, 0.3]
    assert [figure.layout[f"yaxis{panel}"].matches for panel in (5, 6, 7, 8)] == [
        "y",
        "y2",
        "y3",
        "y4",
    ]
    assert figure.layout.yaxis6.domain[1] < figure.layout.yaxis2.domain[0]
    np.testing.assert_allclose(figure.layout.yaxis2.range, [0, 0.95 * 1.05])
    np.testing.assert_allclose(figure.layout.yaxis8.range, [0, 2.05 * 1.05])


def interaction_rows(share: float, half: float) -> pd.DataFrame:
    bounds = {"share": share, "share_low": share - half, "share_high": share + half}
    return pd.DataFrame(
        [
            {"layer": layer, "players": "mask+rope", "replacement": name, **bounds}
            | ({"share": -share} if name == "mean" else {})
            for layer in (0, 1)
            for name in ("identity", "mean")
        ]
    )


def test_interactions_have_a_panel_per_replacement_and_one_scale() -> None:
    figure = interactions(interaction_rows(0.5, 0.1), layer=1)
    shown = [(trace.xaxis, trace.x[0]) for trace in figure.data if trace.visible]
    assert shown == [("x", 0.5), ("x2", -0.5)]
    assert texts(figure)[:2] == ["identity", "mean"]
    assert figure.layout.annotations[2].visible is False
    assert figure.layout.xaxis2.matches == "x"


def test_interactions_within_noise_are_flat_and_say_so() -> None:
    figure = interactions(interaction_rows(0.001, 0.05))
    limits = figure.layout.meta["patches"][0]["xaxis.range"]
    np.testing.assert_allclose(limits, [-0.153, 0.153])
    assert figure.layout.meta["patches"][0]["annotations[2].visible"] is True
    assert [(each.text, each.visible) for each in figure.layout.annotations][2] == (FLAT, True)


def test_bands_of_all_layers_share_one_scale() -> None:
    row = {"band": "4 to 8", "share": 1.0, "amplitude": 0.5, "amplitude_low": 0.4}
    rows = [{"layer": layer, "amplitude_high": 0.6, **row} for layer in (0, 1)]
    rows[1] |= {"amplitude": 1e-4, "amplitude_low": -1e-4, "amplitude_high": 2e-4}
    figure = band_amplitudes(pd.DataFrame(rows))
    assert figure.layout.yaxis2.matches == "y"
    [note] = [each for each in figure.layout.annotations if each.text == FLAT]
    assert note.xref == "x2 domain"
