"""Shares of sources and players, and exact splits: every number of a table, with its interval."""

import numpy as np
import pandas as pd
import pytest
from support.maps import text_of

from nope_probe.components import TABLE
from nope_probe.figures.shares import (
    band_amplitudes,
    interactions,
    offset_profiles,
    player_shares,
    source_shares,
)


def sources() -> pd.DataFrame:
    nan = np.nan
    rows = [
        (1, "content", 0.1, 0.0, 0.2, nan, nan, nan),
        (1, "mask", 0.3, 0.2, 0.4, nan, nan, nan),
        (2, "content", 0.2, 0.1, 0.3, 0.25, 0.15, 0.45),
        (2, "mask", 0.9, 0.8, 1.1, 0.75, 0.55, 0.85),
    ]
    columns = ["layer", "term", "rms", "rms_low", "rms_high", "share", "share_low", "share_high"]
    return pd.DataFrame(rows, columns=columns)


def test_shares_are_dots_with_their_intervals() -> None:
    total = sources().query("term == 'mask'").assign(term="position")
    figure = source_shares(pd.concat([sources(), total]))
    assert {trace.name for trace in figure.data} == {"content", "causal mask"}, "not their sum"
    content = figure.data[0]
    assert content.name == "content"
    assert content.y[1] == 0.25
    assert content.error_y.array[1] == pytest.approx(0.2)
    assert content.error_y.arrayminus[1] == pytest.approx(0.1)
    assert np.round(content.x).tolist() == [1, 2]


def test_a_layer_without_pattern_is_marked_and_not_dropped() -> None:
    figure = source_shares(sources())
    marks = [each for each in figure.layout.annotations if each.text == "no pattern"]
    assert [(each.x, each.xref) for each in marks] == [(1, "x")], "the RMS panel has numbers"
    assert tuple(figure.layout.xaxis.range) == (0.5, 2.5)


def test_a_deep_model_gets_wide_panels_and_a_tick_for_some_layers() -> None:
    table = pd.concat([sources().query("layer == 2").assign(layer=i) for i in range(1, 38)])
    figure = source_shares(table)
    assert figure.layout.xaxis.domain == figure.layout.xaxis2.domain == (0, 1)
    assert figure.layout.xaxis.dtick == 4
    assert len(figure.data[0].y) == 37


def players() -> pd.DataFrame:
    table = (
        sources().rename(columns={"term": "player"}).drop(columns=["rms", "rms_low", "rms_high"])
    )
    for name, value in (("alone", 0.1), ("lost", 0.2), ("amplification", 0.4)):
        table = table.assign(**{name: value, f"{name}_low": 0.0, f"{name}_high": 0.9})
    return table


def test_players_have_a_panel_for_share_alone_and_lost() -> None:
    figure = player_shares(players())
    titles = ["Shapley share", "lost without it", "there alone", "amplification"]
    assert text_of(figure)[:4] == titles
    masks = [trace for trace in figure.data if trace.name == "causal mask"]
    assert [trace.y[1] for trace in masks] == [0.75, 0.2, 0.1, 0.4]
    assert [trace.error_y.array[1] for trace in masks] == pytest.approx([0.1, 0.7, 0.8, 0.5])
    assert {trace.marker.color for trace in masks} == {TABLE["mask"].colour}
    assert {trace.marker.symbol for trace in masks} == {TABLE["mask"].marker}


def test_weights_are_not_drawn_alone_and_a_layer_without_amplification_is_not_marked() -> None:
    table = players().assign(player=lambda rows: rows["player"].replace({"content": "w_q"}))
    table.loc[table["player"] == "w_q", "alone"] = np.nan
    table.loc[table["layer"] == 2, "amplification"] = np.nan
    figure = player_shares(table)
    assert [trace.yaxis for trace in figure.data if trace.name == "W_Q"] == ["y", "y2", "y4"]
    marks = [each for each in figure.layout.annotations if each.text == "no pattern"]
    assert [(each.x, each.xref) for each in marks] == [(1, "x")]


def test_interactions_have_short_names_and_the_largest_comes_first() -> None:
    rows = [(0, "mask+w_q", 0.1), (0, "mask+rope", -0.5), (1, "mask+w_q", 0.2), (1, "mask+rope", 0)]
    table = pd.DataFrame(rows, columns=["layer", "players", "share"])
    figure = interactions(table.assign(share_low=-1.0, share_high=1.0), layer=1)
    assert list(figure.data[1].y) == ["mask + W_Q", "mask + RoPE"], "plotly's axis points up"
    assert [trace.visible for trace in figure.data] == [False, True]


def test_each_band_is_a_bar_with_its_interval_in_its_layers_panel():
    table = pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "band": ["4-8", "unrotated", "4-8", "unrotated"],
            "amplitude": [1.0, 2.0, 3.0, 5.0],
            "amplitude_low": [0.5, 1.5, 2.0, 4.0],
            "amplitude_high": [1.5, 3.0, 3.5, 7.0],
            "share": [0.25, 0.75, 0.5, 0.5],
        }
    )
    first, second = band_amplitudes(table).data
    assert list(first.x) == ["4-8", "unrotated"]
    assert list(second.y) == [3.0, 5.0]
    assert list(second.error_y.array) == [0.5, 2.0]
    assert list(second.error_y.arrayminus) == [1.0, 1.0]
    assert (first.xaxis, second.xaxis) == ("x", "x2")
    assert list(first.customdata) == [25.0, 75.0]


def test_each_term_is_a_line_within_its_bounds_and_is_named_once():
    offsets = [1, 2, 3]
    parts = [
        pd.DataFrame({"layer": layer, "term": term, "offset": offsets, "mean": np.arange(3.0)})
        for layer in (0, 1)
        for term in ("score", "all", "rope")
    ]
    table = pd.concat(parts).assign(
        mean_low=lambda t: t["mean"] - 1, mean_high=lambda t: t["mean"] + 2
    )
    figure = offset_profiles(table)
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    areas = [trace for trace in figure.data if trace.fill == "toself"]
    assert len(lines) == len(areas) == 6
    assert [line.name for line in lines if line.showlegend] == [
        "scores",
        "positional pattern",
        "RoPE",
    ]
    for line, area in zip(lines, areas, strict=True):
        assert list(line.y) == [0.0, 1.0, 2.0]
        assert list(area.x) == [1, 2, 3, 3, 2, 1]
        assert list(area.y) == [2.0, 3.0, 4.0, 1.0, 0.0, -1.0]
        assert (line.xaxis, line.legendgroup) == (area.xaxis, area.legendgroup)
