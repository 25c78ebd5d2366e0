"""Figures in a browser: their sizes, their texts and what is written of them."""

import re
from html import unescape
from pathlib import Path

import numpy as np
from ci.chromium import needs_chromium, opened
from support.maps import triangle

from nope_probe import figures
from nope_probe.figures.maps import term_maps, without_controls


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


# Names that figures would read as tags, entities, values or formulas.
MARKUP = ("<b>", "</s>", "<bos>", "<br>", '<a href="x">y</a>', "&lt;", "&amp;", "%{y}", "$x$", "a")


@needs_chromium
def test_names_are_drawn_as_they_are_spelled(tmp_path: Path) -> None:
    figure = term_maps({name: np.zeros((1, 5, 5)) for name in MARKUP}, title="t")
    page = opened(figure.to_html(full_html=False), tmp_path, draw_all=False)
    inside = re.findall(r"<text[^>]*>(.*?)</text>", page, re.DOTALL)
    assert {*MARKUP} <= {unescape(re.sub("<[^>]*>", "", text)) for text in inside}
    assert "<a " not in "".join(inside)
