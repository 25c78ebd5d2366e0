"""One page for all sixteen figures of the paper: claims, verdicts, numbers, links."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from nope_probe.errors import UserError
from nope_probe.experiments.paper.figure import recorded_settings, run_figure
from nope_probe.experiments.paper.page import title_of, verdict_mark
from nope_probe.experiments.paper.settings import (
    NAMES,
    SCORES,
    SIMULATED,
    FigureName,
    Settings,
    experiments_of,
)
from nope_probe.reports.listing import Cell, Link, Listing
from nope_probe.reports.page import Section, page
from nope_probe.runtime.folder import atomic_write, default_output_dir, read_manifest
from nope_probe.runtime.places import output_folder, validate_folder_place
from nope_probe.runtime.processes import validate_one_process
from nope_probe.runtime.provenance import command_line, versions

FILES = {"report.html", "figures.csv"}
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
HOW_TO_READ = (
    "A verdict is about the run that is linked; figures of trained models name theirs.",
    "Published panels are compared cell by cell, in steps of their own 256 colours.",
    "A figure of which there are several finished runs shows the one on the paper's models, or "
    "else the newest.",
)


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


def run_all(settings: Settings) -> Path:
    """Run all figures that a laptop can, write one page about all sixteen, and return its folder.

    The page is written anew each time, from the finished runs beside its folder.

    Raises:
        UserError: if the folder holds something else.
    """
    validate_one_process()
    folder = output_folder(settings.out or Path("runs") / "reproduce-all")
    _validate_folder(folder)
    ours = {}
    for figure in (name for name in NAMES if name not in SCORES):
        sys.stderr.write(f"{figure}: {SHOWS[figure]}\n")
        ours[figure] = run_figure(_settings_of(figure, settings, folder.parent))
    entries = [_entry(figure, ours.get(figure), folder.parent) for figure in NAMES]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for entry in entries for row in rows_of(entry, folder)]
    with atomic_write(folder / "figures.csv") as path:
        text_rows = [
            [each.href if isinstance(each, Link) else each for each in row] for row in rows
        ]
        pd.DataFrame(text_rows, columns=list(COLUMNS)).to_csv(path, index=False)
    with atomic_write(folder / "report.html") as path:
        path.write_text(index_page(entries, rows), encoding="utf-8")
    return folder


def _validate_folder(folder: Path) -> None:
    if folder.is_file():
        raise UserError(f"cannot write to {folder}: it is a file")
    if folder.is_dir() and not {each.name for each in folder.iterdir()} <= FILES:
        raise UserError(f"{folder} holds other files; choose another --out")
    validate_folder_place(folder)


def _settings_of(figure: FigureName, settings: Settings, beside: Path) -> Settings:
    """Return the settings of one figure among all, whose folder is in `beside`."""
    chosen = Settings(figure=figure)
    if figure in SIMULATED:
        chosen = replace(chosen, n_samples=settings.n_samples)
    if figure != "figure1":
        chosen = replace(chosen, seed=settings.seed)
    recorded = recorded_settings(figure, experiments_of(chosen))
    return replace(chosen, out=beside / default_output_dir("reproduce", figure, recorded).name)


def _entry(figure: str, own: Path | None, beside: Path) -> Entry:
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
    return page("The paper, reproduced", headline(entries), sections, manifest, HOW_TO_READ)


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
