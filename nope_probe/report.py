"""The one report page of all commands: self-contained HTML that works offline.

plotly.js is inlined once; the page loads nothing. Figures are kept as JSON and drawn when they come
into view, in the reader's colour scheme and for the width of the screen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from nope_probe.figure_style import BLANK, GRID, INK

HOW_TO_READ = (
    "A score is what attention feeds to softmax, in nats: one nat more for a key makes it e = 2.7 "
    "times as likely to be attended to.",
    "Each map has a row per query (downward) and a column per key (rightward), both counted from 0. "
    "Cells above the diagonal are blank: a causal model cannot see them.",
    "A pattern is a score map less each row's mean over the keys before the query, because softmax "
    "ignores a constant per row. Red is more than the row's mean, blue is less, white is the mean.",
    "Bars are 95% intervals over folds of the sequences. \u201cno pattern\u201d means that a layer's "
    "pattern cannot be told from noise, so that it has no shares.",
    "Layers are counted from 1. The strongest 0.5% of the cells may lie beyond the colour bar; "
    "hovering gives every cell's own value.",
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page.

    Attributes:
        title: heading.
        figure: what is seen; None for a section of words.
        caption: one or two lines in plain words.
        table: the numbers behind the figure, shown folded.
    """

    title: str
    caption: str
    figure: go.Figure | None = None
    table: pd.DataFrame | None = None


def page(
    title: str,
    answer: Sequence[str],
    sections: Sequence[Section],
    manifest: Mapping[str, Any],
    notes: Sequence[str] = HOW_TO_READ,
) -> str:
    """Write a report as one HTML page.

    Args:
        title: what was run, in a few words.
        answer: the result, a sentence each.
        sections: figures with captions, in order.
        manifest: what was run, in full; shown at the end.
        notes: how to read the figures.
    """
    template = resources.files("nope_probe").joinpath("templates/page.html").read_text("utf-8")
    return Template(template).substitute(
        title=escape(title),
        command=escape(str(manifest.get("command", ""))),
        answer="".join(f"<p>{escape(each)}</p>" for each in answer),
        contents="".join(_link(i, each.title) for i, each in enumerate(sections)),
        sections="".join(_section(i, each) for i, each in enumerate(sections)),
        notes="".join(f"<li>{escape(each)}</li>" for each in notes),
        manifest=escape(json.dumps(manifest, indent=1, default=str)),
        neutral=json.dumps({"ink": INK, "grid": GRID, "blank": BLANK}),
        plotly=get_plotlyjs(),
    )


def _link(index: int, title: str) -> str:
    return f'<li><a href="#section-{index}">{escape(title)}</a></li>'


def _section(index: int, section: Section) -> str:
    return (
        f'<section id="section-{index}" aria-labelledby="heading-{index}">'
        f'<h2 id="heading-{index}">{escape(section.title)}</h2>'
        f"{_figure(index, section)}{_table(section)}</section>"
    )


def _figure(index: int, section: Section) -> str:
    caption = escape(section.caption)
    if section.figure is None:
        return f"<p>{caption}</p>"
    label = escape(f"{section.figure.layout.title.text or section.title}. {section.caption}")
    height = section.figure.layout.height or 400
    return (
        f'<figure><div class="plot" role="img" aria-label="{label}" style="min-height:{height}px">'
        f'</div><script type="application/json">{_json(section.figure)}</script>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _json(figure: go.Figure) -> str:
    # "</" would end the script element that holds the figure.
    return str(figure.to_json()).replace("</", "<\\/")


def _table(section: Section) -> str:
    if section.table is None:
        return ""
    shown = section.table.to_html(
        index=False, border=0, na_rep="no pattern", float_format=lambda value: f"{value:.3g}"
    )
    return (
        '<details><summary>The numbers</summary><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(section.title)}: numbers">{shown}</div></details>'
    )
