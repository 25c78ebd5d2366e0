"""A finished run in the terminal, as an image, and its page's figures in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nope_probe.errors import printable
from nope_probe.figures.maps import save
from nope_probe.figures.words import Column, bound_columns, is_number, numbers_as_text
from nope_probe.reports.page import Headline, Report, about, run_notes
from nope_probe.run.folder import Run, read_run
from nope_probe.run.manifest import Manifest
from nope_probe.run.processes import status
from nope_probe.studies.commands import COMMANDS

if TYPE_CHECKING:
    from nope_probe.run.session import Session

WIDTH = 80  # of a table of numbers


def of_run(run: Run) -> dict[str, go.Figure]:
    """Return the figures of a run's page by the titles of their sections, in the page's order.

    Args:
        run: of any command, as its function or `read_run` returns it.

    Example:
        >>> from nope_probe import figures, run_ablations
        >>> run = run_ablations("nope-tiny", layers=2, n_seqs=8, folds=4, remove="sources")
        >>> next(iter(figures.of_run(run)))
        'The pattern, and what each source makes'
    """
    report = COMMANDS[run.manifest.kind].report(run)
    drawn = {section.title: section.drawn() for section in report.sections}
    return {title: figure for title, figure in drawn.items() if figure is not None}


def with_page(session: Session[Any], run: Run, report_of: Callable[[Run], Report]) -> Run:
    """Return a run with its page, but where its folder is removed at the end of a Python call."""
    if not session.is_kept:
        return replace(run, page="")
    with status("writing the report"):
        return replace(run, page=report_of(run).html(run.manifest))


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
    if facts := about(manifest):
        console.print("; ".join(facts.values()), style="dim")
    print_headline(console, report.headline)
    if verbose:
        for section in report.sections:
            if section.table is not None and len(section.table):
                lines = in_parts(rows_by_name(section.table, section.columns))
                console.print(section.title, lines, sep="\n", end="\n\n", soft_wrap=True)
        console.print(*report.how_to_read, sep="\n", style="dim")
    for note in run_notes(manifest):
        console.print(note)
    console.print(f"open {folder / 'report.html'}", soft_wrap=True)


def print_headline(console: Console, headline: Headline) -> None:
    """Print a result: its sentence, its table, how to read it, and what else there is."""
    console.print(headline.sentence, end="\n\n" if headline.sentence else "")
    if headline.table is not None and len(headline.table):
        print_table(console, headline.table)
    if headline.caption:
        console.print(headline.caption, style="dim")
    if headline.then is not None:
        console.print(end="\n" * bool(headline.then.sentence))
        print_headline(console, headline.then)


def print_table(console: Console, texts: pd.DataFrame) -> None:
    """Print a table of text; the names of rows and a last column of words wrap where need be."""
    cells = {name: "\n".join([str(name), *map(str, texts[name])]) for name in texts}
    first, *others = texts
    numeric = {name for name in others if all(map(is_number, texts[name]))}
    wrapped = {first} | ({others[-1]} - numeric if others else set())
    narrowest = [of.split() if name in wrapped else of.split("\n") for name, of in cells.items()]
    if sum(2 + max(map(len, column)) for column in narrowest) - 2 > WIDTH:
        console.print(in_parts(texts), end="\n\n", soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for name in texts:
        table.add_column(
            str(name),
            justify="right" if name in numeric else "left",
            no_wrap=name not in wrapped,
        )
    for row in texts.astype(str).itertuples(index=False):
        table.add_row(*row)
    console.print(table, end="\n\n")


def in_parts(texts: pd.DataFrame) -> str:
    """Return a table of text in parts that fit a terminal, with the first column in each part.

    Example:
        >>> in_parts(pd.DataFrame({"layer": ["L0"], "lead": ["4.1"]})).splitlines()
        ['layer lead', 'L0     4.1']
    """
    texts = texts.replace("\n", " ", regex=True)
    name, rows = str(texts.columns[0]), texts.set_index(texts.columns[0])
    rows.columns = [" ".join(str(heading).split()) for heading in rows]
    return rows.rename_axis(index=None, columns=name).to_string(line_width=WIDTH)


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
