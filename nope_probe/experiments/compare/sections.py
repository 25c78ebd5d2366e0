"""The report of a comparison: what the runs lose side by side, and their differences."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from nope_probe.conditions import INTACT
from nope_probe.experiments.compare.analyse import PAIRED, Compared
from nope_probe.experiments.compare.members import Member, share_sequences
from nope_probe.experiments.losses import LayerLosses
from nope_probe.experiments.sections import MOST_ROWS, Report, fold_sizes_of, strongest
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import excludes_zero, interval_of, interval_text
from nope_probe.figures.measures import compared_measures, compared_sources
from nope_probe.figures.words import listed
from nope_probe.reports import notes
from nope_probe.reports.page import Lead, Link, Listing, Section, explorer_section
from nope_probe.runtime.folder import Run

OF_SIDES = "Percent of position's part, in the layer of each run with the strongest pattern."
LESS = "A difference is a run's number less that of {base}."
METHODS = {
    "simulations": "Differences of simulations are unpaired.",
    "others": "The runs had different sequences, so differences are unpaired.",
    "foldless": "The runs had the same sequences but kept no fold maps, so differences are "
    "unpaired.",
    "paired": "The runs had the same sequences: differences of positional patterns and of their "
    "measures are paired over folds, others are unpaired.",
}
TOPICS = {  # of the tables whose names are no words
    "pattern": "Positional pattern",
    "mean_covariance": "Mean and covariance term",
    "non_relative": "Non-relative part",
    "bands": "RoPE bands",
}


def report(
    run: Run, folder: Path, members: Sequence[Member], explorer: Explorer | None = None
) -> Report:
    """Return the report of a comparison.

    Args:
        run: its `differences`, and the `headline` and `labels` of its manifest.
        folder: the comparison's folder, from which the page links to the runs.
        members: the runs; the first is the base.
        explorer: the runs without each source, if the page shows them.
    """
    table, labels = run.tables["differences"], run.manifest["labels"]
    sentence, *method = run.manifest["headline"]
    sides = side_by_side(members)
    less = LESS.format(base=labels[0])
    return Report(
        title=f"{', '.join(labels[1:])} against {labels[0]}",
        lead=Lead(
            sentence=sentence,
            table=_brief(table) if sides.empty else sides,
            caption=less if sides.empty else OF_SIDES,
        ),
        sections=[
            *explorer_section(explorer),
            _runs(members, folder),
            *_measure_sections(members, table),
        ],
        how_to_read=[*notes.how_to_read("compare"), *method, less],
    )


def headline(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> list[str]:
    """Return the result in two sentences, and how differences were taken."""
    base, *others = members
    losses = {member.label: _losses(member) for member in members}
    differences = [d for compared in maps for d in compared.differences.values()]
    n = int(excludes_zero(table, "difference").sum())
    if len(table) and not n and maps and all(d.is_significant is False for d in differences):
        labels = f"{listed([other.label for other in others])} and {base.label}"
        sentences = [f"The patterns of {labels} do not differ beyond noise."]
    elif all(losses.values()):
        sentences = [f"{label}: {of.sources_sentence()}" for label, of in losses.items() if of]
    else:
        sentences = []
    known = table["difference_low"].notna().sum()
    sentences.append(
        f"{n} of {known} numbers differ beyond their 95% interval; by chance 1 in 20 would."
    )
    if members[0].kind == "simulate":
        method = "simulations"
    elif not share_sequences(members):
        method = "others"
    else:
        paired = any(d.paired for d in differences) or (table["method"] == PAIRED).any()
        method = "paired" if paired else "foldless"
    return [" ".join(sentences), METHODS[method]]


def _losses(member: Member) -> LayerLosses | None:
    """Return what the strongest layer of a run of `ablate` loses; None without a pattern."""
    if member.kind != "ablate":
        return None
    rows = member.tables["pattern"].query("removed == @INTACT.name")
    row = strongest(rows, fold_sizes_of(member.manifest))
    if row is None:
        return None
    return LayerLosses.of(member.tables, member.manifest, int(row["layer"]))


def side_by_side(members: Sequence[Member]) -> pd.DataFrame:
    """Return what the strongest layer of each run loses; empty for other runs than `ablate`'s."""
    losses = {member.label: _losses(member) for member in members}
    tables = []
    for label, of in losses.items():
        if of is None:
            return pd.DataFrame()
        rows = of.table()
        name, *numbers = rows.columns
        headings = {column: f"{label} L{of.layer}, {column}" for column in numbers}
        tables.append(
            rows.rename(columns=headings).set_index(rows[name].rename("")).drop(columns=name)
        )
    return pd.concat(tables, axis=1).fillna("").reset_index()


def _brief(table: pd.DataFrame) -> pd.DataFrame:
    """Return the first differences beyond their interval, as text."""
    rows = table[excludes_zero(table, "difference")][:MOST_ROWS]
    return pd.DataFrame(
        {
            "what": [f"{row['item']}: {row['measure']}" for row in rows.to_dict("records")],
            "run": rows["run"].tolist(),
            "difference": [
                interval_text(interval_of(row, "difference"), "+z.3g", "")
                for row in rows.to_dict("records")
            ],
        }
    )


def _measure_sections(members: Sequence[Member], table: pd.DataFrame) -> Iterator[Section]:
    for name, rows in table.groupby("table", sort=False):
        yield Section(
            title=TOPICS.get(str(name), str(name).replace("_", " ").capitalize()),
            caption="",
            figure=partial(FIGURES[str(name)], members) if name in FIGURES else None,
            table=rows.drop(columns="table"),
        )


def _pattern_measures(members: Sequence[Member]) -> go.Figure:
    """Draw the measures of the intact models' patterns, layer by layer."""
    runs = {}
    for member in members:
        rows = member.tables["pattern"]
        is_intact = rows["removed"] == INTACT.name if "removed" in rows else rows["layer"] >= 0
        runs[member.label] = rows[is_intact]
    return compared_measures(runs)


def _source_losses(members: Sequence[Member]) -> go.Figure:
    """Draw what the runs lose without each source, layer by layer."""
    return compared_sources({member.label: member.tables["sources"] for member in members})


FIGURES = {"pattern": _pattern_measures, "sources": _source_losses}  # by the table beside them


def _runs(members: Sequence[Member], folder: Path) -> Section:
    pages = [Path(os.path.relpath(member.folder / "report.html", folder)) for member in members]
    rows = [
        (
            Link(text=member.label, href=page.as_posix()),
            str(member.manifest.get("command", "")),
            page.parent.name,
        )
        for member, page in zip(members, pages, strict=True)
    ]
    return Section(
        title="The runs' own pages",
        caption="The first run is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
