"""Figures as PNG or SVG files, drawn by kaleido with the Chrome that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go

from nope_probe.errors import UserError
from nope_probe.files import local_path

ENDINGS = (".png", ".svg")
WIDTH = 1200  # px
SCALE = 2  # a PNG's pixels per px


def validate_image_path(path: Path) -> None:
    """Check that a path is one for an image.

    Raises:
        UserError: unless it ends in .png or .svg.
    """
    if path.suffix not in ENDINGS:
        raise UserError(f"cannot draw {path}: expected a name that ends in {' or '.join(ENDINGS)}")


def export(figure: go.Figure, path: Path) -> None:
    """Draw a figure into a file, without its buttons and sliders.

    Args:
        figure: any figure of this project; it is not changed.
        path: a .png or .svg file, which is overwritten.

    Raises:
        UserError: if kaleido or Chrome is missing, or the file cannot be written.
    """
    path = local_path(path)
    validate_image_path(path)
    if find_spec("kaleido") is None:
        raise UserError("images need kaleido: pip install 'nope-probe[export]'")
    still = without_controls(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        still.write_image(path, width=WIDTH, height=still.layout.height, scale=SCALE)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except RuntimeError as error:
        raise UserError(
            "images need Chrome or Chromium, which could not be started: install it, or set "
            "BROWSER_PATH to its path"
        ) from error


def without_controls(figure: go.Figure) -> go.Figure:
    """Return a copy without buttons and sliders, and without the space for the buttons."""
    still = go.Figure(figure)
    if still.layout.updatemenus:
        menu = still.layout.meta["menu"]
        still.layout.margin.t -= menu
        still.layout.height -= menu
    still.layout.updatemenus = None
    still.layout.sliders = None
    return still
