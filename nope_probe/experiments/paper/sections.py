"""The pages of one figure and of all sixteen, and the lines that the command prints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.experiments.paper.claims import Claim
from nope_probe.experiments.paper.panels import (
    Agreement,
    Pair,
    agreement,
    agreement_table,
    agreements,
    groups_of,
)
from nope_probe.experiments.paper.settings import SIMULATED
from nope_probe.experiments.sections import print_lines
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.maps.downsample import pool
from nope_probe.reports import notes
from nope_probe.reports.listing import Cell, Link, Listing
from nope_probe.reports.page import Section, page
from nope_probe.runtime.folder import read_manifest
from nope_probe.runtime.provenance import command_line, versions

UNITS = {"gram": "inner product"}
Scale = tuple[float, float, str, bool]  # the ends, the unit, whether it centres on zero
DRAWN = 128  # positions of a map on the page
HOW_TO_READ = (
    notes.MAP_AXES,
    "Published panels are the paper's figures read back into numbers: each colour stands for one "
    "of 256 steps between the ends of the panel's own colour bar, beyond which values are clipped.",
    "Differences are ours, clipped likewise, less the published panel, in these steps; red: ours "
    "is higher. Rounding to colours alone makes differences of up to half a step.",
    "Noise is what the standard errors of both let one expect: of the paper's 100,000 samples "
    "(without a control variate) and of ours.",
    "The paper counts layers from 1, and we from 0: its layer 1 is L0.",
)
HOW_TO_READ_ALL = (
    "A verdict is about the run that is linked; figures of trained models name theirs.",
    "Published panels are compared cell by cell, in steps of their own 256 colours.",
    "A figure of which there are several finished runs shows the one on the paper's models, or "
    "else the newest.",
)
COLUMNS = ("figure", "the paper's claim", "verdict", "numbers")
SHOWS = {
    "figure1": "the second layer's scores of three tokens, eq. (4)",
    "figure2": "simulated scores without RoPE, alpha = 0 and 0.2",
    "figure3": "a trained NoPE model's first block, stage by stage",
    "figure4": "simulated scores with RoPE, alpha = 0",
    "figure5": "three language models, less diagonal means, first four layers",
    "figure6": "simulated scores, alpha = 0.4, 0.6 and 0.8",
    "figure7": "simulated scores with LayerNorm",
    "figure8": "a trained NoPE model's scores, every layer",
    "figure9": "simulated scores with RoPE, alpha = 0.5",
    "figure10": "simulated scores with RoPE and without the mask",
    "figure11": "Llama-3.1-8B, every layer",
    "figure12": "Phi-4, every layer",
    "figure13": "Qwen3-8B, every layer",
    "figure14": "Llama-3.1-8B, every layer, less diagonal means",
    "figure15": "Phi-4, every layer, less diagonal means",
    "figure16": "Qwen3-8B, every layer, less diagonal means",
}


def figure_page(
    figure: str,
    claims: Sequence[tuple[str, Claim]],
    pairs: Sequence[Pair],
    links: Mapping[str, str],
    manifest: Mapping[str, Any],
) -> str:
    """Return the page of a reproduced figure.

    Args:
        figure: its name, such as `figure2`.
        claims: the paper's claims, each with the experiment on which it was checked.
        pairs: the published panels with ours.
        links: the experiments' reports by name, relative to the page.
        manifest: what was run, with the `headline` and `notes`.
    """
    sections = [*_figures(figure, pairs), _claims(claims, links)]
    title = f"{title_of(figure)} of the paper, reproduced"
    headline = [*manifest["headline"], *map(_sentence, manifest["notes"])]
    return page(title, headline, sections, manifest, HOW_TO_READ)


def _sentence(note: str) -> str:
    return note[0].upper() + note[1:]


def title_of(figure: str) -> str:
    """Return a figure's name as a title.

    Example:
        >>> title_of("figure12")
        'Figure 12'
    """
    return f"Figure {figure.removeprefix('figure')}"


def verdict_mark(reproduced: bool) -> str:
    """Return a verdict with its sign."""
    return "✓\u00a0reproduced" if reproduced else "✗\u00a0not\u00a0reproduced"


def _claims(claims: Sequence[tuple[str, Claim]], links: Mapping[str, str]) -> Section:
    rows = [
        (claim.paper, verdict_mark(claim.reproduced), claim.evidence, _report(name, links))
        for name, claim in claims
    ]
    rows = rows or [("The paper makes no claim about this figure", "", "", _report("", links))]
    return Section(
        title="What the paper says of it",
        caption="Each claim, checked on the experiment whose report is linked.",
        listing=Listing(columns=("the paper's claim", "verdict", "numbers", "report"), rows=rows),
    )


def _report(name: str, links: Mapping[str, str]) -> Link | str:
    return Link(text=name or "report", href=links[name]) if name in links else ""


def _figures(figure: str, pairs: Sequence[Pair]) -> Iterator[Section]:
    for group, members in groups_of(pairs).items():
        found = agreements(members)
        yield Section(
            title=_heading(f"{title_of(figure)}, {group}", found),
            figure=pairs_figure(members, f"{title_of(figure)}: {group}"),
            caption=_caption(members, found),
            table=agreement_table(found) if found else None,
        )


def _heading(lead: str, found: Sequence[Agreement]) -> str:
    """Return what is shown, and how well it agrees with the paper's panels."""
    if not found:
        return lead
    if all(each.within_one == 1 for each in found):
        return f"{lead}: within one colour step of the paper's"
    agree = sum(each.agrees for each in found)
    return f"{lead}: {agree} of {len(found)} panels agree with the paper's within noise"


