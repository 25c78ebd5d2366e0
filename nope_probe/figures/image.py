"""Figures as files for a paper or a talk, drawn by kaleido with the installed Chrome."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go

from nope_probe.errors import UserError
from nope_probe.figures.maps import unfold_layers
from nope_probe.figures.style import SLIDER, TITLE_HEIGHT, Layout
from nope_probe.files import NO_BROWSER, local_path, validate_image_name, validate_kaleido

WIDTH, SCALE = 1200, 2  # px, and a PNG's pixels per px


def save(figure: go.Figure, path: str | Path) -> Path:
    """Draw a figure into a file for print, on white, without title and sliders.

    A slider over layers becomes a panel for each layer. Each panel has a separate colour scale.

    Args:
        figure: any figure of `nope_probe.figures`; it is not changed.
        path: a .pdf, .png or .svg file, 1200 px wide (a PNG has twice as many pixels), which is
            overwritten.

    Returns:
        The path.

    Raises:
        UserError: for another ending, if kaleido or Chrome is missing, or if the file cannot be
            written.
    """
    spec = without_controls(unfold_layers(figure))
    layout = spec["layout"]
    if layout.get("title", {}).pop("text", None):
        layout["margin"]["t"] -= TITLE_HEIGHT
        layout["height"] -= TITLE_HEIGHT
    return export(go.Figure(spec), Path(path))


def export(figure: go.Figure, path: Path) -> Path:
    """Draw a figure into a file, on white and without its buttons and sliders.

    Args:
        figure: any figure of this project; it is not changed.
        path: a .pdf, .png or .svg file, which is overwritten.

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
        still.write_image(path, width=WIDTH, height=still.layout.height, scale=SCALE)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except RuntimeError as error:
        raise UserError(NO_BROWSER) from error
    return path


def without_controls(figure: go.Figure) -> Layout:
    """Return a figure's `data` and `layout` without sliders and their space."""
    spec = figure.to_plotly_json()
    layout = spec["layout"]
    if layout.pop("sliders", ()):
        layout["margin"]["b"] -= SLIDER
        layout["height"] -= SLIDER
    return spec
