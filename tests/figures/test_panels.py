"""Panels: their places, scales and bars; figures as image files, without controls and title."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from nope_probe import UserError, figures
from nope_probe.figures.maps import export
from nope_probe.figures.panels import Panel, RowMaps, panel_groups, pool
from nope_probe.figures.style import axis, place_panels


def group(layer: int, top: float = 1.0) -> list[Panel]:
    values = np.full((5, 5), float(layer))
    return [
        Panel(name=f"L{layer}", values=values, low=0.0, high=top),
        Panel(name="ours", values=values, low=0.0, high=top),
        Panel(name="difference", values=values, low=-2.0, high=2.0, unit="steps", diverging=True),
    ]


def bars(figure) -> list[bool]:
    axes = [figure.layout[f"coloraxis{i or ''}"] for i in (0, *range(2, len(figure.data) + 1))]
    return [axis.showscale for axis in axes]


def test_groups_on_the_same_scales_share_a_bar_each_in_the_last_row() -> None:
    figure = panel_groups([group(layer) for layer in range(3)], title="title")
    assert bars(figure) == [False] * 6 + [True, False, True]


def test_groups_on_scales_of_their_own_have_bars_of_their_own() -> None:
    figure = panel_groups([group(0), group(1, top=3.0)], title="title")
    assert bars(figure) == [True, False, True] * 2
    assert figure.layout.coloraxis4.cmax == 3.0
    assert list(figure.layout.coloraxis4.colorbar.ticktext) == ["0", "1.5", "3"]
    pooled = Panel(name="pooled", values=np.zeros((4, 4)), low=-0.0, high=1.0, span=10.0)
    figure = panel_groups([[pooled]], title="title")
    assert (figure.data[0].x0, figure.data[0].dx) == (4.5, 10.0), "it spans all positions"
    assert list(figure.layout.coloraxis.colorbar.ticktext) == ["0", "0.5", "1"], "no minus zero"


def test_an_image_without_kaleido_or_chrome_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = go.Figure()
    with pytest.raises(UserError, match=r"ends in \.pdf, \.png or \.svg"):
        export(figure, tmp_path / "figure.jpg")
    monkeypatch.setattr("nope_probe.files.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need kaleido: pip install kaleido"):
        export(figure, tmp_path / "figure.png")
    monkeypatch.setattr("nope_probe.files.find_spec", lambda name: object())

    def no_chrome(*args: Any, **options: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    monkeypatch.setattr(go.Figure, "write_image", no_chrome)
    with pytest.raises(UserError, match="need Chrome or Chromium"):
        export(figure, tmp_path / "figure.png")


def test_panels_fill_the_width_are_as_high_as_asked_and_never_overlap() -> None:
    figure = place_panels("title", list("abcde"), columns=3, panel=100)
    layout, columns, height = figure.to_dict()["layout"], 3, 100
    inner = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
    at = [(layout[f"xaxis{axis(i)}"], layout[f"yaxis{axis(i)}"]) for i in range(5)]
    assert "xaxis6" not in layout, "a place without a panel has no axes"
    assert [y["domain"][1] - y["domain"][0] for _, y in at] == pytest.approx([height / inner] * 5)
    assert (at[0][0]["domain"][0], at[columns - 1][0]["domain"][1]) == (0, pytest.approx(1))
    assert at[0][0]["domain"][1] < at[1][0]["domain"][0]
    assert at[columns][1]["domain"][1] < at[0][1]["domain"][0], "the second row stands below"


def test_pooling_averages_blocks_and_leaves_the_masked_triangle_out() -> None:
    n = np.nan
    maps = np.array([[[1, n, n, n, n], [3, 5, n, n, n], [2, 4, 6, n, n], [4, 6, 8, 10, n]]])
    maps = np.concatenate([maps, np.full((1, 1, 5), 7.0)], axis=1).astype(np.float32)
    pooled = pool(RowMaps(values=maps), 3)
    assert pooled.block == 2
    # (1+3+5)/3 on the diagonal, (2+4+4+6)/4 below it; the last block has one row, then one cell.
    expected = [[[3, n, n], [4, 8, n], [7, 7, 7]]]
    np.testing.assert_allclose(pooled.values, expected)
    whole = pool(RowMaps(values=maps), 5)
    assert whole.block == 1
    np.testing.assert_array_equal(whole.values, maps)
    with pytest.raises(ValueError, match="at least 1 position, got 0"):
        pool(RowMaps(values=maps), 0)


def test_a_cell_of_a_pooled_map_is_the_mean_of_the_rows_in_it() -> None:
    queries = np.array([0, 3, 4, 9, 10, 11, 17, 18, 24, 30, 35, 36])
    cells = np.random.default_rng(3).normal(size=(len(queries), 37))
    rows = np.where(np.arange(37) <= queries[:, None], cells, np.nan)
    pooled = pool(RowMaps(values=rows[None], queries=queries), 8)
    maps = RowMaps(values=rows[None], queries=queries, skip_keys=1)
    with_leads = pool(maps, 8, with_leads=True)
    assert pooled.block == with_leads.block == 5
    assert with_leads.leads is not None
    for block in range(8):
        inside = rows[queries // 5 == block]
        leads, others = inside[:, 0], inside[:, 5:10]
        for found, cells in ((with_leads.leads, leads), (pooled.values[..., 1], others)):
            expected = np.nanmean(cells) if np.isfinite(cells).any() else np.nan
            assert found[0, block] == pytest.approx(expected, nan_ok=True, rel=1e-6)


MAPS = np.arange(3 * 5 * 5, dtype=float).reshape(3, 5, 5)
Drawn = list[tuple[go.Figure, dict[str, Any]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The figures that would be drawn, and with which sizes."""
    kept: Drawn = []

    def draw(figure: go.Figure, path: Path, **sizes: Any) -> None:
        kept.append((figure, sizes))

    monkeypatch.setattr(go.Figure, "write_image", draw)
    return kept


@pytest.mark.parametrize(
    "make",
    [
        lambda: figures.circuit({"a": MAPS[0]}),
        lambda: figures.score_maps(MAPS),
        lambda: figures.term_maps({"mask": MAPS, "rope": MAPS}, title="Sources"),
    ],
)
def test_a_saved_figure_has_no_controls_and_no_title_on_white(
    make: Callable[[], go.Figure], drawn: Drawn, tmp_path: Path
) -> None:
    figure = make()
    before = figure.to_json()
    assert figures.save(figure, tmp_path / "x.pdf") == tmp_path / "x.pdf"
    ((still, sizes),) = drawn
    assert not still.layout.updatemenus
    assert not still.layout.sliders
    assert still.layout.title.text is None
    assert still.layout.paper_bgcolor == "white"
    assert sizes["width"] == 1200
    assert sizes["height"] == still.layout.height
    assert figure.to_json() == before, "the figure itself stays as it was"


def test_a_slider_over_layers_becomes_a_panel_for_each(drawn: Drawn, tmp_path: Path) -> None:
    figures.save(figures.term_maps({"mask": MAPS, "rope": MAPS}, title="S"), tmp_path / "x.svg")
    [(terms, _)] = drawn
    names = [f"L{layer}, {term}" for layer in range(3) for term in ("causal mask", "RoPE")]
    assert [panel.name for panel in terms.data] == names
