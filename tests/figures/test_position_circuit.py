"""The figure of who writes position: nodes, edges, and what each choice of a reader shows."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support import traced
from support.chromium import needs_chromium, opened

from nope_probe.figures.position_figure import AGAINST, WITH, position_circuit
from nope_probe.figures.style import patch
from nope_probe.reports.page import Headline, Section, page
from nope_probe.run.manifest import Manifest


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


def test_edges_lead_from_the_writer_to_the_reader(figure: go.Figure) -> None:
    [nodes] = [trace for trace in figure.data if "L1H0" in (trace.hovertext or ())]
    where = dict(zip(nodes.hovertext, zip(nodes.x, nodes.y, strict=True), strict=True))
    assert where.keys() == {"L1", "L2", "L3", "MLP0", "L0H0", "L0H1", "L1H0", "L1H1", "MLP1"}
    names = dict(zip(nodes.hovertext, nodes.text, strict=True))
    assert (names["L2"], names["L1H0"], names["MLP1"]) == ("L2", "H0", "MLP")
    edge = edges(figure, "L2")["L1H1 to L2, keys"]
    assert (edge.x[0], edge.y[0]) == where["L1H1"]
    assert (edge.x[-1], edge.y[-1]) == where["L2"]


def test_the_table_has_the_edges_of_a_choice_and_their_shares_the_strongest_first(
    figure: go.Figure,
) -> None:
    names, shares = titles(figure, "L2")[-2:]
    direct = ["L1H0 → L2, keys", "MLP1 → L2, keys", "L1H1 → L2, keys"]
    assert [name for name in names.split("<br>") if name in direct] == direct
    rows = dict(zip(names.split("<br>"), shares.split("<br>"), strict=True))
    assert rows.pop("<b>edge</b>") == "<b>share</b>"
    assert {name.replace("→", "to") for name in rows} == {*edges(figure, "L2")}
    assert rows["MLP1 → L2, keys"] == "-72.0% [-72.4, -71.6]"
    first = titles(figure, "all")[-2].split("<br>")[1:]
    assert all("→ L2" in name for name in first[:4]), "of the reader of the maps below"
    assert {name.replace("→", "to") for name in first} == {*edges(figure, "all")}


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
    assert titles(figure, "L1")[-6:-2] == [
        "<b>L1</b>: its mean keys",
        *(f"what {name} adds" for name in ("MLP0", "L0H0", "L0H1")),
    ]


def test_rope_has_an_edge_of_its_own_into_each_reader() -> None:
    writers = traced.writers_table()
    numbers = ["share", "share_low", "share_high"]
    writers[numbers] *= 0.05
    figure = position_circuit(traced.terms_table("rope"), writers, maps=traced.maps("rope"))
    rope = edges(figure, "all")["RoPE to L2"]
    [nodes] = [trace for trace in figure.data if "RoPE" in (trace.text or ())]
    where = dict(zip(nodes.hovertext, zip(nodes.x, nodes.y, strict=True), strict=True))
    assert (rope.x[0], rope.y[0]) == where["RoPE, L2"]
    assert (rope.x[-1], rope.y[-1]) == where["L2"]
    assert "102.6% [102.2, 103.0]" in titles(figure, "all")[-1]
    assert not {name for name in edges(figure, "all") if "keys" in name}


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


@needs_chromium
def test_a_page_draws_it_and_has_the_switch(figure: go.Figure, tmp_path: Path) -> None:
    html = page(
        "title",
        Headline(sentence=""),
        [Section(title="found", figure=figure, caption="")],
        Manifest(),
    )
    dom = opened(html, tmp_path, width=390)
    assert dom.count('type="radio"') == 4
    assert "92.0% [91.6, 92.4]" in dom
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


FIGURES = {
    "4 layers": lambda: (traced.terms_table(), traced.writers_table(), traced.effects_table()),
    "RoPE": lambda: (traced.terms_table("rope"), traced.writers_table()),
    "30 layers": deep_tables,
}


@pytest.mark.parametrize("on_phone", [False, True])
@pytest.mark.parametrize("name", FIGURES)
def test_no_node_lies_over_another_and_no_line_of_the_table_over_another_panel(
    name: str, on_phone: bool
) -> None:
    figure = position_circuit(*FIGURES[name](), maps=traced.maps())
    layout = figure.to_dict()["layout"]
    if on_phone:
        patch(layout, layout["meta"]["narrow"])
    down = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
    scales = [
        size * np.diff(layout[axis]["domain"])[0] / np.diff(layout[axis]["range"])[0]
        for axis, size in {"xaxis": 310 if on_phone else 1020, "yaxis": down}.items()
    ]
    [nodes] = [trace for trace in figure.data if trace.hovertext is not None]
    at = np.stack([nodes.x, nodes.y], -1).astype(float) * scales
    distances = np.linalg.norm(at[:, None] - at, axis=-1) + 1e3 * np.eye(len(at))
    assert distances.min() >= nodes.marker.size
    names, shares = layout["annotations"][-2:]
    below = layout["yaxis2"]["domain"][1] + 20 / down
    for view in layout["meta"]["switches"]["Reader"]:
        lines = titles(figure, view)[-2].count("<br>") + 1
        assert names["y"] - lines * 12 * 1.3 / down >= below
    assert names["y"] == shares["y"]
    assert names["x"] < shares["x"]


def test_a_long_table_says_how_many_edges_it_leaves_out() -> None:
    figure = position_circuit(*deep_tables())
    lines = titles(figure, "all")[-2].split("<br>")
    assert lines[-1] == f"and {len(edges(figure, 'all')) - 18} more"
    assert len([name for name in edges(figure, "all") if "keys" in name]) <= 24


def test_the_first_layer_alone_is_drawn() -> None:
    share = {"share": 1.0, "share_low": 0.9, "share_high": 1.1}
    size = {"size": 2.0, "size_low": 1.9, "size_high": 2.1}
    terms = pd.DataFrame([{"layer": 0, "of": "lead", "term": "all", **size, **share}])
    writers = pd.DataFrame([{"layer": 0, "of": "lead", "side": "key", "writer": "embed", **share}])
    figure = position_circuit(terms, writers)
    widths = [trace.line.width for trace in figure.data if trace.mode == "lines" and trace.line]
    assert all(width is None or np.isfinite(width) for width in widths)
