"""The first figure of a finished run's page, as an image file."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import plotly.graph_objects as go

from nope_probe.errors import UserError
from nope_probe.figures.export import export, unfold_layers
from nope_probe.figures.style import TITLE_HEIGHT

# The first figure after a heading, and that heading.
FIGURE = re.compile(
    r'<h2 id="heading-\d+">([^<]*)</h2>(?:(?!<h2)[\s\S])*?<figure>'
    r'(?:(?!<h2)[\s\S])*?<script type="application/json">(.*?)</script>'
)


def draw_image(folder: Path, path: Path) -> None:
    """Draw the first figure of a run's page into a .png or .svg file, with all of its layers.

    Args:
        folder: the finished run.
        path: the file, which is overwritten.

    Raises:
        UserError: if the page has no figure, or it cannot be drawn or written.
    """
    export(first_figure((folder / "report.html").read_text(encoding="utf-8")), path)


def first_figure(html: str) -> go.Figure:
    """Return the first figure of a page, all layers of its maps, with its heading as title.

    Raises:
        UserError: if the page has none.
    """
    found = FIGURE.search(html)
    if found is None:
        raise UserError("there is no figure on the page to draw as an image")
    figure, title = go.Figure(json.loads(found[2])), {"text": unescape(found[1])}
    unfolded = unfold_layers(figure)
    if unfolded is not figure:
        return unfolded.update_layout(title=title)
    return figure.update_layout(
        title=title,
        height=figure.layout.height + TITLE_HEIGHT,
        margin={"t": figure.layout.margin.t + TITLE_HEIGHT},
    )
