"""The figure of who writes position: nodes, edges, and what each choice of a reader shows."""

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support import traced
from support.chromium import needs_chromium, opened

from nope_probe.figures.position_figure import AGAINST, WITH, position_circuit
from nope_probe.reports.page import Lead, Section, page


@pytest.fixture
def figure() -> go.Figure:
    return position_circuit(
        traced.terms_table(),
        traced.writers_table(),
        traced.effects_table(),
        maps=traced.maps(),
        clocks=traced.clocks_table(),
    )


def shown(figure: go.Figure, choice: str) -> list[Any]:
    flags = figure.layout.meta["switches"]["Reader"][choice][0]["visible"]
    return [trace for trace, flag in zip(figure.data, flags, strict=True) if flag]


def edges(figure: go.Figure, choice: str) -> dict[str, go.Scatter]:
    return {trace.name: trace for trace in shown(figure, choice) if " to " in (trace.name or "")}


def titles(figure: go.Figure, choice: str) -> list[str]:
    keys = figure.layout.meta["switches"]["Reader"][choice][1]
    return [text for key, text in keys.items() if key.startswith("annotations")]


def test_an_edge_is_as_wide_as_its_share_and_blue_against_the_pattern(figure: go.Figure) -> None:
    drawn = edges(figure, "L2")
    direct = {name for name in drawn if "all paths" not in name}
    assert direct == {f"{name} to L2, keys" for name in ("L1H0", "L1H1", "MLP0", "MLP1")}
    widths = {name: drawn[f"{name} to L2, keys"].line.width for name in ("L1H0", "MLP0", "MLP1")}
    assert widths["L1H0"] / widths["MLP0"] == pytest.approx(0.92 / 0.13)
    assert widths["MLP1"] / widths["MLP0"] == pytest.approx(0.72 / 0.13)
    colours = {name: trace.line.color for name, trace in drawn.items()}
    assert colours["L1H0 to L2, keys"] == colours["MLP0 to L2, keys"] == WITH
    assert colours["MLP1 to L2, keys"] == AGAINST
    assert "92.0% [91.6, 92.4] of its pattern" in drawn["L1H0 to L2, keys"].hovertemplate


def test_edges_lead_from_the_writer_to_the_left_of_the_readers_box(figure: go.Figure) -> None:
    [nodes] = [trace for trace in figure.data if "L0H1" in (trace.hovertext or ())]
    where = dict(zip(nodes.hovertext, zip(nodes.x, nodes.y, strict=True), strict=True))
    assert {"L0H0", "L0H1", "MLP0", "L3H0", "L3H1", "MLP2"} <= where.keys()
    assert "MLP3" not in where, "nothing reads it"
    edge = edges(figure, "L2")["L1H1 to L2, keys"]
    assert (edge.x[0], edge.y[0]) == where["L1H1"]
    box = figure.layout.shapes[2]
    assert edge.x[-1] == box.x0
    assert box.y0 < edge.y[-1] < box.y1


def test_a_total_effect_is_dashed_where_it_differs_from_the_direct_one(figure: go.Figure) -> None:
    totals = {name for name, edge in edges(figure, "L1").items() if edge.line.dash == "dash"}
    assert totals == {"L0H0 to L1, all paths", "L0H1 to L1, all paths"}
    assert "MLP0 to L1, all paths" not in edges(figure, "L1"), "95 is within 97's interval"


def test_beside_other_readers_only_strong_edges_and_totals_of_indirect_paths(
    figure: go.Figure,
) -> None:
    together = edges(figure, "all")
    assert "L0H0 to L1, keys" not in together
    assert "L0H0 to L1, keys" in edges(figure, "L1")
    assert "L0H0 to L1, all paths" in together
    assert "L1H0 to L2, all paths" not in together
    assert {name.split(" to ")[1][:2] for name in together} == {"L1", "L2", "L3"}


def test_a_choice_shows_the_maps_and_clocks_of_its_reader_on_their_own_colours(
    figure: go.Figure,
) -> None:
    truth = traced.maps()
    for choice, reader in {"all": "L2", "L1": "L1", "L2": "L2", "L3": "L3"}.items():
        maps = [trace for trace in shown(figure, choice) if isinstance(trace, go.Heatmap)]
        names = ["all", "written_key", "written_both", "covariance"]
        for trace, name in zip(maps, names, strict=True):
            np.testing.assert_array_equal(trace.z, truth[f"{reader}/{name}"])
        keys = figure.layout.meta["switches"]["Reader"][choice][1]
        top = np.nanmax(np.abs(truth[f"{reader}/all"]))
        assert keys["coloraxis.cmax"] == -keys["coloraxis.cmin"] == pytest.approx(top, rel=0.05)
        assert titles(figure, choice)[0] == f"<b>{reader}</b>: whole pattern"
        lines = [trace for trace in shown(figure, choice) if isinstance(trace, go.Scatter)]
        assert sum(trace.marker.coloraxis == "coloraxis2" for trace in lines) == 4
    assert titles(figure, "L1")[-4:] == [
        "<b>L1</b>: its mean keys",
        *(f"what {name} adds" for name in ("MLP0", "L0H0", "L0H1")),
    ]


