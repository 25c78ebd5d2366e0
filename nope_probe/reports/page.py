"""The report page of all commands: self-contained HTML that works offline, and its sentences.

plotly.js is inlined once; the page loads nothing. Figures are stored as JSON and drawn when they
come into view or are unfolded, in the reader's colour scheme and for the width of the screen.
How to read them, and what limits the results, are sentences of `texts.toml` and `notes.txt`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.errors import UserError, printable
from nope_probe.figures.names import in_words, words
from nope_probe.figures.words import (
    CLIPPED,
    PLACES,
    Column,
    Columns,
    View,
    is_number,
    layer_names,
)
from nope_probe.files import packaged, template
from nope_probe.run.manifest import Manifest

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import plotly.graph_objects as go

    from nope_probe.figures.panels import RowMaps
    from nope_probe.run.folder import Run


MOST_ROWS = 8  # of a lead's table
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

    sentence: str = ""
    table: pd.DataFrame | None = None
    caption: str = ""
    then: Headline | None = None

    def html(self) -> str:
        """Return the headline as HTML, a table without rows left out."""
        return template("reports", "headline.html", number=is_number).render(headline=self)


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

    def plot(self) -> dict[str, object] | None:
        """Return the figure as a page stores it: its JSON, its height and a text alternative."""
        from plotly.io.json import to_json_plotly

        from nope_probe.figures.maps import without_title

        figure = self.drawn()
        if figure is None:
            return None
        spec = without_title(figure)
        # plotly escapes "<" and "/", so that "</script>" cannot end the element that holds the
        # figure. Escaping "<" is enough; escaped slashes of base64 would be a fifth of the page.
        return {
            "json": str(to_json_plotly(spec)).replace("\\u002f", "/").replace("</", "<\\/"),
            "height": spec["layout"].get("height", 400),
            "label": f"{figure.layout.title.text or self.title}. {self.caption}",
        }

    def numbers(self) -> str | None:
        """Return the table as HTML."""
        if self.table is None:
            return None
        columns = {**PLACES, **self.columns}
        texts = in_words(self.table, columns)
        headings = [columns.get(name, Column(name)).title for name in map(str, texts)]
        return texts.set_axis(headings, axis=1).to_html(index=False, border=0)


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

        return template("reports", "page.html", number=is_number).render(
            title=self.title,
            run=about(manifest),
            headline=self.headline,
            sections=self.sections,
            notes=[*self.how_to_read, *run_notes(manifest)],
            manifest=manifest,
            manifest_json=json.dumps(manifest.to_json(), indent=1, default=str),
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


def sections(
    views: Sequence[View],
    tables: Mapping[str, pd.DataFrame],
    columns: Columns,
    marks: Mapping[str, Mapping[str, int]] | None = None,
) -> Iterator[Section]:
    """Yield the sections of a page, a section for each view whose table has rows.

    A table that several views draw is under the figure of the first.

    Args:
        views: in the page's order.
        tables: the run's.
        columns: the study's numbers.
        marks: by table, named places on x to mark with lines, such as the trained context.
    """
    from nope_probe.figures.views import draw, is_drawn

    first = {view.table: view for view in reversed(views)}
    for view in views:
        table = tables.get(view.table)
        if table is not None and len(table):
            drawn = table.query(view.rows) if view.rows else table
            yield Section(
                title=view.title,
                caption=view.caption,
                figure=partial(draw, view, drawn, columns, (marks or {}).get(view.table))
                if is_drawn(view, drawn)
                else None,
                table=table if view is first[view.table] else None,
                columns=columns,
                folded=view.folded,
            )


def row_maps(run: Run, values: np.ndarray) -> RowMaps:
    """Return maps of a run [layer, row, key_pos], which know the queries of their rows."""
    from nope_probe.figures.panels import RowMaps

    return RowMaps(values=values, queries=run.query_positions, skip_keys=run.manifest.skip_keys)


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


def captions(command: str) -> Mapping[str, str]:
    """Return the captions of a command's page, by name, from its table in `texts.toml`."""
    captions: Mapping[str, str] = packaged("reports/texts.toml")[command]
    return captions


def how_to_read(page: str | Sequence[str], **numbers: object) -> list[str]:
    """Return how to read a page's figures, a sentence or two each.

    Args:
        page: a name in `how_to_read` of `texts.toml`, or lines as there; a line of one word means
            the sentence of that name.
        numbers: of the run, which its sentences name.
    """
    sentences = captions("words")
    lines = captions("how_to_read")[page].splitlines() if isinstance(page, str) else page
    limits = {"clipped": 100 / CLIPPED, **numbers}
    return [sentences.get(line, line).format_map(limits) for line in lines]


def run_notes(manifest: Manifest) -> list[str]:
    """Return notes on weak intervals, measures of some queries, windows and components left out.

    Example:
        >>> from nope_probe.run.manifest import Manifest
        >>> run_notes(Manifest(documents=40, fold_sizes=(64,) * 8, query_stride=1))
        []
        >>> run_notes(Manifest(documents=6))[0].split(". ")[0]
        'The intervals come from only 6 documents, so they are rough'
        >>> run_notes(Manifest(distinct_sequences=1, fold_sizes=(8,) * 8))[0].split(". ")[0]
        'All 64 sequences are the same, so the intervals have no width'
        >>> run_notes(Manifest(query_stride=4))[0].split(". ")[0]
        'Locality and monotonicity use 1 query in 4, from query 0'
        >>> run_notes(Manifest(results={"windows": {"L0": 512, "L2": 512}}))[0].split(". ")[0]
        'A sliding window or chunk leaves a query at most 512 keys in L0, 512 keys in L2'
        >>> left_out = {"window": "it hides no key in sequences of 64 tokens"}
        >>> run_notes(Manifest(results={"left_out": left_out}))
        ['Not removed by default: sliding window (it hides no key in sequences of 64 tokens).']
    """
    keys_from = () if manifest.model is None else manifest.model.keys_from
    reasons = manifest.results.get("left_out") or {}
    lines = template("reports", "notes.txt").render(
        manifest=manifest,
        layers=layer_names,
        sharing={layer: source for layer, source in enumerate(keys_from) if layer != source},
        left_out=[
            (why, ", ".join(map(words, alike))) for why, alike in groupby(reasons, reasons.get)
        ],
    )
    of_text = () if manifest.text is None else manifest.text.notes
    padding = [manifest.data.padding] if manifest.data.padding else []
    return [*lines.splitlines(), *padding, *manifest.data.notes, *of_text]


def about(manifest: Manifest) -> dict[str, str]:
    """Return words for the model, with its weights and layers, and for the texts.

    Example:
        >>> from nope_probe.run.manifest import Manifest
        >>> settings = {"data": "shipped", "n_seqs": 64, "seq_len": 128}
        >>> about(Manifest(settings=settings))
        {'Data': '64 sequences of 128 tokens of shipped Python source'}
    """
    model, name = manifest.model, str(manifest.settings.get("data", ""))
    name = printable(Path(name).name if Path(name).is_absolute() else name)
    layers = {*manifest.layers, *(() if model is None else model.not_attending)}
    lines = template("reports", "about.txt").render(
        manifest=manifest,
        name=printable(manifest.model_name),
        layers=layer_names,
        source=captions("data").get(name, name),
        is_all=model is None or {*range(model.depth)} <= layers,
    )
    return dict(line.split(": ", 1) for line in lines.splitlines())
