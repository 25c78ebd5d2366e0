"""Losses, terms and exact splits: every number of a table, with its interval."""

import numpy as np
import pandas as pd
import pytest
from support.maps import text_of

from nope_probe.figures.curves import band_amplitudes, offset_profiles
from nope_probe.figures.intervals import FLAT
from nope_probe.figures.names import TABLE
from nope_probe.figures.shares import (
    head_bands,
    head_losses,
    source_losses,
    source_terms,
    weight_losses,
)


def losses(*names: str, **labels: str) -> pd.DataFrame:
    """Return losses of two layers without each of some names; L1 has no lead."""
    rows = []
    for layer in (1, 2):
        for of in ("lead", "pattern"):
            for place, name in enumerate(names):
                lost = np.nan if (layer, of) == (1, "lead") else 0.25 * (place + layer)
                numbers = {"lost": lost, "lost_low": lost - 0.1, "lost_high": lost + 0.2}
                rows.append({"layer": layer, "of": of, "source": name, **labels, **numbers})
    return pd.DataFrame(rows)


def test_losses_are_dots_with_intervals_of_the_first_key_and_of_the_others_on_one_scale() -> None:
    figure = source_losses(losses("mask", "rope"))
    assert text_of(figure)[:2] == ["first key, lost", "other keys, lost"]
    lead, pattern = ([t for t in figure.data if t.yaxis == at] for at in ("y", "y2"))
    assert [trace.name for trace in lead] == ["without causal mask", "without RoPE"]
    assert [trace.y[1] for trace in lead] == [0.5, 0.75]
    assert [trace.y[0] for trace in pattern] == [0.25, 0.5]
    assert pattern[0].error_y.array[0] == pytest.approx(0.2)
    assert pattern[0].error_y.arrayminus[0] == pytest.approx(0.1)
    assert figure.layout.yaxis2.matches == "y"
    marks = [note for note in figure.layout.annotations if note.text == "no pattern"]
    assert [(note.x, note.xref) for note in marks] == [(1, "x")]


def test_losses_of_models_without_a_first_key_have_one_panel() -> None:
    figure = source_losses(losses("mask").query("of == 'pattern'"))
    assert text_of(figure)[0] == "other keys, lost"
    assert "yaxis2" not in figure.layout


def test_a_weight_has_a_marker_per_replacement_and_all_else_one() -> None:
    tables = [losses("w_q", replacement="mean"), losses("w_q", replacement="identity")]
    tables.append(losses("mlp", replacement="none"))
    figure = weight_losses(pd.concat(tables).rename(columns={"source": "removed"}))
    assert figure.layout.xaxis.domain == figure.layout.xaxis2.domain, "one below the other"
    first = [trace for trace in figure.data if trace.yaxis == "y"]
    assert [trace.name for trace in first] == ["W_Q, mean", "W_Q, identity", "MLP"]
    entry = TABLE["w_q"]
    symbols = [trace.marker.symbol for trace in first]
    assert symbols == [entry.marker, f"{entry.marker}-open", TABLE["mlp"].marker]


def test_terms_have_their_shares_and_sizes_and_what_is_left_has_a_size_alone() -> None:
    rows = [
        {"layer": 0, "of": of, "term": term}
        | dict.fromkeys(("share", "share_low", "share_high"), share)
        | dict.fromkeys(("size", "size_low", "size_high"), 2.0)
        for of in ("lead", "pattern")
        for term, share in (("mask", 0.4), ("rope", 0.6), ("without_sources", np.nan))
    ]
    figure = source_terms(pd.DataFrame(rows))
    panels = text_of(figure)[:4]
    assert panels == [
        "first key, share",
        "first key, nats",
        "other keys, share",
        "other keys, nats",
    ]
    by_panel = {
        panel: [trace.name for trace in figure.data if trace.yaxis == at]
        for panel, at in zip(panels, ("y", "y2", "y3", "y4"), strict=True)
    }
    assert by_panel["first key, share"] == ["causal mask", "RoPE"]
    assert by_panel["other keys, nats"] == ["causal mask", "RoPE", "without any source"]


