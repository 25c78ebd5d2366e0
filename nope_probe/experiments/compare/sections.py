"""What a comparison shows: patterns on one scale, differences, the runs' tables side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape  # figures read tags in their texts, as the page does
from pathlib import Path
from textwrap import wrap

import numpy as np
import pandas as pd
from plotly.colors import qualitative

from nope_probe.experiments.compare.analyse import PAIRED, TABLE_ORDER, Compared, Difference
from nope_probe.experiments.compare.members import INTACT, UNITS, Member, share_sequences
from nope_probe.experiments.sections import Report
from nope_probe.figures.intervals import CLIPPED, PALE
from nope_probe.figures.measures import Series, compared_measures
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.words import MEASURES
from nope_probe.maps.downsample import pool
from nope_probe.reports import notes
from nope_probe.reports.page import Link, Listing, Section, positions
from nope_probe.runtime.folder import Run

MOST_MAPS = 12  # of more, those that differ most are drawn
CLEAREST = 12  # differences that are named
WHAT = 26  # characters in a line of a table's first column on the terminal
COLOURS = qualitative.Safe
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
    "Paired differences are taken fold by fold: the runs had the same sequences, and what these "
    "have in common cancels. Unpaired ones treat the runs as independent, so that their intervals "
    "are too wide where the runs share sequences.",
    notes.INTERVALS,
)


def report(
    run: Run, folder: Path, members: Sequence[Member], maps: Sequence[Compared] = ()
) -> Report:
    """Return what a comparison shows.

    Args:
        run: its `differences`, and the `headline` and `labels` of its manifest.
        folder: of the comparison, from which the page links to the runs.
        members: the runs; the first is the base.
        maps: their patterns, for the page and its figures; the terminal shows none.
    """
    table, labels = run.tables["differences"], run.manifest["labels"]
    return Report(
        title=f"{', '.join(labels[1:])} against {labels[0]}",
        headline=run.manifest["headline"],
        sections=[
            *_map_sections(members, maps),
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
    """Return where the runs differ most, and how differences were taken, a sentence each."""
    sentences = [
        _largest(each.label, members[0].label, maps, members[0].kind)
        for each in members[1:]
        if maps
    ]
    differ = (table["difference_low"] > 0) | (table["difference_high"] < 0)
    sentences.append(f"{differ.sum()} of {len(table)} numbers differ beyond their 95% interval.")
    if any(len(each.maps) > len(maps) for each in members):
        sentences.append(f"Compared are the {len(maps)} maps that all runs have.")
    sentences.append(_method(members, maps, table))
    return sentences


def _largest(label: str, base: str, maps: Sequence[Compared], kind: str) -> str:
    best = max(maps, key=lambda each: each.differences[label].rms.value)
    found = best.differences[label]
    if not any(each.differences[label].is_significant is not False for each in maps):
        return f"The positional patterns of {label} and {base} do not differ beyond noise."
    return (
        f"The positional pattern of {label} differs most from that of {base} in {best.name}: the "
        f"RMS of the difference is {found} {UNITS.get(kind, 'nats')}."
    )


def _method(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> str:
    if members[0].kind == "simulate":
        return "Differences of simulations are unpaired."
    if not share_sequences(members):
        return "The runs had different sequences, so differences are unpaired."
    paired = any(each.paired for found in maps for each in found.differences.values())
    if paired or (table["method"] == PAIRED).any():
        return (
            "The runs had the same sequences: differences of positional patterns and of their "
            "measures are paired over folds, others are unpaired."
        )
    return "The runs had the same sequences but kept no fold maps, so differences are unpaired."


def clearest(table: pd.DataFrame, most: int = CLEAREST) -> list[tuple[str, ...]]:
    """Return the differences that are largest for their intervals, as text.

    Each is what it is of, the run, its value, the first run's, the difference, and whether that is
    paired. Controls and other further tables are left out where there are main ones.
    """
    main = table[table["table"].isin(TABLE_ORDER)]
    table = main if len(main) else table
    arm = (table["difference_high"] - table["difference_low"]) / 2
    order = (table["difference"].abs() / arm.where(arm > 0)).dropna().sort_values(ascending=False)
    return [_text(table.loc[index]) for index in order.index[:most]]


def _text(row: pd.Series) -> tuple[str, ...]:
    measure = MEASURES[row["measure"]].title if row["measure"] in MEASURES else row["measure"]
    bounds = f"[{row['difference_low']:+.3g}, {row['difference_high']:+.3g}]"
    return (
        f"{row['item']}, {measure.replace('_', ' ')}",
        str(row["run"]),
        f"{row['value']:.3g}",
        f"{row['base_value']:.3g}",
        f"{row['difference']:+.3g} {bounds}",
        str(row["method"]),
    )


def _clearest_as_text(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a run's clearest differences, a row each, for a table on the terminal."""
    table = pd.DataFrame(clearest(rows), columns=["what", "run", "value", "base", "difference", ""])
    what = ["\n".join(wrap(text, WHAT)) for text in table["what"]]
    return table.assign(what=what).drop(columns="run")


