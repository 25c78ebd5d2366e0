"""Figures as files for a paper or a talk, drawn by kaleido with the Chrome that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import plotly.graph_objects as go

from nope_probe.errors import closed_choices
from nope_probe.figures.grid import export, patch, without_controls
from nope_probe.figures.maps import unfold_layers
from nope_probe.figures.style import TITLE_HEIGHT

Width = Literal["column", "page"]
WIDTHS: dict[Width, int] = {"column": 400, "page": 1200}  # px; a column has the phone's layout


@closed_choices("width")
def save(
    figure: go.Figure, path: str | Path, *, width: Width = "page", title: bool = False
) -> Path:
    """Draw a figure into a file as a paper prints it, on white, without menus and sliders.

    A slider over layers becomes a panel for each layer, with colours of its own.

    Args:
        figure: any figure of `nope_probe.figures`; it is not changed.
        path: a .pdf, .png or .svg file, which is overwritten.
        width: `page` for the layout of a wide screen, 1200 px; `column` for that of a phone, 400 px
            (a PNG has twice as many pixels). Text has 13 px in both: at 400 px across 3.3 inches
            that is 8 points.
        title: whether to draw the figure's title; a paper has its caption.

    Returns:
        The path.

    Raises:
        UserError: for another ending, if kaleido or Chrome is missing, or if the file cannot be
            written.
    """
    drawn = without_controls(unfold_layers(figure))
    if width == "column":
        patch(drawn, (drawn.layout.meta or {}).get("narrow", {}))
    if not title and drawn.layout.title.text:
        drawn.layout.title.text = None
        drawn.layout.margin.t -= TITLE_HEIGHT
        drawn.layout.height -= TITLE_HEIGHT
    return export(drawn, Path(path), WIDTHS[width])