def test_numbers_on_hovering_are_in_percent_where_the_axis_is() -> None:
    percent = "%{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})"
    assert {percent in t.hovertemplate for t in source_losses(losses("mask")).data} == {True}


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
        for term in ("score", "pattern", "rope")
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


PLACES = [(1, 0), (1, 2), (3, 0)]


def head_sources(*names: str) -> pd.DataFrame:
    """Return losses of three heads; L1H2 has no lead."""
    rows = []
    for place, (layer, head) in enumerate(PLACES):
        for of in ("lead", "pattern"):
            for index, name in enumerate(names):
                lost = np.nan if (place, of) == (1, "lead") else 0.25 * (place + 3 * index)
                numbers = {"lost": lost, "lost_low": lost - 0.1, "lost_high": lost + 0.2}
                rows.append({"layer": layer, "head": head, "of": of, "source": name, **numbers})
    return pd.DataFrame(rows)


def head_pattern() -> pd.DataFrame:
    rows = []
    for place, (layer, head) in enumerate(PLACES):
        row = {"layer": layer, "head": head, "removed": "intact"}
        for index, name in enumerate(
            ("lead", "amplitude", "lead_from_sources", "pattern_from_sources")
        ):
            value = (place + 1) * (-1.0) ** index
            row |= {name: value, f"{name}_low": value - 0.5, f"{name}_high": value + 1}
        rows += [row, row | {"removed": "mask", "lead": 99.0, "amplitude": 99.0}]
    return pd.DataFrame(rows)


def test_each_head_is_a_point_of_what_it_loses_without_the_first_two_sources() -> None:
    figure = head_losses(head_sources("mask", "rope", "window", "rope[0:2]"), head_pattern())
    assert text_of(figure)[:2] == ["first key", "other keys"]
    lead, pattern = figure.data
    assert (list(lead.x), list(lead.y)) == ([0.0, 0.5], [0.75, 1.25]), "L1H2 has no lead"
    assert (list(pattern.x), list(pattern.y)) == ([0.0, 0.25, 0.5], [0.75, 1.0, 1.25])
    assert list(lead.marker.color) == [1, 3]
    assert lead.marker.size[1] > lead.marker.size[0], "3 nats and 1"
    assert lead.text[1].split("<br>") == [
        "L3H0",
        "lost without causal mask: 50% [40, 70]",
        "lost without RoPE: 125% [115, 145]",
        "lost without sliding window: 200% [190, 220]",
        "size, nats: 3.00 [2.50, 4.00]",
        "made by all sources: 300% [250, 400]",
    ]


def test_the_heads_of_one_source_are_drawn_by_size_and_by_what_the_source_makes() -> None:
    lead, pattern = head_losses(head_sources("mask"), head_pattern()).data
    assert (list(lead.x), list(lead.y)) == ([1.0, 3.0], [1.0, 2.0]), "300% at the edge"
    assert (list(pattern.x), list(pattern.y)) == ([-1.0, -2.0, -3.0], [-1.0] * 3)


def test_each_head_has_a_row_of_its_losses_by_band_and_none_where_it_has_no_lead() -> None:
    table = head_sources("mask", "rope", "rope[0:2]", "rope[2:5]")
    wavelengths = {"rope[0:2]": (6.283, 9.004), "rope[2:5]": (1234.0, 1234.0)}
    figure = head_bands(table, wavelengths)
    lead, pattern = figure.data
    assert list(lead.x) == ["6.3–9", "1,200"]
    np.testing.assert_array_equal(lead.z, [[1.5, 2.25], [np.nan] * 2, [2.0, 2.75]])
    np.testing.assert_array_equal(pattern.z, [[1.5, 2.25], [1.75, 2.5], [2.0, 2.75]])
    np.testing.assert_allclose(pattern.customdata[1, 0], [1.65, 1.95])
    assert [row[0] for row in pattern.text] == ["L1H0", "L1H2", "L3H0"]
    assert figure.layout.yaxis.ticktext == ("L1H0", "L3H0")
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-1, 1)
    assert list(head_bands(table).data[0].x) == ["rope[0:2]", "rope[2:5]"]
    assert len(head_bands(table.query("of == 'pattern'")).data) == 1
