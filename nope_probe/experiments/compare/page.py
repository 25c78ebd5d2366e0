"""The report of a comparison: patterns on one scale, differences, tables side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape  # figures read tags in their texts, as the page does
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from plotly.colors import qualitative

from nope_probe.experiments.compare.maps import Compared, Difference
from nope_probe.experiments.compare.members import INTACT, UNITS, Member
from nope_probe.experiments.compare.tables import clearest
from nope_probe.figures.intervals import CLIPPED, PALE
from nope_probe.figures.measures import Series, compared_measures
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.words import MEASURES
from nope_probe.maps.downsample import pool
from nope_probe.reports import notes
from nope_probe.reports.listing import Link, Listing
from nope_probe.reports.page import Section, page, positions

MOST_MAPS = 12  # of more, those that differ most are drawn
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


def compare_page(
    members: Sequence[Member],
    maps: Sequence[Compared],
    table: pd.DataFrame,
    manifest: Mapping[str, Any],
    links: Sequence[str],
) -> str:
    """Return the report of a comparison.

    Args:
        members: the runs; the first is the base.
        maps: their patterns.
        table: `differences.csv`.
        manifest: what was compared, with the `headline`.
        links: each run's report, relative to the page.
    """
    sections = [*_map_sections(members, maps), *_clearest(members, table)]
    sections += _measure_sections(members, table)
    sections.append(_runs(members, links))
    title = f"{', '.join(each.label for each in members[1:])} against {members[0].label}"
    return page(title, manifest["headline"], sections, manifest, HOW_TO_READ)


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
        figure=panel_groups(groups, title=f"Positional patterns of {names}"),
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
        figure = compared_measures(drawn, _measures(drawn)) if drawn else None
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


def _runs(members: Sequence[Member], links: Sequence[str]) -> Section:
    rows = [
        (
            Link(text=each.label, href=link),
            str(each.manifest.get("command", "")),
            Path(link).parent.name,
        )
        for each, link in zip(members, links, strict=True)
    ]
    return Section(
        title=f"What was compared: {len(members)} runs of {members[0].kind}",
        caption="Their own reports; the first is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
