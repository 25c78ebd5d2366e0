"""The report of a reproduced figure: published and reproduced panels, and the paper's claims."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from nope_probe.figures.maps import save
from nope_probe.figures.panels import Panel, RowMaps, panel_groups, pool
from nope_probe.figures.words import capitalised
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section, how_to_read
from nope_probe.run.folder import Run, read_run
from nope_probe.run.manifest import Manifest, read_manifest, record_of
from nope_probe.studies.page import PlainConsole, print_headline
from paper_claims import Reproduction
from published_panels import Pair, agreements, pairs_of
from reproduce_settings import title_of

COMPARED = (
    "Differences are in steps of the panel's colours. The table has each panel's difference, "
    "and the difference expected from noise."
)
OTHER_MODEL = (
    "The reproduced map is another model's, with other colours, without the first key and the "
    "diagonal: values cannot be compared, shapes can."
)
HOW_TO_READ = (
    "axes",  # a line of every page
    "Published panels are the paper's figures read back into numbers. Each colour is one of 256 "
    "steps between the ends of the panel's colour bar.",
    "A difference is the reproduced map, clipped likewise, less the published panel, in these "
    "steps. Rounding to colours alone makes differences of up to half a step.",
    "Noise is the difference that two standard errors let expect, of the paper's 100,000 samples "
    "and of the reproduced map.",
    "The paper counts layers from 1, and this page from 0: the paper's layer 1 is L0.",
)
DRAWN = 128  # positions of a map on the page


def report(run: Run, pairs: Sequence[Pair]) -> Report:
    """Return the report of a reproduced figure.

    Args:
        run: the figure's run.
        pairs: the published panels with the reproduced maps.
    """
    figure, manifest = title_of(run.manifest.settings["figure"]), run.manifest
    return Report(
        title=f"{figure} of the paper, reproduced",
        headline=headline(manifest),
        sections=[*_figures(figure, pairs), _claims(record_of(Reproduction, manifest.results))],
        how_to_read=how_to_read(HOW_TO_READ),
    )


def headline(manifest: Manifest) -> Headline:
    """Return how many of the paper's claims are reproduced, and which."""
    figure, found = title_of(manifest.settings["figure"]), record_of(Reproduction, manifest.results)
    claims = found.claims
    n = sum(claim.reproduced for claim in claims)
    sentence = f"Of the paper's claims about {figure}, {n} of {len(claims)} could be reproduced."
    marks = [verdict_mark(claim.reproduced).replace("\u00a0", " ") for claim in claims]
    table = pd.DataFrame(
        zip((claim.paper for claim in claims[:MOST_ROWS]), marks, strict=False),
        columns=["the paper's claim", "verdict"],
    )
    return Headline(
        sentence=sentence if claims else f"The paper makes no claim about {figure}.",
        table=table,
        caption=capitalised(" ".join(found.notes[:1])),
    )


def draw(folder: Path, image: Path) -> None:
    """Draw the first figure of a reproduced figure's page into a .pdf, .png or .svg file.

    Raises:
        UserError: if an experiment is missing, or the figure cannot be drawn.
    """
    run = read_run(folder)
    runs = {name: read_run(path) for name, path in _experiments(run.manifest, folder).items()}
    pairs = pairs_of(run.manifest.settings["figure"], runs)
    save(report(run, pairs).image(), image)


def _experiments(manifest: Manifest, folder: Path) -> dict[str, Path]:
    """Return the folders of a figure's experiments by name."""
    experiments = record_of(Reproduction, manifest.results).experiments
    return {name: Path(os.path.normpath(folder / path)) for name, path in experiments.items()}


