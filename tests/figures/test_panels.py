"""Panels: their places, scales and bars; figures as image files."""

from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from nope_probe.errors import UserError
from nope_probe.figures.circuit_figure import circuit
from nope_probe.figures.image import export, without_controls
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.style import Grid


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
    narrow = figure.layout.meta["narrow"]
    assert [narrow[f"coloraxis{i}.showscale"] for i in ("", 3, 7, 9)] == [False, False, True, True]


def test_groups_on_scales_of_their_own_have_bars_of_their_own() -> None:
    figure = panel_groups([group(0), group(1, top=3.0)], title="title")
    assert bars(figure) == [True, False, True] * 2
    assert figure.layout.coloraxis4.cmax == 3.0
    assert list(figure.layout.coloraxis4.colorbar.ticktext) == ["0", "1.5", "3"]
    pooled = Panel(name="pooled", values=np.zeros((4, 4)), low=-0.0, high=1.0, positions=40)
    figure = panel_groups([[pooled]], title="title")
    assert (figure.data[0].x0, figure.data[0].dx) == (4.5, 10.0), "it spans all positions"
    assert list(figure.layout.coloraxis.colorbar.ticktext) == ["0", "0.5", "1"], "no minus zero"


def test_an_image_has_no_buttons_and_leaves_the_figure_as_it_was() -> None:
    figure = circuit({"a": np.eye(5)})
    still = without_controls(figure)["layout"]
    assert "updatemenus" not in still
    assert still["height"] == figure.layout.height - figure.layout.meta["menu"]
    assert len(figure.layout.updatemenus) == 2


def test_an_image_without_kaleido_or_chrome_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = go.Figure()
    with pytest.raises(UserError, match=r"ends in \.pdf, \.png or \.svg"):
        export(figure, tmp_path / "figure.jpg")
    monkeypatch.setattr("nope_probe.files.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need kaleido: pip install 'nope-probe\[export\]'"):
        export(figure, tmp_path / "figure.png")
    monkeypatch.setattr("nope_probe.files.find_spec", lambda name: object())

    def no_chrome(*args: Any, **options: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    monkeypatch.setattr(go.Figure, "write_image", no_chrome)
    with pytest.raises(UserError, match="need Chrome or Chromium"):
        export(figure, tmp_path / "figure.png")


def test_panels_fill_the_width_and_never_overlap() -> None:
    domains = Grid(columns=3, panel=100).domains(5)
    assert domains[0][0][0] == 0
    assert domains[2][0][1] == pytest.approx(1)
    assert domains[0][0][1] < domains[1][0][0]
    assert domains[3][1][1] < domains[0][1][0], "the second row stands below the first"
