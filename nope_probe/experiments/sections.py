"""The report of a finished run, declared once for its page, the terminal and images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nope_probe.errors import UserError, printable
from nope_probe.figures.curves import band_amplitudes, offset_profiles, query_strengths
from nope_probe.figures.image import export
from nope_probe.figures.intervals import interval_of, interval_text, percent
from nope_probe.figures.maps import unfold_layers
from nope_probe.figures.style import TITLE_HEIGHT
from nope_probe.reports import notes
from nope_probe.reports.page import Section, page
from nope_probe.runtime.folder import Run, read_run

WIDTH, GAP = 80, 2  # of a terminal, and between two columns of a table


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run's findings.

    Attributes:
        title: of the page.
        headline: the result, a sentence each.
        sections: figures with their sentences and tables, in the page's order.
        how_to_read: how to read the figures, a sentence or two each.
        terminal: tables of text by their titles, which the terminal shows before the headline.
        closing: what the terminal says of intervals, after the headline.
    """

    title: str
    headline: Sequence[str]
    sections: Sequence[Section]
    how_to_read: Sequence[str] = notes.HOW_TO_READ
    terminal: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    closing: str = ""

    def html(self, manifest: Mapping[str, Any]) -> str:
        """Return the page of a run, given its manifest."""
        return page(self.title, self.headline, self.sections, manifest, self.how_to_read)

    def image(self) -> go.Figure:
        """Return the first figure, all layers of its maps, with its section's title.

        Raises:
            UserError: if the report has no figure.
        """
        for section in self.sections:
            figure = section.drawn()
            if figure is not None:
                return _titled(figure, section.title)
        raise UserError("there is no figure on the page to draw as an image")


def _titled(figure: go.Figure, title: str) -> go.Figure:
    unfolded = unfold_layers(figure)
    if unfolded is figure:
        # A figure with its own title has that height already.
        room = 0 if figure.layout.title.text else TITLE_HEIGHT
        figure = go.Figure(figure)
        figure.layout.height += room
        figure.layout.margin.t += room
        unfolded = figure
    return unfolded.update_layout(title={"text": title})


def show(report_of: Callable[[Run], Report], folder: Path, image: Path | None = None) -> None:
    """Print a finished run's findings, and draw its first figure into a file.

    Args:
        report_of: makes the report of a run.
        folder: the finished run.
        image: a .pdf, .png or .svg file, which is overwritten; None for no image.

    Raises:
        UserError: if the image cannot be drawn or written.
    """
    run = read_run(folder)
    report = report_of(run)
    print_report(report, run.manifest, folder)
    if image is not None:
        export(report.image(), image)


class PlainConsole(Console):
    """A console on stdout that reads no markup, and shows control characters escaped.

    Tables and sentences hold names of models, files and folders, which others chose.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Let the command end as SIGPIPE ends it; rich's own exit code would say that it failed.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich prints it; markup stays as it is written."""
        return super().render_str(printable(text, keep="\n"), **options | {"markup": False})


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout, with control characters escaped."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))


def print_report(report: Report, manifest: Mapping[str, Any], folder: Path) -> None:
    """Print a run's tables, its headline, its intervals' meaning, and the path of its page."""
    console = PlainConsole()
    for title, table in report.terminal.items():
        for part in tables_that_fit(title, table):
            console.print(part)
            console.print()
    for sentence in report.headline:
        console.print(sentence, end="\n\n")
    if report.closing:
        console.print(report.closing, style="dim")
    for note in notes.run_notes(manifest):
        console.print(note)
    console.print(f"open {folder / 'report.html'}", soft_wrap=True)


def closing_of(manifest: Mapping[str, Any]) -> str:
    """Return the meaning of a run's brackets, and the keys that its measures leave out."""
    skip, documents = manifest["skip_keys"], manifest.get("documents")
    of_documents = "" if documents is None else f" of {documents} documents"
    return (
        f"Brackets are 95% intervals from {manifest['settings']['folds']} folds{of_documents}; "
        f"{skip} first key{'' if skip == 1 else 's'} skipped; noise biases locality towards 0."
    )


def with_intervals(
    names: Mapping[str, Iterable[str]], rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]]
) -> pd.DataFrame:
    """Return estimates with their intervals as text, for a table on the terminal.

    Args:
        names: the first columns, by their headings.
        rows: the estimates, each with its bounds beside it.
        columns: by their headings, the estimate and the format of its numbers; a format that ends
            in `%` shows percent.

    Example:
        >>> rows = pd.DataFrame({"share": [0.5], "share_low": [0.4], "share_high": [0.6]})
        >>> with_intervals({"layer": ["L0"]}, rows, {"%": ("share", "z.0%")}).iloc[0].tolist()
        ['L0', '50 [40, 60]']
    """
    table = pd.DataFrame({heading: list(values) for heading, values in names.items()})
    for heading, (column, style) in columns.items():
        intervals = [interval_of(row, column) for row in rows.to_dict("records")]
        if style.endswith("%"):
            intervals, style = [percent(interval) for interval in intervals], f"{style[:-1]}f"
        table[heading] = [interval_text(interval, style) for interval in intervals]
    return table