def _map_sections(members: Sequence[Member], maps: Sequence[Compared]) -> Iterator[Section]:
    if not maps:
        return
    shown = strongest(maps)
    size = positions(2 * len(members) - 1, len(shown))
    unit = UNITS.get(members[0].kind, "nats")
    groups = [_panels(each, members, size, unit) for each in shown]
    names = ", ".join(each.name for each in shown)
    chosen = "" if len(shown) == len(maps) else f" Of {len(maps)} maps those that differ most."
    results = "; ".join(
        f"{each.name}: {label} {found}"
        for each in shown
        for label, found in each.differences.items()
    )
    yield Section(
        title=_map_finding(shown),
        figure=partial(panel_groups, groups, title=f"Positional patterns of {names}"),
        caption=f"Each run's positional pattern, then its difference to {members[0].label}.{chosen}"
        f" RMS of the differences, {unit}: {results}.",
    )


def _map_finding(shown: Sequence[Compared]) -> str:
    """Return the map with the largest difference, if one exceeds its noise."""
    rms = [(d.rms.value, each.name, d) for each in shown for d in each.differences.values()]
    clear = [(value, name) for value, name, d in rms if d.is_significant is not False]
    if not clear:
        return "The positional patterns do not differ beyond the noise"
    return f"The positional patterns differ most in {max(clear)[1]}"


def strongest(maps: Sequence[Compared]) -> list[Compared]:
    """Return the maps to draw, in order: all, or those whose differences are largest."""
    largest = sorted(maps, key=lambda each: -max(d.rms.value for d in each.differences.values()))
    kept = {each.name for each in largest[:MOST_MAPS]}
    return [each for each in maps if each.name in kept]


def _panels(each: Compared, members: Sequence[Member], size: int, unit: str) -> list[Panel]:
    top = _top(np.stack(list(each.patterns.values())))
    panels = [
        _panel(f"{each.name}, {escape(member.label)}", each.patterns[member.label], top, size, unit)
        for member in members
    ]
    for member in members[1:]:
        found = each.differences[member.label]
        of = f" of {escape(member.label)}" if len(members) > 2 else ""
        name = f"difference{of}" if found.is_significant is not False else f"no difference{of}"
        panels.append(_panel(name, found.values, _difference_top(found), size, unit))
    return panels


def _panel(name: str, values: np.ndarray, top: float, size: int, unit: str) -> Panel:
    return Panel(
        name=name,
        values=pool(values[None], size).values[0],
        low=-top,
        high=top,
        unit=unit,
        diverging=True,
        positions=len(values),
    )


def _top(values: np.ndarray) -> float:
    return float(np.nanquantile(np.abs(values), 1 - CLIPPED / 100)) or 1.0


def _difference_top(found: Difference) -> float:
    return max(_top(found.values), PALE * np.nan_to_num(found.noise)) or 1.0


def _clearest(members: Sequence[Member], table: pd.DataFrame) -> Iterator[Section]:
    rows = clearest(table)
    if rows:
        of = members[0].label
        columns = ("what", "run", "value", f"of {of}", "difference, with its 95% interval", "")
        yield Section(
            title=_clearest_finding(rows[0], len(members)),
            caption="Those that are largest for their intervals; all are in the tables below.",
            listing=Listing(columns=columns, rows=rows, labelled=True),
        )


def _clearest_finding(row: Sequence[str], n_runs: int) -> str:
    what, run, _, _, difference, _ = row
    return f"The clearest difference: {what}{f' of {run}' if n_runs > 2 else ''}: {difference}"


def _measure_sections(members: Sequence[Member], table: pd.DataFrame) -> Iterator[Section]:
    for name, rows in table.groupby("table", sort=False):
        drawn = _main_rows(str(name), members)
        figure = partial(compared_measures, drawn, _measures(drawn)) if drawn else None
        yield Section(
            title=f"{_topic(str(name))}: {_n_different(rows)}",
            caption="One number in twenty differs that far by chance. Intervals of the differences "
            f"are {' and '.join(sorted({*rows['method']}))}.",
            figure=figure,
            table=rows.drop(columns="table"),
        )


def _topic(table: str) -> str:
    return TOPICS.get(table, table.replace("_", " ").capitalize())


def _n_different(rows: pd.DataFrame) -> str:
    differ = rows[(rows["difference_low"] > 0) | (rows["difference_high"] < 0)]
    return f"{len(differ)} of {len(rows)} numbers differ beyond their 95% interval"


def _measures(drawn: Sequence[Series]) -> list[str]:
    return [name for name in MEASURES if all(name in each.rows for each in drawn)]


def _main_rows(table: str, members: Sequence[Member]) -> list[Series]:
    """Return the rows of each run that are drawn: the intact model's pattern, layer by layer."""
    if table != "pattern":
        return []
    found = []
    for index, each in enumerate(members):
        rows = each.tables[table]
        rows = rows[rows["kept"] == INTACT] if "kept" in rows else rows
        colour = COLOURS[index % len(COLOURS)]
        found.append(Series(label=escape(each.label), colour=colour, rows=rows))
    return found


def _runs(members: Sequence[Member], folder: Path) -> Section:
    pages = [Path(os.path.relpath(each.folder / "report.html", folder)) for each in members]
    rows = [
        (
            Link(text=each.label, href=page.as_posix()),
            str(each.manifest.get("command", "")),
            page.parent.name,
        )
        for each, page in zip(members, pages, strict=True)
    ]
    return Section(
        title=f"What was compared: {len(members)} runs of {members[0].kind}",
        caption="Their own reports; the first is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
