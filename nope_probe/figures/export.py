"""Figures as PNG or SVG files, drawn by kaleido with the Chrome that is installed."""

from __future__ import annotations

from base64 import b64decode
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.errors import UserError
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.style import DIVERGING
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


def unfold_layers(figure: go.Figure) -> go.Figure:
    """Return a figure of the maps of all layers, each on its own colours, instead of a slider.

    A figure without a slider, or of curves, comes back as it is.

    Example:
        >>> from nope_probe import figures
        >>> one = figures.term_maps({"all": np.ones((3, 5, 5))}, title="pattern")
        >>> [panel.name for panel in unfold_layers(one).data]
        ['L0', 'L1', 'L2']
    """
    meta = figure.layout.meta or {}
    n_layers, scales = meta.get("n_layers", 1), meta.get("scales")
    if n_layers < 2 or not scales:
        return figure
    is_signed = figure.layout.coloraxis.colorscale == tuple(DIVERGING)
    n_terms = len(figure.data) // n_layers
    labels = [step.label for step in figure.layout.sliders[0].steps]
    groups: list[list[Panel]] = [[] for _ in labels]
    for index, trace in enumerate(figure.data):
        place, values = index // n_terms, _cells(trace)
        name, (low, high) = f"L{labels[place]}", scales[place]
        panel = Panel(
            name=f"{name}, {trace.name}" if n_terms > 1 else name,
            values=values,
            low=low,
            high=high,
            diverging=is_signed,
            positions=round(trace.dx * len(values)),
        )
        groups[place].append(panel)
    return panel_groups(groups, title=figure.layout.title.text or "")


def _cells(trace: go.Heatmap) -> Float[np.ndarray, "query_pos key_pos"]:
    """Return the cells of a heat map, also of one that was read from a page."""
    z = trace.to_plotly_json()["z"]
    if not isinstance(z, dict):
        return np.asarray(z)
    shape = [int(size) for size in str(z["shape"]).split(",")]
    return np.frombuffer(b64decode(z["bdata"]), z["dtype"]).reshape(shape)