def verdict_mark(reproduced: bool) -> str:
    """Return a verdict with its sign."""
    return "✓\u00a0reproduced" if reproduced else "✗\u00a0not\u00a0reproduced"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link to another page.

    Attributes:
        text: the link's text.
        href: the page, relative to the page with the link.
    """

    text: str
    href: str


Cell = str | Link


def listing(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return lines of text and links as HTML: a table, or on a phone a list with columns' names.

    A row's first cell is its heading and has no label.

    Example:
        >>> listing(["figure"], [[Link(text="Figure 2", href="a.html")]]).split("<tbody>")[1]
        '<tr><td><a href="a.html">Figure 2</a></td></tr></tbody></table>'
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    labels = ["", *columns[1:]]
    lines = ("".join(map(_cell, row, labels)) for row in rows)
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    return f'<table class="listing"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(cell: Cell, label: str) -> str:
    text = escape(cell.text if isinstance(cell, Link) else cell)
    shown = f'<a href="{escape(cell.href)}">{text}</a>' if isinstance(cell, Link) else text
    data = f' data-label="{escape(label)}"' if label else ""
    return f"<td{data}>{shown}</td>"


def _claims(found: Reproduction) -> Section:
    links = {
        name: Link(text=name or "report", href=f"{path}/report.html")
        for name, path in found.experiments.items()
    }
    rows: list[list[Cell]] = []
    for claim in found.claims:
        link = links.get(claim.experiment, "")
        rows.append([claim.paper, verdict_mark(claim.reproduced), claim.evidence, link])
    return Section(
        title="The paper's claims, with their numbers",
        caption="Each claim, checked on the experiment whose report is linked.",
        html=listing(("the paper's claim", "verdict", "numbers", "report"), rows),
    )


def _figures(figure: str, pairs: Sequence[Pair]) -> Iterator[Section]:
    for group in dict.fromkeys(pair.group for pair in pairs):
        members = [pair for pair in pairs if pair.group == group]
        panels, agreement = [list(_panels(pair)) for pair in members], agreements(members)
        yield Section(
            title="Published, reproduced, and the difference",
            figure=panel_groups(panels, title=f"{figure}: {group}"),
            caption=f"{figure}, {group}. {OTHER_MODEL if agreement.empty else COMPARED}",
            table=None if agreement.empty else agreement,
        )


def _panels(pair: Pair) -> Iterator[Panel]:
    """Yield the published and the reproduced map, and their difference if they are comparable."""
    published, agreement = pair.published, agreements([pair])
    maps = {f"paper, {pair.name}": published.values, "reproduced": pair.reproduced}
    for name, values in maps.items():
        shared = (published.low, published.high)
        yield _panel(pair, name, values, *(shared if pair.comparable else _own_limits(values)))
    if pair.steps is not None and len(agreement):
        row, limit = agreement.iloc[0], np.nanquantile(np.abs(pair.steps), 0.99)
        exact = row["within_one"] == 1
        size = f" ≤ {row['largest']:.2f}" if exact else f", RMS {row['rms']:.2g}"
        end = float(max(2, math.ceil(limit)))  # differences below two steps are drawn flat
        panel = _panel(pair, f"difference{size}", pair.steps, -end, end)
        yield replace(panel, unit="colour steps", diverging=True)


def _panel(pair: Pair, name: str, values: np.ndarray, low: float, high: float) -> Panel:
    """Return a panel with a colour bar, centred on zero for signed values."""
    is_signed, top = pair.published.kind == "normalised", max(abs(low), abs(high))
    drawn = pool(RowMaps(values=values[None]), DRAWN)
    return Panel(
        name=name,
        values=drawn.values[0],
        low=-top if is_signed else low,
        high=top if is_signed else high,
        unit="inner product" if pair.published.kind == "gram" else "nats",
        diverging=is_signed,
        span=drawn.block * (len(pair.reproduced) / values.shape[1]),
    )


def _own_limits(values: np.ndarray) -> tuple[float, float]:
    """Return the limits of a single map: from its 1% to its 99% quantile, as in Figure 5.

    The first key, which may be an attention sink, and the diagonal are left out.
    """
    cells = np.tri(len(values), k=-1, dtype=bool) & (np.arange(len(values)) > 0)
    known = values[cells & np.isfinite(values)]
    low, high = np.quantile(known, [0.01, 0.99]) if known.size else (0.0, 1.0)
    return float(low), float(high if high > low else low + 1)


def print_summary(folder: Path, verbose: bool = False) -> None:
    """Print a figure's claims with their verdicts, and the path of its page; their numbers too."""
    manifest = read_manifest(folder)
    figure, lines = manifest.settings["figure"], []
    found = record_of(Reproduction, manifest.results)
    console = PlainConsole()
    print_headline(console, headline(manifest))
    if verbose:
        lines += [f"{figure}: {note}" for note in found.notes]
        for claim in found.claims:
            about = f"{figure}, {claim.experiment}" if claim.experiment else figure
            lines.append(f"{about}, {claim}")
        lines += [f"{figure}: {sentence}" for sentence in found.headline]
        experiments = _experiments(manifest, folder).values()
        lines += [f"experiment: {experiment / 'report.html'}" for experiment in experiments]
    console.print(*lines, f"open {folder / 'report.html'}", sep="\n", soft_wrap=True)