def _caption(pairs: Sequence[Pair], found: Sequence[Agreement]) -> str:
    if not found:
        return (
            "The published panel, and ours of another model, each on its own colours, which leave "
            "out the first key and the diagonal: values cannot be compared, shapes can."
        )
    lead = "Published, ours, and the difference in steps of the panel's own colours."
    if all(each.within_one == 1 for each in found):
        largest = max(each.largest for each in found)
        return f"{lead} All cells of all panels agree within one step, to {largest:.2f} steps."
    names = [pair.name for pair in pairs if pair.comparable]
    each = [_sentence(f"{name}: {result}") for name, result in zip(names, found, strict=True)]
    return f"{lead} {'. '.join(each)}."


def pairs_figure(pairs: Sequence[Pair], title: str) -> go.Figure:
    """Draw published panels, ours and their difference side by side, a group for each pair."""
    return panel_groups([list(_panels(pair)) for pair in pairs], title=title)


def _limit(steps: np.ndarray) -> float:
    """Return the colour limit of differences; below two steps all is flat."""
    return float(max(2, math.ceil(np.nanquantile(np.abs(steps), 0.99))))


def _panels(pair: Pair) -> Iterator[Panel]:
    published, steps = pair.published, pair.steps
    bar = _scale(published.kind, published.low, published.high)
    for name, values in ((f"paper, {pair.name}", published.values), ("ours", pair.ours)):
        scale = bar if pair.comparable else _own_scale(values, published.kind)
        yield _panel(name, values, scale, pair)
    if steps is not None:
        limit = _limit(steps)
        yield _panel(_size(pair), steps, (-limit, limit, "colour steps", True), pair)


def _size(pair: Pair) -> str:
    found = agreement(pair)
    if found is None:
        return "difference"
    if found.within_one == 1:
        return f"difference ≤ {found.largest:.2f}"
    return f"difference, RMS {found.rms:.2g}"


def _panel(name: str, values: np.ndarray, scale: Scale, pair: Pair) -> Panel:
    low, high, unit, diverging = scale
    return Panel(
        name=name,
        values=pool(values[None], DRAWN).values[0],
        low=low,
        high=high,
        unit=unit,
        diverging=diverging,
        positions=len(pair.ours),
    )


def _scale(kind: str, low: float, high: float) -> Scale:
    """Return a panel's scale: its own bar, centred on zero if it shows signed values."""
    if kind == "normalised":
        top = max(abs(low), abs(high))
        return -top, top, "nats", True
    return low, high, UNITS.get(kind, "nats"), False


def _own_scale(values: np.ndarray, kind: str) -> Scale:
    """Return the scale of one map alone: from its 1% to its 99% quantile, as in Figure 5.

    The first key, which may be an attention sink, and the diagonal are left out.
    """
    cells = np.tri(len(values), k=-1, dtype=bool) & (np.arange(len(values)) > 0)
    known = values[cells & np.isfinite(values)]
    low, high = np.quantile(known, [0.01, 0.99]) if known.size else (0.0, 1.0)
    return _scale(kind, float(low), float(high if high > low else low + 1))


