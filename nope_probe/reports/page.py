"""The report page of all commands: self-contained HTML that works offline.

plotly.js is inlined once; the page loads nothing. Figures are stored as JSON and drawn when they
come into view or are unfolded, in the reader's colour scheme and for the width of the screen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

from nope_probe.errors import UserError
from nope_probe.figures.intervals import is_number
from nope_probe.figures.words import Column
from nope_probe.reports import notes
from nope_probe.run.manifest import Manifest

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


MOST_ROWS = 8  # of a lead's table
MOST_OPEN = 100  # rows of a table that is shown open
PAGE_BYTES = 14_000_000
PLOTLY_BYTES = 5_000_000
CELL_BYTES = 16 / 3  # a float32 in base64
MAP_BYTES = 500  # bytes of a map next to its cells
LAYER_BYTES = 30_000  # bytes of a layer's dots and rows of numbers


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The result of a run, which its page and the terminal say first.

    Attributes:
        sentence: at most 25 words, for a reader of the README.
        table: its numbers as text, at most 8 rows; the first column names the rows.
        caption: how to read the table, at most 40 words.
        then: a second result.
    """

    sentence: str
    table: pd.DataFrame | None = None
    caption: str = ""
    then: Headline | None = None

    def html(self) -> str:
        """Return the headline as HTML, a table without rows left out."""
        sentence, caption = (
            f"<p>{escape(text)}</p>" if text else "" for text in (self.sentence, self.caption)
        )
        then = "" if self.then is None else f"<div>{self.then.html()}</div>"
        return f"{sentence}{_headline_table(self.table)}{caption}{then}"


def _headline_table(table: pd.DataFrame | None) -> str:
    if table is None or table.empty:
        return ""
    kinds = ["" if all(map(is_number, table[name])) else ' class="words"' for name in table]
    head = "".join(
        f'<th scope="col"{kind}>{escape(str(name))}</th>'
        for name, kind in zip(table, kinds, strict=True)
    )
    rows = (
        f'<th scope="row">{escape(first)}</th>'
        + "".join(
            f"<td{kind}>{escape(text).replace('±', '<wbr>±')}</td>"
            for text, kind in zip(others, kinds[1:], strict=True)
        )
        for first, *others in table.itertuples(index=False)
    )
    body = "".join(f"<tr>{cells}</tr>" for cells in rows)
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="The result in numbers"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page.

    Attributes:
        title: what it shows, at most 8 words, without numbers.
        caption: how to read the figure, and how it misleads, at most 40 words.
        figure: the figure, or a function that draws it on demand; None for a section of words.
        html: an element instead of a figure.
        table: the figure's numbers, shown folded.
        columns: the declared columns of the table, by name.
        folded: whether only the heading shows until it is opened.
    """

    title: str
    caption: str
    figure: go.Figure | Callable[[], go.Figure] | None = None
    html: str = ""
    table: pd.DataFrame | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    folded: bool = False

    def drawn(self) -> go.Figure | None:
        """Return the figure, drawn now if necessary."""
        return self.figure() if callable(self.figure) else self.figure


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run's findings.

    Attributes:
        title: of the page.
        headline: the result: one sentence and one small table.
        sections: figures with captions and tables, in the page's order.
        how_to_read: how to read the figures, a sentence or two each.
    """

    title: str
    headline: Headline
    sections: Sequence[Section]
    how_to_read: Sequence[str] = ()

    def html(self, manifest: Manifest) -> str:
        """Return the report as one page, given the run's manifest, which stands at the end."""
        from plotly.offline import get_plotlyjs

        from nope_probe.figures.style import ON_DARK

        first, *others = (_section(*numbered) for numbered in enumerate(self.sections))
        template = resources.files("nope_probe.reports").joinpath("page.html").read_text("utf-8")
        return Template(template).substitute(
            title=escape(self.title),
            run=_facts(notes.about(manifest)),
            headline=self.headline.html(),
            sections=first
            + _how_to_read([*self.how_to_read, *notes.run_notes(manifest)])
            + "".join(others),
            command=escape(manifest.command),
            what_was_run=_facts(notes.what_was_run(manifest)),
            manifest=escape(json.dumps(manifest.to_json(), indent=1, default=str)),
            on_dark=json.dumps(ON_DARK),
            plotly=get_plotlyjs(),
        )

    def image(self) -> go.Figure:
        """Return the first figure.

        Raises:
            UserError: if the report has no figure.
        """
        for section in self.sections:
            figure = section.drawn()
            if figure is not None:
                return figure
        raise UserError("there is no figure on the page to draw as an image")


def _facts(facts: Mapping[str, str]) -> str:
    rows = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def positions(n_maps: int, n_layers: int, n_points: int = 0) -> int:
    """Return how many positions each map may have for the page to stay under 15 MB.

    Args:
        n_maps: maps per layer on the page.
        n_layers: layers.
        n_points: numbers per layer that are drawn as lines or dots.
    """
    from nope_probe.figures.maps import MAX_POSITIONS

    layer = LAYER_BYTES + MAP_BYTES * n_maps + CELL_BYTES * n_points
    room = PAGE_BYTES - PLOTLY_BYTES - n_layers * layer
    cells = max(0.0, room / CELL_BYTES / (n_maps * n_layers))
    return max(1, min(MAX_POSITIONS, int(cells**0.5)))


def _how_to_read(notes: Sequence[str]) -> str:
    """Return how to read the figures, folded; it stands next to the first of them."""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        '<section id="how" aria-labelledby="how-heading"><details class="fold"><summary>'
        '<h2 id="how-heading">How to read the figures</h2></summary>'
        f'<ul class="notes">{lines}</ul></details></section>'
    )


def _section(index: int, section: Section) -> str:
    heading = f'<h2 id="heading-{index}">{escape(section.title)}</h2>'
    content = f"{_figure(section)}{_table(section)}"
    if section.folded:
        shown = f'<details class="fold"><summary>{heading}</summary>{content}</details>'
    else:
        shown = heading + content
    return f'<section id="section-{index}" aria-labelledby="heading-{index}">{shown}</section>'


def _figure(section: Section) -> str:
    from plotly.io.json import to_json_plotly

    from nope_probe.figures.maps import without_title

    caption = escape(section.caption)
    figure = section.drawn()
    if figure is None:
        return section.html + (f"<p>{caption}</p>" if caption else "")
    spec = without_title(figure)
    # plotly escapes "<" and "/", so that "</script>" cannot end the element that holds the figure.
    # Escaping "<" is enough; escaped slashes of base64 would be a fifth of the page.
    content = str(to_json_plotly(spec)).replace("\\u002f", "/").replace("</", "<\\/")
    label = escape(f"{figure.layout.title.text or section.title}. {section.caption}")
    return (
        f'<figure><div class="plot" role="img" aria-label="{label}" '
        f'style="min-height:{spec["layout"].get("height", 400)}px"></div>'
        f'<script type="application/json">{content}</script>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(section: Section) -> str:
    """Return a section's table, open where a short one is all that the section shows."""
    if section.table is None:
        return ""
    from nope_probe.figures.views import in_words

    texts = in_words(section.table, section.columns)
    headings = [section.columns.get(name, Column(name)).title for name in map(str, texts)]
    shown = texts.set_axis(headings, axis=1).to_html(index=False, border=0)
    is_alone = section.figure is None and not section.html and len(section.table) <= MOST_OPEN
    return (
        f"<details{' open' * is_alone}><summary>The numbers</summary>"
        '<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(section.title)}: the numbers">{shown}</div></details>'
    )
