"""The report of a comparison: patterns on one scale, differences, tables side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import (
    AMPLITUDES,
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
from nope_probe.figures.names import plain, words
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.words import MEASURES
from nope_probe.reports import notes
from nope_probe.reports.page import Lead, Link, Listing, Section, explorer_section, positions
from nope_probe.runtime.folder import Run

MOST_MAPS = 12  # of more maps, the maps that differ most are drawn
CLEAREST = 12  # number of differences that are named
CANDIDATES = 48  # of which the same number in two tables is named once
UNSAID = ("players", "circuits", "identity")  # parts of an item that its words do without
PART_OF_SHARE = "(share|lost|alone|rms)_(first|others)"  # what the whole says already
OF_PLAYER = {  # measures of a source or player in words
    "share": "share of {}",
    "lost": "lost without {}",
    "alone": "brought by {} alone",
    "rms": "strength of {}, nats",
}
OF_MAKERS = (
    "Who makes the pattern of each layer, and their share of its strength. A share above 100% is "
    "offset by others below 0%."
)
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
    run: Run,
    folder: Path,
    members: Sequence[Member],
    maps: Sequence[Compared] = (),
    explorer: Explorer | None = None,
) -> Report:
    """Return the report of a comparison.

    Args:
        run: its `differences`, and the `headline` and `labels` of its manifest.
        folder: the comparison's folder, from which the page links to the runs.
        members: the runs; the first is the base.
        maps: their patterns, for the page and its figures; the terminal shows no maps.
        explorer: the runs' sources behind switches, if the page shows them.
    """
    table, labels = run.tables["differences"], run.manifest["labels"]
    sentence, *method = run.manifest["headline"]
    sources = side_by_side(members)
    return Report(
        title=f"{', '.join(labels[1:])} against {labels[0]}",
        lead=Lead(
            sentence=sentence,
            table=_brief(clearest(table, labels[0])) if sources.empty else sources,
            caption=OF_MAKERS if len(sources) else LESS.format(base=labels[0]),
        ),
        sections=[
            *explorer_section(explorer),
            _runs(members, folder),
            *_map_sections(members, maps),
            *_clearest(members, table),
            *_measure_sections(members, table),
        ],
        how_to_read=[*notes.how_to_read("compare"), *method, LESS.format(base=labels[0])],
    )


def headline(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> list[str]:
    """Return the result in a sentence, and how differences were taken."""
    base, *others = members
    made = {member.label: _sources(member) for member in members}
    differences = [d for compared in maps for d in compared.differences.values()]
    if maps and all(difference.is_significant is False for difference in differences):
        labels = f"{listed([other.label for other in others])} and {base.label}"
        where = " among the keys after the first" if base.skip_keys else ""
        said = f"The positional patterns of {labels} do not differ beyond noise{where}; "
    elif all(made.values()):
        strongest = {label: max(rows.items(), key=_amplitude) for label, rows in made.items()}
        parts = [f"{together(row.who)} in {label} (L{n})" for label, (n, row) in strongest.items()]
        said = f"The strongest pattern comes from {', from '.join(parts)}; "
    else:
        said = ""
    n, known = int(excludes_zero(table, "difference").sum()), table["difference_low"].notna().sum()
    said += f"{n} of {known} numbers differ{'' if said else ' beyond their 95% interval'}."
    if members[0].kind == "simulate":
        method = "simulations"
    elif not share_sequences(members):
        method = "others"
    else:
        paired = any(d.paired for d in differences) or (table["method"] == PAIRED).any()
        method = "paired" if paired else "foldless"
    return [said, METHODS[method]]


class Makers(NamedTuple):
    """Who makes a layer's pattern: its amplitude in nats, the makers, and their share of it."""

    amplitude: float
    who: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        """Return the makers with their share, for a table's cell."""
        name = words(self.who[0]) if len(self.who) == 1 else together(self.who)
        return f"{name}: {100 * self.share:.0f}% of {self.amplitude:.2g} nats"


