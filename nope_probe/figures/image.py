"""Figures as files for a paper or a talk, drawn by kaleido with the installed Chrome."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any, Literal

import plotly.graph_objects as go

from nope_probe.errors import UserError, closed_choices
from nope_probe.figures.maps import unfold_layers
from nope_probe.figures.style import SLIDER, TITLE_HEIGHT, Layout, patch
from nope_probe.files import NO_BROWSER, local_path, validate_image_name, validate_kaleido

Width = Literal["column", "page"]
SCALE = 2  # a PNG's pixels per px
WIDTHS: dict[Width, int] = {"column": 400, "page": 1200}  # px; a column has the phone's layout
COLUMN_INCHES, SMALLEST = 3.3, 8.0  # a printed column's width, and its smallest text, points
SMALLEST_PX = ceil(10 * SMALLEST * WIDTHS["column"] / (72 * COLUMN_INCHES)) / 10
LONGEST_COLUMN = 1300  # px: 10.7 inches where 400 px are 3.3, the most that a page of A4 holds


@closed_choices("width")
def save(
    figure: go.Figure, path: str | Path, *, width: Width = "page", title: bool = False
) -> Path:
    """Draw a figure into a file for print, on white, without menus and sliders.

    A slider over layers becomes a panel for each layer. Each panel has a separate colour scale.

    Args:
        figure: any figure of `nope_probe.figures`; it is not changed.
        path: a .pdf, .png or .svg file, which is overwritten.
        width: `page` for the layout of a wide screen, 1200 px; `column` for the layout of a phone,
            400 px (a PNG has twice as many pixels), where no text is smaller than 8 points if the
            column is printed 3.3 inches wide.
        title: whether to draw the figure's title; a paper has a caption instead.

    Returns:
        The path.

    Raises:
        UserError: for another ending, if kaleido or Chrome is missing, if the file cannot be
            written, or if a column of the figure is longer than a page.
    """
    spec = without_controls(unfold_layers(figure))
    layout = spec["layout"]
    if width == "column":
        patch(layout, layout.get("meta", {}).get("narrow", {}))
        enlarge_text(spec, SMALLEST_PX)
        if layout["height"] > LONGEST_COLUMN:
            raise UserError(
                f"a column of this figure is {layout['height']:,.0f} px long, and a page holds "
                f"{LONGEST_COLUMN:,}: draw it with width='page'"
            )
    if not title and layout.get("title", {}).pop("text", None):
        layout["margin"]["t"] -= TITLE_HEIGHT
        layout["height"] -= TITLE_HEIGHT
    return export(go.Figure(spec), Path(path), WIDTHS[width])


def enlarge_text(keys: Any, smallest: float) -> None:
    """Raise all sizes of text in a figure's keys to a smallest size, px."""
    if isinstance(keys, dict):
        for name, value in keys.items():
            if name.endswith("font"):
                value["size"] = max(value.get("size", smallest), smallest)
            else:
                enlarge_text(value, smallest)
    elif isinstance(keys, list | tuple):
        for value in keys:
            enlarge_text(value, smallest)


def export(figure: go.Figure, path: Path, width: int = WIDTHS["page"]) -> Path:
    """Draw a figure into a file, on white and without its buttons and sliders.

    Args:
        figure: any figure of this project; it is not changed.
        path: a .pdf, .png or .svg file, which is overwritten.
        width: the image's width, px.

    Returns:
        The path, absolute.

    Raises:
        UserError: for another ending, if kaleido or Chrome is missing, or if the file cannot be
            written.
    """
    path = local_path(path)
    validate_image_name(path)
    validate_kaleido()
    still = go.Figure(without_controls(figure)).update_layout(paper_bgcolor="white")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        still.write_image(path, width=width, height=still.layout.height, scale=SCALE)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except RuntimeError as error:
        raise UserError(NO_BROWSER) from error
    return path


def without_controls(figure: go.Figure) -> Layout:
    """Return a figure's `data` and `layout` without buttons, sliders and their space."""
    spec = figure.to_plotly_json()
    layout = spec["layout"]
    if layout.pop("updatemenus", ()):
        layout["margin"]["t"] -= layout["meta"]["menu"]
        layout["height"] -= layout["meta"]["menu"]
    if layout.pop("sliders", ()):
        layout["margin"]["b"] -= SLIDER
        layout["height"] -= SLIDER
    return spec
