"""From finished experiments to the run of a figure, and to the page of all sixteen figures.

A figure has claims, panels, notes and a page. The page of all figures says which figures were run,
which claims hold and which panels agree.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

from nope_probe.analyses.jackknife import jackknife
from nope_probe.files import atomic_write
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import LayerMaps, PackedFolds
from nope_probe.maps.rows import MapRows, diagonal_normalised
from nope_probe.reports.page import Headline, Report, Section, how_to_read
from nope_probe.run.folder import Run, read_run
from nope_probe.run.manifest import Manifest, read_manifest, record_of
from nope_probe.run.processes import program
from nope_probe.run.session import Session, versions
from nope_probe.studies.page import PlainConsole, print_headline
from paper_claims import Claim, PanelCounts, Reproduction, claims_of, edge_contrast
from published_panels import agreements, pairs_of, verdict
from reproduce_page import Cell, Link, listing, report, verdict_mark
from reproduce_settings import FIGURES, Settings, title_of

NOPE_NOTE = (
    "run on {model}; the paper used a 1.5B model (nope-1.5b), and the first 50 tokens of "
    "documents of fineweb-edu."
)
SCORES_NOTE = (
    "the paper used llama-3.1-8b, phi-4 and qwen3-8b, and the first 1,024 tokens of 1,000 "
    "documents of fineweb-edu."
)
TRUE_MEANS = (
    "the published Figures 11 to 16 are 50 times too small in scale (20 sequences, divided by 50); "
    "these maps are true means."
)
HOW_TO_READ_ALL = (
    "A verdict is about the run that is linked; figures of trained models name theirs.",
    "Published panels are compared cell by cell, in steps of their 256 colours.",
    "A figure with several finished runs shows the run on the paper's models, or else the newest.",
)
INDEX_COLUMNS = ("figure", "the paper's claim", "verdict", "numbers")
Runs = Mapping[str, tuple[Path, Manifest]]  # folder and manifest by figure


def analyse(session: Session[Settings], folders: Mapping[str, Path]) -> Run:
    """Check the claims, compare the published panels, and return the run.

    Args:
        session: the figure's run.
        folders: its finished experiments by name.
    """
    settings, figure = session.settings, session.settings.figure
    runs = {name: experiment(folder) for name, folder in folders.items()}
    claims, pairs = claims_of(figure, runs), pairs_of(figure, runs)
    agreement = agreements(pairs)
    sentence = "" if agreement.empty else verdict(agreement)
    found = Reproduction(
        as_the_paper=settings.is_as_the_paper,
        experiments={
            name: Path(os.path.relpath(folder, session.folder)).as_posix()
            for name, folder in folders.items()
        },
        claims=tuple(claims),
        panels=PanelCounts(
            published=len(pairs),
            compared=len(agreement),
            exact=int((agreement["within_one"] == 1).sum()),
            agree=int(agreement["agrees"].sum()),
            verdict=sentence,
        ),
        headline=(*verdicts(claims), *filter(None, [sentence])),
        notes=tuple(notes_of(settings)),
    )
    manifest = replace(session.manifest(), results=asdict(found))
    steps = {pair.published.key: pair.steps for pair in pairs}
    differences = {key: step.astype(np.float32) for key, step in steps.items() if step is not None}
    run = Run(
        manifest=manifest,
        arrays={"maps": differences},
        tables={"claims": pd.DataFrame(map(asdict, claims)), "panels": agreement},
    )
    return replace(run, page=report(run, pairs).html(manifest))


def experiment(folder: Path) -> Run:
    """Return a finished experiment; that of a language model as Figure 5 shows it, too.

    Its maps `normalised/intact` are the scores less the mean of each diagonal, and its table
    `pattern` has the edge contrast, nats.
    """
    run = read_run(folder)
    if run.manifest.kind != "ablate":
        return run
    packed = load_file(folder / "folds.safetensors")["score/intact"]
    queries = None if run.query_positions is None else torch.from_numpy(run.query_positions)
    rows = MapRows.of_cells(packed.shape[-1], queries)
    counts, skip_keys = torch.tensor(run.manifest.fold_sizes), run.manifest.skip_keys
    layers = [
        LayerMaps(folds=PackedFolds(cells, rows), counts=counts, skip_keys=skip_keys)
        for cells in packed.unbind(1)
    ]
    contrasts = pd.DataFrame(
        jackknife(Estimates.of_means(edge_contrast(layer.pattern), layer.weights)).columns(
            "edge_contrast"
        )
        for layer in layers
    )
    scores = torch.from_numpy(np.asarray(run.maps["score/intact"])).double()
    normalised = {"normalised/intact": diagonal_normalised(scores, rows).float().numpy()}
    return replace(
        run,
        arrays={**run.arrays, "maps": {**run.maps, **normalised}},
        tables={**run.tables, "pattern": run.tables["pattern"].join(contrasts)},
    )


def notes_of(settings: Settings) -> list[str]:
    """Return sentences on the differences between a figure's run and the paper's."""
    figure, notes = FIGURES[settings.figure], []
    if figure.is_of_nope and not settings.is_as_the_paper:
        notes.append(NOPE_NOTE.format(model=settings.models[0]))
    elif figure.maps and not settings.is_as_the_paper:
        notes.append(SCORES_NOTE)
    return [*notes, TRUE_MEANS] if len(figure.maps) == 1 else notes  # of the appendix


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """Return sentences on the number of reproduced claims, and on the claims that failed."""
    failed = [claim.paper for claim in claims if not claim.reproduced]
    n = len(claims) - len(failed)
    sentences = [f"Reproduced: {n} of {len(claims)} claims of the paper."] if claims else []
    return sentences + ([f"Not reproduced: {'; '.join(failed)}."] if failed else [])


def write_index(folder: Path, new: Mapping[str, Path]) -> None:
    """Write the page of all figures and its lines, from the finished runs next to its folder.

    Args:
        folder: the page's folder.
        new: the folders of the figures that this command ran; they go before other runs.
    """
    runs = best_runs(new, folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for figure in FIGURES for row in index_rows(figure, runs, folder)]
    text = [[cell.href if isinstance(cell, Link) else cell for cell in row] for row in rows]
    with atomic_write(folder / "figures.csv") as path:
        pd.DataFrame(text, columns=list(INDEX_COLUMNS)).to_csv(path, index=False)
    section = Section(
        title="Figure by figure",
        caption="Each claim of the paper, whether it is reproduced, and by which numbers.",
        html=listing(INDEX_COLUMNS, rows),
    )
    folders = {figure: str(run) for figure, (run, _) in runs.items()}
    typed = shlex.join([*program(), *sys.argv[1:]])
    manifest = Manifest(command=typed, versions=versions(), results={"figures": folders})
    lead = index_headline([manifest for _, manifest in runs.values()])
    all_figures = Report(
        title="The paper, reproduced",
        headline=lead,
        sections=[section],
        how_to_read=how_to_read(HOW_TO_READ_ALL),
    )
    with atomic_write(folder / "report.html") as path:
        path.write_text(all_figures.html(manifest), encoding="utf-8")


def best_runs(new: Mapping[str, Path], above: Path) -> Runs:
    """Return each figure's best run: on the paper's models, then this command's, then the newest.

    Args:
        new: the folders of this command's runs by figure.
        above: the folder to search for finished runs.
    """
    candidates: dict[str, list[tuple[Path, Manifest]]] = {figure: [] for figure in FIGURES}
    for path in above.glob("*/manifest.json"):
        manifest = read_manifest(path.parent)
        if manifest.kind == "reproduce":
            candidates[manifest.settings["figure"]].append((path.parent, manifest))

    def merits(run: tuple[Path, Manifest]) -> tuple[bool, bool, str]:
        folder, manifest = run
        found = record_of(Reproduction, manifest.results)
        return found.as_the_paper, folder in new.values(), manifest.finished

    return {figure: max(runs, key=merits) for figure, runs in candidates.items() if runs}


def index_rows(figure: str, runs: Runs, start: Path) -> list[list[Cell]]:
    """Return the lines of a figure: a line per claim, and a line for its published panels."""
    title = f"{title_of(figure)}: {FIGURES[figure].shows}"
    if figure not in runs:
        command = f"python recipes/paper/reproduce.py {figure}"
        return [[title, "", "○\u00a0not\u00a0run\u00a0yet", f"run: {command}"]]
    folder, found = runs[figure][0], record_of(Reproduction, runs[figure][1].results)
    rows: list[list[Cell]] = []
    for claim in found.claims:
        of = f"{claim.experiment}: " if FIGURES[figure].models else ""
        mark = verdict_mark(claim.reproduced)
        rows.append(["", claim.paper, mark, of + claim.evidence])
    panels = found.panels
    if panels.compared:
        agrees = panels.agree == panels.compared
        rows.append(["", "(the published panels)", verdict_mark(agrees), panels.verdict])
    elif panels.published:
        why = f"{panels.published} shown next to maps of another model"
        rows.append(["", "(the published panels)", "○\u00a0not\u00a0compared", why])
    rows = rows or [[""] * len(INDEX_COLUMNS)]
    href = f"{Path(os.path.relpath(folder, start)).as_posix()}/report.html"
    rows[0][0] = Link(text=title, href=href)
    return rows


def index_headline(manifests: Sequence[Manifest]) -> Headline:
    """Return how many claims are reproduced, and how many figures and panels."""
    runs = [record_of(Reproduction, manifest.results) for manifest in manifests]
    claims = [claim for run in runs for claim in run.claims]
    exact, agree = (sum(getattr(run.panels, name) for run in runs) for name in ("exact", "agree"))
    compared = sum(run.panels.compared for run in runs)
    n = sum(claim.reproduced for claim in claims)
    rows = {
        "figures of the paper that have been run": f"{len(manifests)} of {len(FIGURES)}",
        "panels within one 8-bit colour step": f"{exact} of {compared}",
        "more panels within sampling noise": f"{agree - exact} of {compared}",
    }
    return Headline(
        sentence=f"{n} of the paper's {len(claims)} claims about its figures are reproduced.",
        table=pd.DataFrame(rows.items(), columns=["", "number"]),
    )


def print_index(folder: Path, verbose: bool = False) -> None:
    """Print how many claims are reproduced, and the path of the page; if `verbose`, each claim."""
    table = pd.read_csv(folder / "figures.csv", keep_default_na=False)
    pages = [folder / name for name in table["figure"] if name.endswith("report.html")]
    manifests = [read_manifest(page.parent) for page in pages]
    console = PlainConsole()
    print_headline(console, index_headline(manifests))
    titles = iter(title_of(manifest.settings["figure"]) for manifest in manifests)
    lines: list[str] = []
    for figure, *parts in table.itertuples(index=False) if verbose else ():
        if figure:
            lines.append(next(titles) if figure.endswith("report.html") else figure)
        lines.append("  " + "; ".join(filter(None, parts)).replace("\u00a0", " "))
    console.print(*lines, f"open {folder / 'report.html'}", sep="\n", soft_wrap=True)