def _amplitude(row: tuple[int, Makers]) -> float:
    return row[1].amplitude


def _sources(member: Member) -> dict[int, Makers]:
    """Return who makes the pattern of each layer that exceeds the noise; only `ablate` tells."""
    sources = member.tables.get("sources", pd.DataFrame())
    if member.kind != "ablate" or sources.empty:
        return {}
    pattern, made = member.tables["pattern"], {}
    for row in pattern.query("kept == @INTACT.name and amplitude_low > 0").to_dict("records"):
        terms = terms_of(of_layer(sources, row["layer"])).dropna(subset=["share"])
        if len(terms):
            who = makers(terms, "share")
            share = terms[terms["term"].isin(who)]["share"].sum()
            made[int(row["layer"])] = Makers(row["amplitude"], who, share)
    return made


def side_by_side(members: Sequence[Member]) -> pd.DataFrame:
    """Return who makes the pattern of each layer in each run; empty for other runs than `ablate`'s.

    Of many layers, the strongest are shown.
    """
    made = {member.label: _sources(member) for member in members}
    rows = sorted((row for of_run in made.values() for row in of_run.items()), key=_amplitude)
    layers = sorted([*dict.fromkeys(layer for layer, _ in reversed(rows))][:MOST_ROWS])
    cells = {name: [str(of_run.get(n, WITHIN)) for n in layers] for name, of_run in made.items()}
    return pd.DataFrame({"layer": [f"L{n}" for n in layers], **cells} if layers else {})


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


def _brief(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the first differences without the two numbers that they are taken from."""
    return rows[[*rows.columns[:-3], *rows.columns[-1:]]][:MOST_ROWS]


def _text(row: pd.Series, base: str) -> dict[str, str]:
    """Return a difference as a row of words; what is subtracted from what stands in its heading."""
    measure, estimate = row["measure"], interval_of(row, "difference")
    values, form, unit = [row["value"], row["base_value"]], "z.3g", ""
    if measure.startswith(SHARES):
        estimate, values, form, unit = percent(estimate), [100 * v for v in values], "z.0f", "%"
    layer, *parts = [part for part in str(row["item"]).split(", ") if part not in UNSAID]
    what = MEASURES[measure].title if measure in MEASURES else measure.replace("_", " ")
    if parts and measure in OF_PLAYER:
        what = OF_PLAYER[measure].format(", ".join(map(words, parts)))
    elif parts:
        what = f"{', '.join(map(words, parts))}, {what}"
    is_amplitude = measure.startswith(AMPLITUDES)
    value, of_base = (
        WITHIN if is_amplitude and number <= 0 else f"{number:{form}}{unit}" for number in values
    )
    return {
        "what": f"{layer}: {what}",
        "run": str(row["run"]),
        "value": value,
        base: of_base,
        f"run − {base}": interval_text(estimate, f"+{form}", unit),
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
    drawn = [(f"{compared.name}, {plain(one)}", patterns[one], top) for one in patterns]
    for label, difference in compared.differences.items():
        sign = "no difference" if difference.is_significant is False else "difference"
        name = f"{sign} of {plain(label)}" if len(members) > 2 else sign
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
            caption="",
            figure=partial(FIGURES[str(name)], members) if name in FIGURES else None,
            table=rows.drop(columns="table"),
        )


def _pattern_measures(members: Sequence[Member]) -> go.Figure:
    """Draw the measures of the intact models' patterns, layer by layer."""
    runs = {}
    for member in members:
        rows = member.tables["pattern"]
        runs[member.label] = rows[rows["kept"] == INTACT.name] if "kept" in rows else rows
    return compared_measures(runs)


def _source_shares(members: Sequence[Member]) -> go.Figure:
    """Draw the sources' shares of the runs' patterns, layer by layer."""
    return compared_sources({member.label: member.tables["sources"] for member in members})


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
        title="The runs' own pages",
        caption="The first run is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
