"""Figures in a browser: their sizes, their texts and what is written of them."""

import re
from collections.abc import Iterable
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from ci.chromium import needs_chromium, opened
from support.maps import triangle

from nope_probe import figures
from nope_probe.figures.graph import steps_back
from nope_probe.figures.image import without_controls
from nope_probe.figures.maps import term_maps


@needs_chromium
def test_a_slider_leaves_the_maps_their_size_at_every_width(tmp_path: Path) -> None:
    figure = term_maps({"all": triangle(5), "mask": triangle(5)}, title="t")
    still = without_controls(figure)["layout"]
    tall = still["height"] - still["margin"]["t"] - still["margin"]["b"]
    seen = """<script>setTimeout(() => {
      const { _fullLayout } = document.querySelector(".js-plotly-plot");
      document.body.dataset.tall = Math.round(_fullLayout._size.h);
      const box = (name) => document.querySelector(name).getBoundingClientRect();
      const bar = box(".infolayer .colorbar");
      document.body.dataset.apart = box(".slider-container").top - bar.bottom;
    }, 1000)</script></body>"""
    page = figure.to_html(full_html=True).replace("</body>", seen)
    for width in (700, 1000):
        elements = opened(page, tmp_path, width=width, draw_all=False)
        assert f'data-tall="{tall}"' in elements
        assert float(re.findall(r'data-apart="(-?[\d.]+)', elements)[0]) > 0


MAPS = np.arange(3 * 5 * 5, dtype=float).reshape(3, 5, 5)


@needs_chromium
def test_a_pdf_is_one(tmp_path: Path) -> None:
    path = figures.save(figures.score_maps(MAPS), tmp_path / "x.pdf")
    assert path.read_bytes().startswith(b"%PDF")


# Tokens and names that figures would read as tags, entities, values or formulas.
MARKUP = ("<b>", "</s>", "<bos>", "<br>", '<a href="x">y</a>', "&lt;", "&amp;", "%{y}", "$x$", "a")


def _steps() -> go.Figure:
    n = len(MARKUP)
    look = {"step": 1, "layer": 1, "head": 0, "query": n - 1, "key": range(n)}
    term = {"writer": "L0H0", "side": "key", "moved_from": pd.NA, "nats": 1.0}
    return steps_back(pd.DataFrame({**look, **term}), dict(enumerate(MARKUP)), "steps")


@needs_chromium
def test_tokens_and_names_are_drawn_as_they_are_spelled(tmp_path: Path) -> None:
    tokens = [f"{token} {key}" for key, token in enumerate(MARKUP)]
    terms = {name: np.zeros((1, 5, 5)) for name in MARKUP}
    drawn: list[tuple[go.Figure, Iterable[str]]] = [
        (_steps(), tokens),
        (term_maps(terms, title="t"), MARKUP),
    ]
    scripts = (
        figure.to_html(full_html=False, include_plotlyjs=number == 0)
        for number, (figure, _) in enumerate(drawn)
    )
    page = opened("<hr>".join(scripts), tmp_path, draw_all=False)
    for part, (_, texts) in zip(page.split("<hr>"), drawn, strict=True):
        inside = re.findall(r"<text[^>]*>(.*?)</text>", part, re.DOTALL)
        shown = {unescape(re.sub("<[^>]*>", "", text)) for text in inside}
        assert {*texts} <= shown
        assert "<a " not in "".join(inside)
