"""The report of a comparison: patterns on one scale, differences, tables side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape  # figures read tags in their texts, as the page does
from pathlib import Path
from textwrap import wrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.conditions import INTACT
from nope_probe.experiments.compare.analyse import PAIRED, TABLE_ORDER, Compared
from nope_probe.experiments.compare.members import UNITS, Member, share_sequences
from nope_probe.experiments.sections import Report
from nope_probe.figures.intervals import (
    FLOOR,
    PALE,
    excludes_zero,
    interval_of,
    interval_text,
    symmetric,
)
from nope_probe.figures.measures import compared_measures
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.words import MEASURES
from nope_probe.reports import notes
from nope_probe.reports.page import Link, Listing, Section, positions
from nope_probe.runtime.folder import Run

MOST_MAPS = 12  # of more maps, the maps that differ most are drawn
CLEAREST = 12  # number of differences that are named
WHAT = 26  # characters in a line of a table's first column on the terminal
TOPICS = {  # of the tables whose names are no words
    "pattern": "Positional pattern",
    "mean_covariance": "Mean and covariance term",
    "non_relative": "Non-relative part",
    "bands": "RoPE bands",
}
HOW_TO_READ = (
    notes.SCORE,
    notes.MAP_AXES,
    notes.PATTERN_COLOURS,
    "All patterns of a layer have one scale; a difference has its own, which spans at least "
    f"{PALE} standard errors of a cell, so that noise is pale.",
    "Paired differences are taken fold by fold: the runs had the same sequences, so their common "
    "noise cancels. Unpaired differences treat the runs as independent, so their intervals are too "
    "wide if the runs share sequences.",
    notes.INTERVALS,
)


def report(
    run: Run, folder: Path, members: Sequence[Member], maps: Sequence[Compared] = ()
) -> Report:
    """Return the report of a comparison.

    Args:
        run: its `differences`, and the `headline` and `labels` of its manifest.
        folder: the comparison's folder, from which the page links to the runs.
        members: the runs; the first is the base.
        maps: their patterns, for the page and its figures; the terminal shows no maps.
    """
    table, labels = run.tables["differences"], run.manifest["labels"]
    return Report(
        title=f"{', '.join(labels[1:])} against {labels[0]}",
        headline=run.manifest["headline"],
        sections=[
            *_map_sections(run, members, maps),
            *_clearest(members, table),
            *_measure_sections(members, table),
            _runs(members, folder),
        ],
        how_to_read=HOW_TO_READ,
        terminal={
            f"{label} less {labels[0]}: the clearest differences": _clearest_as_text(rows)
            for label, rows in table.groupby("run", sort=False)
        },
    )


def headline(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> list[str]:
    """Return sentences on the largest differences, and on how differences were taken."""
    base, *others = members
    sentences = [f"{_largest(other.label, base, maps)}." for other in others if maps]
    sentences.append(f"{_n_different(table)}.")
    if any(len(member.maps) > len(maps) for member in members):
        sentences.append(f"Compared are the {len(maps)} maps that all runs have.")
    return [*sentences, _method(members, maps, table)]


def _largest(label: str, base: Member, maps: Sequence[Compared]) -> str:
    """Return a sentence on the map in which a run differs most from the first run."""
    if all(compared.differences[label].is_significant is False for compared in maps):
        return f"The positional patterns of {label} and {base.label} do not differ beyond noise"
    most = max(maps, key=lambda compared: compared.differences[label].rms.value)
    size = f"{most.differences[label]} {UNITS.get(base.kind, 'nats')} RMS"
    return f"The positional patterns of {label} and {base.label} differ most in {most.name}, {size}"


def _method(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> str:
    if members[0].kind == "simulate":
        return "Differences of simulations are unpaired."
    if not share_sequences(members):
        return "The runs had different sequences, so differences are unpaired."
    paired = any(
        difference.paired for compared in maps for difference in compared.differences.values()
    )
    if paired or (table["method"] == PAIRED).any():
        return (
            "The runs had the same sequences: differences of positional patterns and of their "
            "measures are paired over folds, others are unpaired."
        )
    return "The runs had the same sequences but kept no fold maps, so differences are unpaired."


def clearest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the differences that are largest for their intervals, a row of text per difference.

    Controls and other further tables are left out if the main tables have differences.
    """
    main = table[table["table"].isin(TABLE_ORDER)]
    table = main if len(main) else table
    arm = (table["difference_high"] - table["difference_low"]) / 2
    order = (table["difference"].abs() / arm.where(arm > 0)).dropna().sort_values(ascending=False)
    rows = [_text(table.loc[index]) for index in order.index[:CLEAREST]]
    return pd.DataFrame(rows, columns=["what", "run", "value", "base", "difference", ""])