def print_summary(folder: Path) -> None:
    """Print a figure's claims with their verdicts, its headline, and the path of its page."""
    manifest = read_manifest(folder)
    figure = manifest["settings"]["figure"]
    lines = [f"{figure}: {each}" for each in manifest["notes"]]
    for entry in manifest["claims"]:
        claim = {name: entry[name] for name in ("paper", "reproduced", "evidence")}
        lead = f"{figure}, {entry['experiment']}" if entry["experiment"] else figure
        lines.append(f"{lead}, {Claim(**claim)}")
    lines += [f"{figure}: {each}" for each in manifest["headline"]]
    for each in manifest["experiments"].values():
        lines.append(f"experiment: {Path(os.path.normpath(folder / each)) / 'report.html'}")
    print_lines([*lines, f"report: {folder / 'report.html'}"])


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A figure on the page, with its finished run if there is one.

    Attributes:
        figure: its name.
        folder: the run's folder; None if it was not run.
        manifest: the run's manifest.
    """

    figure: str
    folder: Path | None
    manifest: Mapping[str, Any]


def entry_of(figure: str, own: Path | None, beside: Path) -> Entry:
    """Return a figure's best run: on the paper's models, then this command's own, then newest."""
    found = {}
    for path in beside.glob("*/manifest.json"):
        manifest = read_manifest(path.parent)
        about = manifest.get("settings", {})
        if manifest.get("kind") == "reproduce" and about.get("figure") == figure:
            found[path.parent] = manifest
    if not found:
        return Entry(figure=figure, folder=None, manifest={})
    best = max(
        found,
        key=lambda each: (found[each]["as_the_paper"], each == own, found[each]["finished"]),
    )
    return Entry(figure=figure, folder=best, manifest=found[best])


def rows_of(entry: Entry, start: Path) -> list[list[Cell]]:
    """Return the lines of a figure: one for each claim, and one for its published panels."""
    title = f"{title_of(entry.figure)}: {SHOWS[entry.figure]}"
    if entry.folder is None:
        command = f"python -m nope_probe.reproduce {entry.figure}"
        return [[title, "", "○\u00a0not\u00a0run\u00a0yet", f"run: {command}"]]
    href = f"{Path(os.path.relpath(entry.folder, start)).as_posix()}/report.html"
    rows: list[list[Cell]] = []
    for claim in entry.manifest["claims"]:
        name = claim["experiment"]
        of = f"{name}: " if name and entry.figure not in SIMULATED else ""
        rows.append(["", claim["paper"], verdict_mark(claim["reproduced"]), of + claim["evidence"]])
    panels = entry.manifest["panels"]
    if panels["compared"]:
        agrees = panels["agree"] == panels["compared"]
        rows.append(["", "(the published panels)", verdict_mark(agrees), panels["verdict"]])
    elif panels["published"]:
        why = f"{panels['published']} shown beside ours, which are of another model"
        rows.append(["", "(the published panels)", "○\u00a0not\u00a0compared", why])
    rows = rows or [[""] * len(COLUMNS)]
    rows[0][0] = Link(text=title, href=href)
    return rows


def index_page(entries: Sequence[Entry], rows: Sequence[Sequence[Cell]]) -> str:
    """Return the page of all figures."""
    sections = [
        Section(
            title="Figure by figure",
            caption="Each claim of the paper, whether it is reproduced, and by which numbers.",
            listing=Listing(columns=COLUMNS, rows=rows),
        )
    ]
    manifest = {
        "command": command_line(),
        "figures": {each.figure: str(each.folder) for each in entries if each.folder},
        "versions": versions(),
    }
    return page("The paper, reproduced", headline(entries), sections, manifest, HOW_TO_READ_ALL)


def headline(entries: Sequence[Entry]) -> list[str]:
    """Return how many figures were run, claims reproduced and panels matched."""
    done = [each for each in entries if each.folder is not None]
    claims = [claim for each in done for claim in each.manifest["claims"]]
    panels = [each.manifest["panels"] for each in done]
    sentences = [
        f"{len(done)} of the paper's {len(entries)} figures have been run; "
        f"{sum(claim['reproduced'] for claim in claims)} of {len(claims)} claims about them are "
        "reproduced.",
        f"{sum(each['exact'] for each in panels)} of {sum(each['compared'] for each in panels)} "
        "published panels agree with ours within one 8-bit colour step, and "
        f"{sum(each['agree'] - each['exact'] for each in panels)} more within sampling noise.",
    ]
    missing = [title_of(each.figure) for each in entries if each.folder is None]
    if missing:
        sentences.append(f"Not run yet: {', '.join(missing)}.")
    return sentences


def print_index(folder: Path) -> None:
    """Print the lines of the page, and its path."""
    table = pd.read_csv(folder / "figures.csv", keep_default_na=False)
    lines = []
    for row in table.to_dict("records"):
        if row["figure"]:
            lines.append(str(row["figure"]))
        parts = [str(row[name]) for name in table.columns[1:] if row[name]]
        lines.append("  " + "; ".join(parts).replace("\u00a0", " "))
    print_lines([*lines, f"report: {folder / 'report.html'}"])