def test_rope_has_an_edge_of_its_own_into_each_reader() -> None:
    writers = traced.writers_table()
    numbers = ["share", "share_low", "share_high"]
    writers[numbers] *= 0.05
    figure = position_circuit(traced.terms_table("rope"), writers, maps=traced.maps("rope"))
    rope = edges(figure, "all")["RoPE to L2"]
    assert "RoPE<br>+103%" in rope.text
    assert list(rope.x) == [2, 2]
    assert rope.y[-1] == figure.layout.shapes[2].y1
    assert not {name for name in edges(figure, "all") if "keys" in name}


@pytest.mark.parametrize("of_first", [1.0, 0.5])
@pytest.mark.parametrize("n_layers", [4, 30])
def test_the_reader_of_the_headline_has_its_label_beside_all_readers(
    n_layers: int, of_first: float
) -> None:
    """Layers near the strongest reader have larger shares, whose labels would stand in its way."""
    rows = traced.terms_table("rope").query("layer == 1 and term in ['rotation', 'all']")
    strongest, tables = n_layers // 2, []
    numbers = ["share", "share_low", "share_high"]
    for layer in range(n_layers):
        table = rows.assign(layer=layer, size=2.0 if layer == strongest else 1.0)
        table.loc[table["term"] == "rotation", numbers] = of_first if layer == strongest else 1.04
        tables.append(table)
    figure = position_circuit(pd.concat(tables), traced.writers_table().iloc[:0])
    labels = {
        (x, text)
        for trace in shown(figure, "all")
        if isinstance(trace, go.Scatter) and trace.text is not None
        for x, text in zip(trace.x, trace.text, strict=True)
        if "RoPE" in text
    }
    assert (strongest, f"RoPE<br>{100 * of_first:+.0f}%") in labels
    if n_layers == 4:
        others = {(layer, "RoPE<br>+104%") for layer in range(4) if layer != strongest}
        assert others < labels


def test_an_edge_that_is_not_told_from_zero_is_not_drawn() -> None:
    writers = traced.writers_table()
    writers.loc[writers["writer"] == "MLP0", "share_low"] = -1.0
    figure = position_circuit(traced.terms_table(), writers)
    assert set(edges(figure, "L2")) == {f"{name} to L2, keys" for name in ("L1H0", "L1H1", "MLP1")}


def test_heads_can_read_and_layers_can_write() -> None:
    terms = traced.terms_table().query("layer == 2").assign(head=1)
    writers = traced.writers_table().query("layer == 2 and writer in ('L1H0', 'MLP1')")
    writers = writers.assign(head=1, writer=["ATTN1", "embed"])
    figure = position_circuit(terms, writers)
    assert set(edges(figure, "L2H1")) == {"ATTN1 to L2H1, keys", "embed to L2H1, keys"}
    with pytest.raises(ValueError, match="no reader 'L7'; there are L2H1"):
        position_circuit(terms, writers, reader="L7")


def test_without_the_switch_an_image_shows_what_the_first_choice_shows(figure: go.Figure) -> None:
    flags = figure.layout.meta["switches"]["Reader"]["all"][0]["visible"]
    assert [trace.visible for trace in figure.data] == list(flags)
    assert [note.text for note in figure.layout.annotations] == titles(figure, "all")
    colours = [box.line.color for box in figure.layout.shapes]
    keys = figure.layout.meta["switches"]["Reader"]["all"][1]
    assert colours == [keys[f"shapes[{i}].line.color"] for i in range(4)]
    assert colours.count(colours[2]) == 1


@needs_chromium
@pytest.mark.parametrize("width", [1200, 390])
def test_a_page_draws_it_and_has_the_switch(figure: go.Figure, tmp_path: Path, width: int) -> None:
    html = page("title", Lead(sentence=""), [Section(title="found", figure=figure, caption="")], {})
    dom = opened(html, tmp_path, width)
    assert dom.count('type="radio"') == 4
    assert "+92%" in dom
    assert "what L1H0 adds" in dom


@needs_chromium
def test_the_menu_of_a_notebook_stands_above_the_legend(figure: go.Figure, tmp_path: Path) -> None:
    script = """<script>setTimeout(() => {
        const box = name => document.querySelector(name).getBoundingClientRect();
        document.title = box(".legend").top - box(".updatemenu-header").bottom;
    }, 1000)</script></body>"""
    dom = opened(figure.to_html().replace("</body>", script), tmp_path)
    assert float(re.findall("<title>(.*)</title>", dom)[0]) >= 0