def _text(row: pd.Series) -> tuple[str, ...]:
    measure = MEASURES[row["measure"]].title if row["measure"] in MEASURES else row["measure"]
    return (
        f"{row['item']}, {measure.replace('_', ' ')}",
        str(row["run"]),
        f"{row['value']:.3g}",
        f"{row['base_value']:.3g}",
        interval_text(interval_of(row, "difference"), "+.3g"),
        str(row["method"]),
    )


def _clearest_as_text(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a run's clearest differences for a table on the terminal."""
    table = clearest(rows).drop(columns="run")
    return table.assign(what=["\n".join(wrap(text, WHAT)) for text in table["what"]])


def _map_sections(
    run: Run, members: Sequence[Member], maps: Sequence[Compared]
) -> Iterator[Section]:
    if not maps:
        return
    shown, unit = strongest(maps), UNITS.get(members[0].kind, "nats")
    size = positions(2 * len(members) - 1, len(shown))
    groups = [_panels(compared, members, unit) for compared in shown]
    names = ", ".join(compared.name for compared in shown)
    chosen = "" if len(shown) == len(maps) else f" Of {len(maps)} maps, the most different."
    results = "; ".join(
        f"{compared.name}: {label} {difference}"
        for compared in shown
        for label, difference in compared.differences.items()
    )
    yield Section(
        title=run.manifest["headline"][0].removesuffix("."),
        figure=partial(
            panel_groups, groups, title=f"Positional patterns of {names}", max_positions=size
        ),
        caption=f"Each run's positional pattern, then its difference to {members[0].label}.{chosen}"
        f" RMS of the differences, {unit}: {results}.",
    )


def strongest(maps: Sequence[Compared]) -> list[Compared]:
    """Return the maps to draw, in order: all, or those whose differences are largest."""
    largest = sorted(
        maps, key=lambda compared: -max(d.rms.value for d in compared.differences.values())
    )
    kept = {compared.name for compared in largest[:MOST_MAPS]}
    return [compared for compared in maps if compared.name in kept]


def _panels(compared: Compared, members: Sequence[Member], unit: str) -> list[Panel]:
    """Return a map of every run on one scale, then the differences."""
    patterns = compared.patterns
    top = symmetric(np.stack(list(patterns.values())), FLOOR)
    drawn = [(f"{compared.name}, {escape(one)}", patterns[one], top) for one in patterns]
    for label, difference in compared.differences.items():
        sign = "no difference" if difference.is_significant is False else "difference"
        name = f"{sign} of {escape(label)}" if len(members) > 2 else sign
        pale = PALE * float(np.nan_to_num(difference.noise))
        drawn.append((name, difference.values, symmetric(difference.values, max(FLOOR, pale))))
    return [
        Panel(
            name=name,
            values=values,
            low=-limit,
            high=limit,
            unit=unit,
            diverging=True,
            query_positions=compared.query_positions,
        )
        for name, values, limit in drawn
    ]


def _clearest(members: Sequence[Member], table: pd.DataFrame) -> Iterator[Section]:
    rows = [tuple(row) for row in clearest(table).to_numpy()]
    if rows:
        what, run, _, _, difference, _ = rows[0]
        of_run = f" of {run}" if len(members) > 2 else ""
        of_base = f"of {members[0].label}"
        columns = ("what", "run", "value", of_base, "difference, with its 95% interval", "")
        yield Section(
            title=f"The clearest difference: {what}{of_run}: {difference}",
            caption="Those that are largest for their intervals; all are in the tables below.",
            listing=Listing(columns=columns, rows=rows),
        )


def _measure_sections(members: Sequence[Member], table: pd.DataFrame) -> Iterator[Section]:
    for name, rows in table.groupby("table", sort=False):
        topic = TOPICS.get(str(name), str(name).replace("_", " ").capitalize())
        yield Section(
            title=f"{topic}: {_n_different(rows)}",
            caption="One number in twenty differs that far by chance. Intervals of the differences "
            f"are {' and '.join(sorted({*rows['method']}))}.",
            figure=partial(_pattern_measures, members) if name == "pattern" else None,
            table=rows.drop(columns="table"),
        )


def _n_different(rows: pd.DataFrame) -> str:
    differ = rows[excludes_zero(rows, "difference")]
    return f"{len(differ)} of {len(rows)} numbers differ beyond their 95% interval"


def _pattern_measures(members: Sequence[Member]) -> go.Figure:
    """Draw the measures of the intact models' patterns, layer by layer."""
    runs = {}
    for member in members:
        rows = member.tables["pattern"]
        runs[escape(member.label)] = rows[rows["kept"] == INTACT.name] if "kept" in rows else rows
    return compared_measures(runs)


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
        title=f"What was compared: {len(members)} runs of {members[0].kind}",
        caption="Their own reports; the first is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