def tables_that_fit(title: str, texts: pd.DataFrame) -> Iterator[Table]:
    """Yield a table of text as tables that are narrow enough for a terminal.

    The first column names the rows and is in every table; rows with an empty name belong to the
    row before, and a rule stands between such groups.
    """
    headings = list(texts.columns)
    is_grouped = bool((texts[headings[0]] == "").any())
    widths = [
        max(len(line) for text in (heading, *texts[heading]) for line in str(text).split("\n"))
        for heading in headings
    ]
    for group in columns_that_fit(widths):
        more = ", continued" if group[1] > 1 else ""
        table = Table(
            title=f"{title}{more}",
            box=SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
            show_edge=False,
        )
        for place in group:
            is_number = place > 0 and texts[headings[place]].map(_is_number).all()
            table.add_column(
                headings[place], justify="right" if is_number else "left", no_wrap=True
            )
        for index, row in enumerate(texts.itertuples(index=False)):
            if is_grouped and index and row[0]:
                table.add_section()
            table.add_row(*(str(row[place]) for place in group))
        yield table


def _is_number(text: str) -> bool:
    return not text or text[0] in "+-0123456789" or text == "no pattern"


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


def band_finding(bands: pd.DataFrame) -> str:
    """Return which RoPE band has the strongest positional pattern, and in which layer."""
    title = "The positional pattern by RoPE band"
    clear = bands[bands["amplitude_low"] > 0]
    if clear.empty:
        return f"{title}: not distinguishable from noise"
    top = clear.sort_values("amplitude").iloc[-1]
    return (
        f"{title}: {top['band']} in L{top['layer']} is the strongest, {top['amplitude']:.2g} nats"
    )


def offset_finding(offsets: pd.DataFrame) -> str:
    """Return where near and far keys differ most, the nearest and farthest quarter of distances.

    The quarters differ where their mean intervals do not overlap.
    """
    title, largest = "Scores by distance", (0.0, "near and far keys are not distinguishable")
    whole = offsets[offsets["term"].isin(["all"])]
    for layer, rows in whole.groupby("layer"):
        means = rows[["mean", "mean_low", "mean_high"]].to_numpy(float)
        last = rows["last_offset" if "last_offset" in rows else "offset"].to_numpy(int)
        quarter = -(-last.max() // 4)
        near = means[last <= quarter].mean(axis=0)
        far = means[last > last.max() - quarter].mean(axis=0)
        step = near[0] - far[0]
        if (near[1] > far[2] or near[2] < far[1]) and abs(step) > largest[0]:
            side = "above" if step > 0 else "below"
            text = (
                f"in L{layer} the nearest quarter scores {abs(step):.2g} nats {side} the farthest"
            )
            largest = abs(step), text
    return f"{title}: {largest[1]}"


def lengths_of(run: Run) -> dict[str, int]:
    """Return the lengths that a model states, and the windows of its layers, in tokens."""
    windows = {int(window) for window in run.manifest.get("windows", {}).values()}
    named = {f"window {window}": window for window in sorted(windows)}
    return {**run.manifest.get("lengths", {}), **named}


def query_finding(queries: pd.DataFrame) -> str:
    """Return how the pattern of the strongest layer changes from the first to the last queries."""
    title = "The positional pattern by the query's position"
    strong = queries[queries["rms_low"] > 0]
    if strong.empty:
        return f"{title}: not distinguishable from noise"
    layer = strong.groupby("layer")["rms"].max().idxmax()
    rows = queries[queries["layer"] == layer].sort_values("query")
    first, last = (
        f"{row['rms']:.2g} nats RMS at {_queries(row)}" for _, row in rows.iloc[[0, -1]].iterrows()
    )
    return f"{title}: in L{layer:.0f} {first}, {last}"


def _queries(row: pd.Series) -> str:
    first, last = int(row["query"]), int(row["last_query"])
    return f"query {first}" if first == last else f"queries {first} to {last}"


def split_sections(
    tables: Mapping[str, pd.DataFrame], lengths: Mapping[str, int] | None = None
) -> Iterator[Section]:
    """Return the page's sections of the splits.

    Args:
        tables: the run's.
        lengths: that the model states, such as its context, in tokens.
    """
    if "bands" in tables:
        yield Section(
            title=band_finding(tables["bands"]),
            figure=band_amplitudes(tables["bands"]),
            caption="A score is a sum over RoPE's pairs, so its map is a sum over bands of pairs. "
            "The strength (RMS) of each band's own positional pattern; bands can cancel, and their "
            "shares of the whole pattern (in the table) add up to 1.",
            table=tables["bands"],
        )
    if "offsets" in tables:
        yield Section(
            title=offset_finding(tables["offsets"]),
            figure=offset_profiles(tables["offsets"]),
            caption="The mean over all queries and keys at each distance, of the scores and of the "
            "positional pattern (scores less each row's mean). Shaded: 95% intervals.",
        )
    if "queries" in tables:
        yield Section(
            title=query_finding(tables["queries"]),
            figure=query_strengths(tables["queries"], lengths or {}),
            caption="The RMS of the positional pattern in the rows of neighbouring queries. A row "
            "of a later query has more keys. Dotted lines: the lengths that the model states. "
            "Shaded: 95% intervals.",
            table=tables["queries"],
        )
