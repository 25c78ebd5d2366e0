"""What reaches the writer of images: every layer, on white, without controls and title."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from nope_probe import figures

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
