"""What reaches the writer of images: every layer, on white, without controls and title."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support.chromium import needs_chromium
from support.traced import terms_table, writers_table

from nope_probe import figures
from nope_probe.errors import UserError

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
    ("width", "make"),
    [
        ("page", lambda: figures.circuit({"a": MAPS[0]})),
        *(
            (width, make)
            for width in ("page", "column")
            for make in (
                lambda: figures.score_maps(MAPS),
                lambda: figures.term_maps({"mask": MAPS, "rope": MAPS}, title="Sources"),
            )
        ),
    ],
)
def test_a_saved_figure_has_no_controls_and_no_title_on_white(
    make: Callable[[], go.Figure], width: Any, drawn: Drawn, tmp_path: Path
) -> None:
    figure = make()
    before = figure.to_json()
    assert figures.save(figure, tmp_path / "x.pdf", width=width) == tmp_path / "x.pdf"
    ((still, sizes),) = drawn
    assert not still.layout.updatemenus
    assert not still.layout.sliders
    assert still.layout.title.text is None
    assert still.layout.paper_bgcolor == "white"
    assert sizes["width"] == {"page": 1200, "column": 400}[width]
    assert sizes["height"] == still.layout.height
    assert figure.to_json() == before, "the figure itself stays as it was"


def test_a_slider_over_layers_becomes_a_panel_for_each(drawn: Drawn, tmp_path: Path) -> None:
    figures.save(figures.term_maps({"mask": MAPS, "rope": MAPS}, title="S"), tmp_path / "x.svg")
    [(terms, _)] = drawn
    names = [f"L{layer}, {term}" for layer in range(3) for term in ("causal mask", "RoPE")]
    assert [panel.name for panel in terms.data] == names


def test_a_title_is_drawn_where_it_is_asked_for_and_makes_the_image_higher(
    drawn: Drawn, tmp_path: Path
) -> None:
    figure = figures.score_maps(MAPS, title="Scores")
    for title in (True, False):
        figures.save(figure, tmp_path / "x.png", title=title)
    (titled, high), (_, low) = drawn
    assert titled.layout.title.text == "Scores"
    assert high["height"] == low["height"] + 16


def test_another_ending_or_width_is_refused(tmp_path: Path) -> None:
    figure, width = figures.score_maps(MAPS), "half"
    with pytest.raises(UserError, match=r"ends in \.pdf, \.png or \.svg"):
        figures.save(figure, tmp_path / "x.jpg")
    with pytest.raises(UserError, match="unknown width 'half'; there are column, page"):
        figures.save(figure, tmp_path / "x.png", width=width)  # type: ignore[arg-type]


def test_a_column_that_is_longer_than_a_page_is_refused(drawn: Drawn, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is 3,175 px long, .* draw it with width='page'"):
        figures.save(figures.circuit({"a": MAPS[0]}), tmp_path / "x.pdf", width="column")
    assert not drawn


def of_layers(**columns: object) -> pd.DataFrame:
    ends = ("", "_low", "_high")
    values = {f"{name}{end}": 0.5 for name in ("share", "lost", "rms", "loss") for end in ends}
    return pd.DataFrame([{"layer": layer, **values, **columns} for layer in range(3)])


COLUMNS: dict[str, Callable[[], go.Figure]] = {
    "terms": lambda: figures.term_maps({"mask": MAPS, "rope": MAPS}, title="Sources"),
    "sources": lambda: figures.source_losses(of_layers(of="lead", source="mask")),
    "trace": lambda: figures.position_circuit(terms_table(), writers_table()),
}


@needs_chromium
@pytest.mark.parametrize("kind", COLUMNS)
def test_no_text_of_a_printed_column_is_smaller_than_8_points(kind: str, tmp_path: Path) -> None:
    """A column is 3.3 inches wide, and an inch has 72 points."""
    drawn = figures.save(COLUMNS[kind](), tmp_path / "x.svg", width="column").read_text()
    (across,) = re.findall(r'viewBox="0 0 (\d+) \d+"', drawn)[:1]
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawn)]
    assert len(sizes) > 3
    assert min(sizes) * 3.3 * 72 / float(across) >= 8


@needs_chromium
def test_a_pdf_is_one(tmp_path: Path) -> None:
    path = figures.save(figures.score_maps(MAPS), tmp_path / "x.pdf", width="column")
    assert path.read_bytes().startswith(b"%PDF")