def deep_tables() -> tuple[Any, Any]:
    """Return terms and writers of 30 layers, each of which reads rotation and three MLPs."""
    rotation, whole = (
        traced.terms_table("rope").query("layer == 1 and term == @term")
        for term in ("rotation", "all")
    )
    written = traced.writers_table().query("layer == 2").iloc[:3]
    terms, writers = [], []
    for layer in range(1, 30):
        terms += [rows.assign(layer=layer, size=1 + layer) for rows in (rotation, whole)]
        names = [f"MLP{before}" for before in (0, layer // 2, layer - 1)]
        writers.append(written.assign(layer=layer, writer=names))
    return pd.concat(terms), pd.concat(writers).drop_duplicates(["layer", "writer"])


@pytest.mark.parametrize(("width", "across", "down"), [("wide", 1050, 450), ("narrow", 310, 380)])
def test_no_label_of_30_layers_lies_over_another_in_any_view(
    width: str, across: int, down: int
) -> None:
    """A letter is about 6 px wide and a label 11 px high."""
    figure = position_circuit(*deep_tables())
    (left, right), (low, high) = figure.layout.xaxis.range, figure.layout.yaxis.range
    views = figure.layout.meta["switches"]["Reader"]
    assert len(views) == 30
    n_labels = []
    for view in views:
        boxes = [
            (
                x * across / (right - left),
                y * down / (high - low),
                6 * max(map(len, text.split("<br>"))),
            )
            for trace in shown(figure, view)
            if isinstance(trace, go.Scatter) and trace.text is not None and "%" in str(trace.text)
            for x, y, text in zip(trace.x, trace.y, trace.text, strict=True)
            if text
        ]
        n_labels.append(len(boxes))
        for (x, y, wide), (x2, y2, wide2) in combinations(boxes, 2):
            assert abs(x - x2) >= (wide + wide2) / 2 or abs(y - y2) >= 11
    assert min(n_labels) >= 2
    assert len([name for name in edges(figure, "all") if "keys" in name]) <= 24


FIGURES = {
    "4 layers": lambda: (traced.terms_table(), traced.writers_table(), traced.effects_table()),
    "RoPE": lambda: (traced.terms_table("rope"), traced.writers_table()),
    "30 layers": deep_tables,
}


@pytest.mark.parametrize("name", FIGURES)
def test_no_edge_runs_through_the_box_of_a_layer_between_its_writer_and_reader(name: str) -> None:
    figure = position_circuit(*FIGURES[name]())
    lines = [trace for trace in figure.data if " to " in (trace.name or "")]
    assert len(lines) >= 7
    for line in lines:
        ends = {int(re.findall(r"\d+", end)[0]) for end in line.name.split(" to ") if end != "RoPE"}
        x, y = (
            np.concatenate([np.linspace(a, b, 11) for a, b in pairwise(values)])
            for values in (line.x, line.y)
        )
        for layer, box in enumerate(figure.layout.shapes):
            within = (box.x0 < x) & (x < box.x1) & (box.y0 < y) & (y < box.y1)
            assert layer in ends or not within.any(), (line.name, layer)


def test_edges_of_one_view_have_lanes_of_their_own() -> None:
    figure = position_circuit(*FIGURES["4 layers"]())
    lowest = [min(edge.y) for edge in edges(figure, "all").values()]
    below = sorted(y for y in lowest if y < 0)
    assert len(below) == 5, "four edges over L2 into L3, one over L1 into L2"
    assert np.diff(below).min() > 0.01


@pytest.mark.parametrize(("width", "across", "down"), [("wide", 1050, 450), ("narrow", 310, 380)])
@pytest.mark.parametrize("name", FIGURES)
def test_no_edge_runs_through_the_label_of_another(
    name: str, width: str, across: int, down: int
) -> None:
    """A letter is about 6 px wide; the letters stand 3 to 12 px above their point."""
    figure = position_circuit(*FIGURES[name]())
    (left, right), (low, high) = figure.layout.xaxis.range, figure.layout.yaxis.range
    wide, tall = across / (right - left), down / (high - low)
    n_labels = 0
    for view in figure.layout.meta["switches"]["Reader"]:
        lines = edges(figure, view).values()
        labels = [
            (x * wide, y * tall, 3 * len(text))
            for trace in shown(figure, view)
            if isinstance(trace, go.Scatter) and trace.mode == "text"
            for x, y, text in zip(trace.x, trace.y, trace.text, strict=True)
        ]
        n_labels += len(labels)
        for x, y, half in labels:
            through = [
                line.name
                for line in lines
                if (
                    (abs(np.array(line.x) * wide - x) < half)
                    & (abs(np.array(line.y) * tall - y - 7.5) < 4.5)
                ).any()
            ]
            assert not through, "its own included, where that is steep"
            for box in figure.layout.shapes:
                is_beside = x + half <= box.x0 * wide or x - half >= box.x1 * wide
                assert is_beside or y + 12 <= box.y0 * tall or y >= box.y1 * tall
    assert n_labels >= 7


def test_curves_over_many_layers_stay_inside_the_circuit() -> None:
    figure = position_circuit(*deep_tables())
    for edge in edges(figure, "L29").values():
        assert figure.layout.yaxis.range[0] < min(edge.y)
