"""The report of a finished run, declared once for its page, the terminal and images.

Pieces of the sentences on a run's findings come last: headings, headlines, numbers in words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nope_probe.errors import UserError, printable
from nope_probe.experiments.verdicts import EIGHT_FOLDS, exceeds_noise, verdict_on_heads
from nope_probe.figures.curves import band_amplitudes, offset_profiles, query_strengths
from nope_probe.figures.image import export
from nope_probe.figures.intervals import (
    bound_columns,
    excludes_zero,
    interval_of,
    interval_text,
    percent,
)
from nope_probe.figures.maps import unfold_layers
from nope_probe.figures.style import TITLE_HEIGHT
from nope_probe.figures.words import numbered_layers, reader_of
from nope_probe.reports import notes
from nope_probe.reports.page import Section, page
from nope_probe.runtime.folder import Run, read_run

if TYPE_CHECKING:
    from nope_probe.runtime.session import Session

OTHERS = (  # by how many keys count as first: none, one, several
    "",
    "locality and relative share leave the first key out; ",
    "locality and relative share leave the first keys out; ",
)
WIDTH, GAP = 80, 2  # of a terminal, and between two columns of a table
NOISE = "not distinguishable from noise"
NO_PATTERN = f"The positional pattern is {NOISE} in any layer"
MOST_HEADS = 3  # in a sentence
RELOAD = (  # the end of a first page's first words
    "Reload this page when the command has ended. If the command was interrupted, run it again: it "
    "goes on from here."
)
HIDDEN = {  # by the verdict on the heads of a layer whose mean shows no pattern
    "opposite": "Heads of opposite sign cancel in their mean",
    "unclear": "Single heads have a pattern that their mean does not show",
}


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


def with_page(session: Session[Any], run: Run, report_of: Callable[[Run], Report]) -> Run:
    """Return a run with its page, unless its folder is removed at the end of a Python call."""
    if not session.call.is_kept:
        return run
    return replace(run, page=report_of(run).html(run.manifest))


def _titled(figure: go.Figure, title: str) -> go.Figure:
    unfolded = unfold_layers(figure)
    if unfolded is figure:
        # A figure with its own title has that height already.
        room = 0 if figure.layout.title.text else TITLE_HEIGHT
        unfolded = go.Figure(figure)
        unfolded.layout.height += room
        unfolded.layout.margin.t += room
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
    """Return the meaning of a run's brackets, and the keys that its measures of shape leave out."""
    skip, documents = manifest["skip_keys"], manifest.get("documents")
    of_documents = "" if documents is None else f" of {documents} documents"
    return (
        f"Brackets are 95% intervals from {manifest['settings']['folds']} folds{of_documents}; "
        f"{OTHERS[min(skip, 2)]}noise biases locality towards 0."
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
    for layer, rows in offsets[offsets["term"] == "all"].groupby("layer"):
        means = rows[["mean", "mean_low", "mean_high"]].to_numpy(float)
        last = rows["last_offset" if "last_offset" in rows else "offset"].to_numpy(int)
        quarter = -(-last.max() // 4)
        near = means[last <= quarter].mean(axis=0)
        far = means[last > last.max() - quarter].mean(axis=0)
        step = near[0] - far[0]
        if (near[1] > far[2] or near[2] < far[1]) and abs(step) > largest[0]:
            size = f"{abs(step):.2g} nats {'above' if step > 0 else 'below'}"
            largest = abs(step), f"in L{layer} the nearest quarter scores {size} the farthest"
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


def capitalised(text: str) -> str:
    """Return a text with its first letter large, and all others unchanged.

    Example:
        >>> capitalised("the causal mask"), capitalised("RoPE")
        ('The causal mask', 'RoPE')
    """
    return text[:1].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    """Return parts as a list in a sentence.

    Example:
        >>> listed(["mask"]), listed(["mask", "RoPE", "W_Q"])
        ('mask', 'mask, RoPE and W_Q')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def percents(share: SupportsFloat) -> str:
    """Return a share in whole percents, below 1% in tenths.

    Example:
        >>> percents(0.984), percents(0.004), percents(0.0), percents(-0.12)
        ('98%', '0.4%', '0%', '-12%')
    """
    value = 100 * float(share)
    return f"{value:.1f}%" if 0.05 <= abs(value) < 0.95 else f"{value:z.0f}%"


def fold_sizes_of(manifest: Mapping[str, Any]) -> Sequence[int]:
    """Return the sequences per fold of a run, or equal folds where its manifest names none."""
    return manifest.get("fold_sizes", EIGHT_FOLDS)


def above_noise(
    rows: pd.DataFrame, fold_sizes: Sequence[int] = EIGHT_FOLDS, amplitude: str = "amplitude"
) -> pd.Series[bool]:
    """Return which rows have an amplitude that exceeds the noise of all rows.

    Args:
        rows: one model's layers, or its heads.
        fold_sizes: sequences per fold.
        amplitude: the column of the amplitude, nats.
    """
    ends = zip(rows[amplitude], rows[bound_columns(amplitude)[0]], strict=True)
    clear = [exceeds_noise(value, low, len(rows), fold_sizes) for value, low in ends]
    return pd.Series(clear, rows.index, dtype=bool)


def strongest(
    rows: pd.DataFrame, fold_sizes: Sequence[int] = EIGHT_FOLDS, amplitude: str = "amplitude"
) -> pd.Series | None:
    """Return the row with the largest amplitude, if any exceeds the noise; see `above_noise`."""
    above = rows[above_noise(rows, fold_sizes, amplitude)]
    return None if above.empty else above.sort_values(amplitude).iloc[-1]


def hidden_heads(
    pattern: pd.DataFrame, heads: pd.DataFrame, fold_sizes: Sequence[int] = EIGHT_FOLDS
) -> list[str]:
    """Return a sentence on the strongest head in a layer whose mean over heads has no pattern.

    Args:
        pattern: the measures of the means over heads, a row per layer.
        heads: the amplitude of each head, a row per layer and head.
        fold_sizes: sequences per fold.
    """
    flat = pattern[~above_noise(pattern, fold_sizes)]
    clear = above_noise(heads, fold_sizes)
    hidden = heads[clear & heads["layer"].isin(flat["layer"])].sort_values("amplitude")
    if hidden.empty:
        return []
    layer = int(hidden.iloc[-1]["layer"])
    lows = heads["amplitude_low"].where(clear, 0.0)
    own = of_layer(heads.assign(amplitude_low=lows), layer).to_dict("records")
    mean = interval_of(of_layer(flat, layer).iloc[0], "amplitude")
    verdict = verdict_on_heads(mean, [interval_of(row, "amplitude") for row in own])
    strong = hidden[hidden["layer"] == layer].iloc[: -MOST_HEADS - 1 : -1]
    names = [f"{reader_of(row)} {nats(row, 'amplitude')}" for _, row in strong.iterrows()]
    return [f"{HIDDEN[verdict]}: {', '.join(names)} nats"]


def preference(row: Mapping[Any, Any] | pd.Series) -> str:
    """Return which keys a pattern prefers, with the number that shows it, where there is one."""
    if isnan(row["locality"]):
        return "has too few keys per query to rank them"
    keys = "near" if row["locality"] > 0 else "far"
    return f"prefers {keys} keys (rank correlation with the key's position {row['locality']:+.2f})"


def nats(row: Mapping[Any, Any] | pd.Series, column: str) -> str:
    """Return an estimate of a table's row with its interval, to a thousandth."""
    return interval_text(interval_of(row, column))


def preferred_keys(row: Mapping[str, float] | pd.Series) -> str:
    """Return which keys a row's pattern prefers: near, far, or neither, an empty word."""
    if row["locality_low"] > 0:
        return "near"
    return "far" if row["locality_high"] < 0 else ""


def measure_finding(pattern: pd.DataFrame) -> str:
    """Return the layers that prefer near keys, and the layers that prefer far keys.

    Args:
        pattern: the measures of one model, a row per layer.
    """
    above = pattern[pattern["amplitude_low"] > 0]
    if above.empty:
        return f"Measures: the positional pattern is {NOISE} in any layer"
    kinds = above.apply(preferred_keys, axis=1)
    names = {"near": "near keys", "far": "far keys", "": "neither near nor far keys"}
    layers = {name: above.loc[kinds == kind, "layer"].astype(int) for kind, name in names.items()}
    parts = [f"{name} in {numbered_layers(at)}" for name, at in layers.items() if len(at)]
    return f"Measures: attention prefers {', '.join(parts)}"


def of_layer(table: pd.DataFrame, layer: int | None) -> pd.DataFrame:
    """Return a table's rows of one layer; none if there is no such layer."""
    return table[table["layer"] == (-1 if layer is None else layer)]


def largest(table: pd.DataFrame, column: str) -> pd.Series:
    """Return the row with the largest absolute value."""
    return table.iloc[int(np.argmax(table[column].abs().to_numpy(float)))]


def noisy_layers(table: pd.DataFrame, name: str, column: str) -> dict[str, list[int]]:
    """Return per item of a table the layers in which its estimate does not exceed the noise.

    Args:
        table: `layer`, the items' column, and the estimate with its bounds.
        name: the items' column.
        column: the estimate; an item is above the noise where its interval excludes zero.
    """
    flat = table[~excludes_zero(table, column)]
    return {
        str(item): [int(layer) for layer in flat[flat[name] == item]["layer"]]
        for item in table[name].unique()
    }
