"""The report of a comparison: patterns on one scale, differences, tables side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape  # figures read tags in their texts, as the page does
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.conditions import INTACT
from nope_probe.experiments.compare.analyse import PAIRED, TABLE_ORDER, Compared
from nope_probe.experiments.compare.members import UNITS, Member, share_sequences
from nope_probe.experiments.sections import (
    MOST_ROWS,
    Report,
    listed,
    makers,
    of_layer,
    terms_of,
    together,
)
from nope_probe.figures.intervals import (
    FLOOR,
    PALE,
    SHARES,
    WITHIN,
    excludes_zero,
    interval_of,
    interval_text,
    percent,
    symmetric,
)
from nope_probe.figures.measures import compared_measures, compared_sources
from nope_probe.figures.names import words
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.words import MEASURES
from nope_probe.reports import notes
from nope_probe.reports.page import Lead, Link, Listing, Section, positions
from nope_probe.runtime.folder import Run

MOST_MAPS = 12  # of more maps, the maps that differ most are drawn
CLEAREST = 12  # number of differences that are named
CANDIDATES = 48  # of which the same number in two tables is named once
UNSAID = ("players", "circuits", "identity")  # parts of an item that its words do without
PART_OF_SHARE = "(share|lost|alone|rms)_(first|others)"  # what the whole says already
LOST = {  # measures of players in words
    "lost": "lost without it",
    "alone": "brought alone",
    "rms": "strength, nats",
}
TOPICS = {  # of the tables whose names are no words
    "pattern": "Positional pattern",
    "mean_covariance": "Mean and covariance term",
    "non_relative": "Non-relative part",
    "bands": "RoPE bands",
}
HOW_TO_READ = (
    notes.SCORE,
    notes.MAP_AXES,
    notes.PATTERN,
    notes.PATTERN_COLOURS,
    "All patterns of a layer have one scale. A difference has its own, which spans at least "
    f"{PALE} standard errors of a cell, so that noise is pale.",
    "Paired differences are taken fold by fold: the runs had the same sequences, so their common "
    "noise cancels.",
    "Unpaired differences treat the runs as independent. Their intervals are too wide if the runs "
    "share sequences.",
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
    sentence, *method = run.manifest["headline"]
    sources = side_by_side(members)
    return Report(
        title=f"{', '.join(labels[1:])} against {labels[0]}",
        lead=Lead(
            sentence=sentence,
            table=clearest(table, labels[0])[:MOST_ROWS] if sources.empty else sources,
            caption=" ".join(method),
        ),
        sections=[
            *_map_sections(members, maps),
            *_clearest(members, table),
            *_measure_sections(members, table),
            _runs(members, folder),
        ],
        how_to_read=HOW_TO_READ,
    )


def headline(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> list[str]:
    """Return the result as a sentence, and how differences were taken."""
    base, *others = members
    differing = [other for other in others if maps and not _is_noise(other.label, maps)]
    strong = [_strongest_source(member) for member in members]
    if maps and not differing:
        labels = f"{listed([other.label for other in others])} and {base.label}"
        sentence = f"The positional patterns of {labels} do not differ beyond noise."
    elif all(strong):
        sentence = f"The strongest pattern comes from {', from '.join(strong)}."
    elif maps:
        other = differing[0].label
        most = max(maps, key=lambda compared: compared.differences[other].rms.value)
        size = f"{most.differences[other].rms.value:.2g} {UNITS.get(base.kind, 'nats')}"
        sentence = f"The patterns of {other} and {base.label} differ most in {most.name}: {size}."
    else:
        n = int(excludes_zero(table, "difference").sum())
        sentence = f"{n} of {len(table)} numbers differ beyond their 95% interval."
    return [sentence, _method(members, maps, table)]


def _is_noise(label: str, maps: Sequence[Compared]) -> bool:
    return all(compared.differences[label].is_significant is False for compared in maps)


def _strongest_source(member: Member) -> str:
    """Return who makes a run's strongest pattern; empty for a run that does not tell."""
    rows = _sources(member)
    if not rows:
        return ""
    layer = max(rows, key=lambda layer: rows[layer][0])
    return f"{together(rows[layer][1])} in {member.label} (L{layer})"


def _sources(member: Member) -> dict[int, tuple[float, tuple[str, ...], float]]:
    """Return each layer's amplitude, nats, the makers of its pattern, and their share."""
    sources = member.tables.get("sources", pd.DataFrame())
    found: dict[int, tuple[float, tuple[str, ...], float]] = {}
    if member.kind != "ablate" or sources.empty:
        return found
    pattern = member.tables["pattern"]
    own = pattern[pattern["kept"] == INTACT.name]
    for row in own[own["amplitude_low"] > 0].to_dict("records"):
        terms = terms_of(of_layer(sources, row["layer"])).dropna(subset=["share"])
        if len(terms) and (who := makers(terms, "share")):
            share = terms[terms["term"].isin(who)]["share"].sum()
            found[int(row["layer"])] = row["amplitude"], who, share
    return found


