"""A finished run in the terminal, as an image, and its page's figures in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nope_probe.errors import printable
from nope_probe.figures.intervals import bound_columns, is_number, numbers_as_text
from nope_probe.figures.maps import save
from nope_probe.figures.words import Column
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Report
from nope_probe.run.folder import Run, read_run
from nope_probe.run.manifest import Manifest

if TYPE_CHECKING:
    from nope_probe.run.session import Session

WIDTH, GAP, NAMES = 80, 2, 27  # of a terminal, between columns, and of a line in the first


def of_run(run: Run) -> dict[str, go.Figure]:
    """Return the figures of a run's page by the titles of their sections, in the page's order.

    Args:
        run: of any command, as its function or `read_run` returns it.

    Example:
        >>> from nope_probe import figures, run_ablations
        >>> run = run_ablations("nope-tiny", layers=2, n_seqs=8, folds=4, remove="sources")
        >>> next(iter(figures.of_run(run)))
        'The three numbers in every layer'
    """
    study = import_module(f"nope_probe.studies.{run.manifest.kind}")
    drawn = {section.title: section.drawn() for section in study.report(run).sections}
    return {title: figure for title, figure in drawn.items() if figure is not None}


def with_page(session: Session[Any], run: Run, report_of: Callable[[Run], Report]) -> Run:
    """Return a run with its page, but where its folder is removed at the end of a Python call."""
    return replace(run, page=report_of(run).html(run.manifest) if session.is_kept else "")


def show(
    report_of: Callable[[Run], Report],
    folder: Path,
    image: Path | None = None,
    verbose: bool = False,
) -> None:
    """Print a finished run's findings, and draw its first figure into a file.

    Args:
        report_of: makes the report of a run.
        folder: the finished run.
        image: a .pdf, .png or .svg file, which is overwritten; None for no image.
        verbose: whether to print all tables.

    Raises:
        UserError: if the image cannot be drawn or written.
    """
    run = read_run(folder)
    report = report_of(run)
    print_report(report, run.manifest, folder, verbose)
    if image is not None:
        save(report.image(), image)


class PlainConsole(Console):
    """A console on stdout that reads no markup, and shows control characters escaped.

    Tables and sentences hold names of models, files and folders, which others chose.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Let the command end as SIGPIPE ends it; rich's exit code would say that it failed.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich prints it; markup stays as it is written."""
        return super().render_str(printable(text, keep="\n"), **options | {"markup": False})


def print_report(report: Report, manifest: Manifest, folder: Path, verbose: bool = False) -> None:
    """Print a run's sentence and table, and the path of its page; all tables if `verbose`."""
    console = PlainConsole()
    console.print(manifest.command, soft_wrap=True, style="dim")
    if facts := notes.about(manifest):
        console.print("; ".join(facts.values()), style="dim")
    print_headline(console, report.headline)
    if verbose:
        for section in report.sections:
            if section.table is not None and len(section.table):
                texts = rows_by_name(section.table, section.columns)
                print_table(console, texts, section.title)
        how_to_read = [*report.how_to_read, *notes.intervals_note(manifest)]
        console.print(*how_to_read, sep="\n", style="dim")
    for note in notes.run_notes(manifest):
        console.print(note)
    console.print(f"open {folder / 'report.html'}", soft_wrap=True)


def print_headline(console: Console, headline: Headline) -> None:
    """Print a result: its sentence, its table, how to read it, and a second result."""
    console.print(headline.sentence, end="\n\n")
    if headline.table is not None:
        print_table(console, headline.table)
    if headline.caption:
        console.print(headline.caption, style="dim")
    if headline.also:
        console.print(f"\n{headline.also}")


def print_table(console: Console, table: pd.DataFrame, title: str = "") -> None:
    """Print a table of text in parts that are narrow enough for a terminal."""
    if title:
        console.print(title)
    if len(table):
        names = table.iloc[:, 0].map(lambda text: "\n".join(wrap(text, NAMES)) or text)
        table = pd.concat([names, table.iloc[:, 1:]], axis=1)
    for part in tables_that_fit(table) if len(table) else ():
        console.print(part, end="\n\n")


def rows_by_name(table: pd.DataFrame, columns: Mapping[str, Column] = {}) -> pd.DataFrame:
    """Return a table as text, with the columns before its first estimate as one.

    Example:
        >>> lost = {"lost": [0.5], "lost_low": [0.4], "lost_high": [0.6]}
        >>> rows_by_name(pd.DataFrame({"layer": [1], "removed": ["mask"], **lost})).iloc[0].tolist()
        ['1, mask', '0.5 [0.4, 0.6]']
    """
    texts = numbers_as_text(table, columns)
    estimates = [name for name in texts if bound_columns(str(name))[0] in table]
    n_names = [*texts].index(estimates[0]) if estimates else 1
    names = texts.iloc[:, :n_names].agg(", ".join, axis=1)
    names = names.rename(", ".join(texts.columns[:n_names]))
    return pd.concat([names, texts.iloc[:, n_names:]], axis=1)


def tables_that_fit(texts: pd.DataFrame) -> Iterator[Table]:
    """Yield a table of text as tables that are narrow enough for a terminal.

    The first column names the rows, and is in every table.
    """
    headings = list(texts.columns)
    widths = [
        max(len(line) for text in (heading, *texts[heading]) for line in str(text).split("\n"))
        for heading in headings
    ]
    for group in columns_that_fit(widths):
        table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
        for place in group:
            numeric = place > 0 and texts[headings[place]].map(is_number).all()
            table.add_column(headings[place], justify="right" if numeric else "left", no_wrap=True)
        for row in texts.itertuples(index=False):
            table.add_row(*(str(row[place]) for place in group))
        yield table


def columns_that_fit(widths: Sequence[int]) -> list[list[int]]:
    """Return the places of a table's columns, in groups that are narrow enough for a terminal.

    Args:
        widths: of the columns; the first column names the rows, in every group.

    Example:
        >>> columns_that_fit([5, 30, 30, 60])
        [[0, 1, 2], [0, 3]]
    """
    groups: list[list[int]] = []
    for place in range(1, len(widths)):
        here = [*groups[-1], place] if groups else [0, place]
        if not groups or sum(widths[column] + GAP for column in here) - GAP > WIDTH:
            groups.append([0, place])
        else:
            groups[-1].append(place)
    return groups
