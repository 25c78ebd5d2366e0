"""Shares of sources and players, and exact splits: every number of a table, with its interval."""

import numpy as np
import pandas as pd
import pytest
from support.maps import text_of

from nope_probe.figures.curves import band_amplitudes, offset_profiles
from nope_probe.figures.intervals import FLAT
from nope_probe.figures.names import TABLE
from nope_probe.figures.shares import interactions, player_shares, source_shares


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


def test_shares_are_dots_with_their_intervals_and_a_layer_without_pattern_is_marked() -> None:
    total = sources().query("term == 'mask'").assign(term="position")
    figure = source_shares(pd.concat([sources(), total]))
    assert {trace.name for trace in figure.data} == {"content", "causal mask"}, "not their sum"
    content = figure.data[0]
    assert (content.name, content.y[1]) == ("content", 0.25)
    assert content.error_y.array[1] == pytest.approx(0.2)
    assert content.error_y.arrayminus[1] == pytest.approx(0.1)
    assert np.round(content.x).tolist() == [1, 2]
    marks = [note for note in figure.layout.annotations if note.text == "no pattern"]
    assert [(note.x, note.xref) for note in marks] == [(1, "x")], "the RMS panel has numbers"
    deep = pd.concat([sources().query("layer == 2").assign(layer=i) for i in range(1, 38)])
    figure = source_shares(deep)
    assert figure.layout.xaxis.domain == figure.layout.xaxis2.domain == (0, 1)
    assert figure.layout.xaxis.dtick == 4


def test_where_a_key_stands_apart_a_layer_is_a_bar_and_a_source_has_two_tones() -> None:
    table = sources()
    for part, fraction in (("first", 0.25), ("others", 0.75)):
        for end in ("", "_low", "_high"):
            table[f"share_{part}{end}"] = fraction * table[f"share{end}"]
    figure = source_shares(table)
    assert [trace.name for trace in figure.data] == [
        "content, first key",
        "causal mask, first key",
        "content, other keys",
        "causal mask, other keys",
    ]
    assert figure.layout.barmode == "relative", "parts against the pattern hang below 0"
    assert sum(trace.y[1] for trace in figure.data) == pytest.approx(1)
    mask = figure.data[1]
    assert (mask.y[1], *mask.customdata[1]) == pytest.approx((0.1875, 0.1375, 0.2125))
    assert mask.marker.color == "rgba(213, 94, 0, 1)"
    assert figure.data[3].marker.color == "rgba(213, 94, 0, 0.45)"
    marks = [note for note in figure.layout.annotations if note.text == "no pattern"]
    assert [note.x for note in marks] == [1]


def players(*replacements: str) -> pd.DataFrame:
    """Weights have no `alone`, and the layer 1 no share."""
    parts = {"share": 0.5, "lost": 0.9, "alone": 0.1, "amplification": 2.0}
    return pd.DataFrame(
        [
            {"layer": layer, "player": player, "replacement": name}
            | {
                f"{part}{end}": np.nan
                if (part, layer) == ("share", 1) or (part, player) == ("alone", "w_q")
                else (0.3 if (part, name) == ("lost", "mean") else value) + shift
                for part, value in parts.items()
                for end, shift in (("", 0.0), ("_low", -0.05), ("_high", 0.1))
            }
            for name in replacements
            for layer in (0, 1)
            for player in ("mask", "w_q")
        ]
    )


def test_players_have_a_panel_per_share_on_one_scale_and_weights_a_marker_per_replacement() -> None:
    table = players("identity", "mean")
    table = table[(table["replacement"] == "identity") | (table["player"] == "w_q")]
    figure = player_shares(table)
    assert text_of(figure)[:2] == ["lost without it", "Shapley share"]
    first, second = ([t for t in figure.data if t.yaxis == at] for at in ("y", "y2"))
    labels = ["causal mask", "W_Q, identity", "W_Q, mean"]
    assert [trace.name for trace in first] == [trace.name for trace in second] == labels
    assert [trace.y[0] for trace in first] == [0.9, 0.9, 0.3]
    assert [trace.error_y.array[0] for trace in first] == pytest.approx([0.1] * 3)
    entry = TABLE["w_q"]
    assert [trace.marker.symbol for trace in first[1:]] == [entry.marker, f"{entry.marker}-open"]
    assert {trace.marker.color for trace in first[1:]} == {entry.colour}
    marks = [note for note in figure.layout.annotations if note.text == "no pattern"]
    assert [(note.x, note.xref) for note in marks] == [(1, "x2")]
    assert figure.layout.yaxis2.matches == "y"
    assert figure.layout.xaxis.domain == figure.layout.xaxis2.domain == (0, 1)
    np.testing.assert_allclose(figure.layout.yaxis.range, [0, 1.0 * 1.05])