def side_by_side(members: Sequence[Member]) -> pd.DataFrame:
    """Return who makes the pattern of each layer in each run; empty for other runs than `ablate`'s.

    Of many layers, the strongest are shown.
    """
    found = {member.label: _sources(member) for member in members}
    sizes: dict[int, float] = {}
    for rows in found.values():
        for layer, (amplitude, _, _) in rows.items():
            sizes[layer] = max(amplitude, sizes.get(layer, 0.0))
    layers = sorted(sorted(sizes, key=lambda layer: -sizes[layer])[:MOST_ROWS])
    table = {"layer": [f"L{layer}" for layer in layers]}
    for label, rows in found.items():
        table[label] = [
            f"{_named(rows[layer][1])}: {100 * rows[layer][2]:.0f}% of {rows[layer][0]:.2g} nats"
            if layer in rows
            else WITHIN
            for layer in layers
        ]
    return pd.DataFrame(table) if layers else pd.DataFrame()


def _named(terms: Sequence[str]) -> str:
    return words(terms[0]) if len(terms) == 1 else together(terms)


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


def clearest(table: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return the differences that are largest for their intervals, a row of text per difference.

    Controls and other further tables are left out if the main tables have differences.

    Args:
        table: `differences.csv`.
        base: the label of the first run, which is subtracted from the others.
    """
    main = table[table["table"].isin(TABLE_ORDER)]
    table = main if len(main) else table
    table = table[~table["measure"].str.fullmatch(PART_OF_SHARE)]
    # The patterns of ablated models are in the tables alone.
    table = table[(table["table"] != "pattern") | ~table["item"].str.contains(", ")]
    arm = (table["difference_high"] - table["difference_low"]) / 2
    order = (table["difference"].abs() / arm.where(arm > 0)).dropna().sort_values(ascending=False)
    rows = pd.DataFrame([_text(table.loc[index], base) for index in order.index[:CANDIDATES]])
    if rows.empty:
        return rows
    rows = rows.drop_duplicates(["what", "run"])[:CLEAREST]
    labels = rows["run"].unique()
    if len(labels) > 1:
        return rows
    [label] = labels
    return rows.drop(columns="run").rename(
        columns={"value": label, f"run − {base}": f"{label} − {base}"}
    )


def _text(row: pd.Series, base: str) -> dict[str, str]:
    """Return a difference as a row of words; what is subtracted from what stands in its heading."""
    measure = row["measure"]
    is_share = measure.startswith(SHARES)
    size = f"{100 * row['base_value']:.0f}%" if is_share else f"{row['base_value']:.3g}"
    shown = interval_text(interval_of(row, "difference"), "+.3g")
    if is_share:
        shown = interval_text(percent(interval_of(row, "difference")), "+.0f", "%")
    value = f"{100 * row['value']:.0f}%" if is_share else f"{row['value']:.3g}"
    parts = [part for part in str(row["item"]).split(", ") if part not in UNSAID]
    item = ", ".join(words(part) for part in parts)
    name = MEASURES[measure].title if measure in MEASURES else LOST.get(measure, measure)
    return {
        "what": f"{item}: {name.replace('_', ' ')}",
        "run": str(row["run"]),
        "value": value,
        base: size,
        f"run − {base}": shown,
    }


def _map_sections(members: Sequence[Member], maps: Sequence[Compared]) -> Iterator[Section]:
    if not maps:
        return
    shown, unit = strongest(maps), UNITS.get(members[0].kind, "nats")
    size = positions(2 * len(members) - 1, len(shown))
    groups = [_panels(compared, members, unit) for compared in shown]
    results = [
        {"map": compared.name, "run": label, f"RMS of the difference, {unit}": str(difference)}
        for compared in shown
        for label, difference in compared.differences.items()
    ]
    yield Section(
        title="The patterns, and their differences",
        figure=partial(panel_groups, groups, title="Positional patterns", max_positions=size),
        caption=f"Each run's positional pattern, then the pattern less that of {members[0].label}. "
        "Of many maps, the most different are drawn.",
        table=pd.DataFrame(results),
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
    rows = clearest(table, members[0].label)
    if len(rows):
        yield Section(
            title="The clearest differences",
            caption="The differences that are largest for their intervals; all are in the tables "
            "below.",
            listing=Listing(columns=[*rows], rows=[tuple(row) for row in rows.to_numpy()]),
        )


def _measure_sections(members: Sequence[Member], table: pd.DataFrame) -> Iterator[Section]:
    for name, rows in table.groupby("table", sort=False):
        yield Section(
            title=TOPICS.get(str(name), str(name).replace("_", " ").capitalize()),
            caption=f"A difference is a run's number less that of {members[0].label}. One number "
            "in twenty differs beyond its interval by chance.",
            figure=partial(FIGURES[str(name)], members) if name in FIGURES else None,
            table=rows.drop(columns="table"),
        )


def _pattern_measures(members: Sequence[Member]) -> go.Figure:
    """Draw the measures of the intact models' patterns, layer by layer."""
    runs = {}
    for member in members:
        rows = member.tables["pattern"]
        runs[escape(member.label)] = rows[rows["kept"] == INTACT.name] if "kept" in rows else rows
    return compared_measures(runs)


def _source_shares(members: Sequence[Member]) -> go.Figure:
    """Draw the sources' shares of the runs' patterns, layer by layer."""
    return compared_sources({escape(member.label): member.tables["sources"] for member in members})


FIGURES = {"pattern": _pattern_measures, "sources": _source_shares}  # by the table beside them


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
        title="The runs that were compared",
        caption="Their own reports; the first is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