def test_losses_alone_have_no_series_of_shares() -> None:
    table = players("identity", "mean")
    table.loc[table["replacement"] == "mean", [n for n in table if n.startswith("share")]] = np.nan
    figure = player_shares(table)
    assert [t.name for t in figure.data if t.yaxis == "y2"] == [
        "causal mask, identity",
        "W_Q, identity",
    ]
    table["share"] = np.nan
    assert text_of(player_shares(table))[0] == "lost without it"
    assert "yaxis2" not in player_shares(table).layout


def test_numbers_on_hovering_are_in_percent_where_the_axis_is() -> None:
    percent = "%{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})"
    assert {percent in t.hovertemplate for t in player_shares(players("identity")).data} == {True}
    share, nats = (
        [t for t in source_shares(sources()).data if t.yaxis == at] for at in ("y", "y2")
    )
    assert all(percent in trace.hovertemplate for trace in share)
    assert all("%{y:.3g} (%{customdata[0]:.3g}" in trace.hovertemplate for trace in nats)
    (dots,) = interactions(interaction_rows(0.1, **{"mask+rope": 0.5}).query("layer == 0")).data[:1]
    assert percent.replace("{y", "{x") in dots.hovertemplate


def interaction_rows(half: float, **shares: float) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"layer": layer, "players": players, "replacement": name, "share": sign * share}
            | {"share_low": sign * share - half, "share_high": sign * share + half}
            for layer in (0, 1)
            for name, sign in (("identity", 1), ("mean", -1))
            for players, share in shares.items()
        ]
    )


def test_interactions_have_a_panel_per_replacement_and_the_largest_comes_first() -> None:
    figure = interactions(interaction_rows(0.05, **{"mask+w_q": 0.1, "mask+rope": 0.5}), layer=1)
    shown = [trace for trace in figure.data if trace.visible]
    assert [trace.xaxis for trace in shown] == ["x", "x2"]
    for trace, sign in zip(shown, (1, -1), strict=True):
        assert list(trace.y) == ["mask + W_Q", "mask + RoPE"], "plotly's axis points up"
        assert list(trace.x) == [sign * 0.1, sign * 0.5]
    assert text_of(figure)[:2] == ["identity", "mean"]
    assert figure.layout.annotations[2].text == ""
    assert figure.layout.xaxis2.matches == "x"


def test_interactions_within_noise_are_counted_and_not_drawn() -> None:
    figure = interactions(interaction_rows(0.05, **{"mask+rope": 0.001, "mask+w_q": 0.002}))
    limits = figure.layout.meta["patches"][0]["xaxis.range"]
    np.testing.assert_allclose(limits, [-0.156, 0.156])
    assert not any(len(trace.x) for trace in figure.data)
    assert figure.layout.annotations[2].text == "2 within noise"


def test_a_layer_has_its_twelve_largest_interactions_and_counts_the_others() -> None:
    shares = {f"mask+w_{i:02}": 0.1 + 0.01 * i for i in range(17)} | {"mask+rope": 0.01}
    table = interaction_rows(0.05, **shares).query("replacement == 'identity'")
    table.loc[(table["layer"] == 1) & (table["players"] != "mask+w_03"), "share_low"] = -1.0
    figure = interactions(table)
    many, few = figure.data
    assert list(many.x) == pytest.approx([0.1 + 0.01 * i for i in range(5, 17)])
    assert list(few.x) == pytest.approx([0.13])
    notes = [patch["annotations[1].text"] for patch in figure.layout.meta["patches"]]
    assert notes == ["5 others smaller, 1 within noise", "17 others within noise"]
    ranges = [patch["yaxis.range"] for patch in figure.layout.meta["patches"]]
    assert ranges == [[-1.5, 11.5], [-12.5, 0.5]], "a row is as high in every layer"


def test_each_band_is_a_bar_with_its_interval_in_its_layers_panel_on_one_scale():
    table = pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "band": ["4-8", "unrotated", "4-8", "unrotated"],
            "amplitude": [1.0, 2.0, 1e-4, 1e-4],
            "amplitude_low": [0.5, 1.5, -1e-4, -2e-4],
            "amplitude_high": [1.5, 4.0, 2e-4, 3e-4],
            "share": [0.25, 0.75, 0.5, 0.5],
        }
    )
    figure = band_amplitudes(table)
    first, second = figure.data
    assert (list(first.x), list(first.y)) == (["4-8", "unrotated"], [1.0, 2.0])
    assert list(first.error_y.array) == [0.5, 2.0]
    assert list(first.error_y.arrayminus) == [0.5, 0.5]
    assert list(first.customdata) == [25.0, 75.0]
    assert (first.xaxis, second.xaxis) == ("x", "x2")
    assert figure.layout.yaxis2.matches == "y"
    assert [note.xref for note in figure.layout.annotations if note.text == FLAT] == ["x2 domain"]


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
