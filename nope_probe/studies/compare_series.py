"""Three runs or more of a command, shown along the setting that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nope_probe.figures.intervals import column_text
from nope_probe.figures.names import plain, row_name, words
from nope_probe.figures.words import (
    HEAD_MEASURES,
    INFORMATION,
    NUMBERS,
    Columns,
    View,
    capitalised,
    reader_of,
)
from nope_probe.removal import INTACT, NO_REPLACEMENT, Condition
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section
from nope_probe.studies.behaviour import LEADING, QUANTITIES
from nope_probe.studies.circuit import SHOWN
from nope_probe.studies.tidy import declared

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from nope_probe.run.folder import Run

SAID = notes.captions("compare")
VALUES = ("value", "value_low", "value_high")
GROWTH = 8  # times, beyond which an axis is logarithmic
PARTS = tuple(name for name, about in INFORMATION.items() if about.unit == "nats")
LINES = View(
    table="over_layers",
    title="The numbers along the runs",
    y=(*NUMBERS, "cost"),
    by=("removed", "replacement"),
    kind="lines",
    across=2,
    button="weights",
    caption=SAID["series"],
)
CELLS = replace(LINES, x="run", by=("row",), panels="number", kind="cells", caption=SAID["cells"])
SERIES = {  # of each command, the numbers that are shown, of the first table that its runs have
    "ablate": (LINES, replace(LINES, table="pattern", y=HEAD_MEASURES, by=("layer",))),
    "attention": (replace(CELLS, table="attention", y=PARTS),),
    "behaviour": (replace(LINES, table="behaviour", y=("value",), panels="measure"),),
    "circuit": (replace(LINES, table="stages", y=SHOWN, by=("stage", "model")),),
    "trace": (replace(CELLS, table="terms", y=("size",)),),
}


def series_report(run: Run) -> Report:
    """Return the report of three runs or more: a figure along what differs, and its table."""
    results, table = run.manifest.results, run.tables["differences"]
    kind, lines, names = results["of"], results["lines"], [*map(str, table)]
    axis, *others = names[1 : names.index("table")]
    places = names[names.index("table") + 1 : names.index("number")]
    columns = declared(kind) | (QUANTITIES if kind == "behaviour" else {})
    view = next((of for of in SERIES[kind] if of.table in {*table["table"]}), SERIES[kind][0])
    rows = table[(table["table"] == view.table) & table["number"].isin(view.y)]
    rows = rows.dropna(subset=["value"]).dropna(axis=1, how="all")
    if view.panels == "measure":
        rows = rows[rows["measure"].isin(LEADING)]
    shown = [name for name in places if name in rows and name != view.panels]
    of_rows = [row_text(row, shown) for row in rows.to_dict("records")]
    rows = rows.drop(columns="table").assign(row=of_rows)
    also = ", ".join(name for name in others if name not in lines)
    tested = SAID["tested"].format(n_differ=table["differs"].sum(), n=table["p_holm"].count())
    section = Section(
        title=view.title,
        caption=SAID["also"].format(caption=view.caption, also=also) if also else view.caption,
        figure=partial(draw_series, rows, view, columns, (axis, *lines)) if len(rows) else None,
        table=rows.drop(columns="row"),
        columns=columns,
    )
    return Report(
        title=f"{len(results['pages'])} runs of {kind} by {axis}",
        headline=series_headline(rows, view.panels or "number", columns, lines, tested),
        sections=[section],
        how_to_read=notes.how_to_read("compare"),
    )


def draw_series(
    rows: pd.DataFrame, view: View, columns: Columns, settings: Sequence[str]
) -> go.Figure:
    """Draw the numbers of a series along its axis; a logarithmic axis shows 0 at its left end.

    Args:
        rows: of `differences.csv`, with what each is of as `row`.
        view: what is drawn.
        columns: the declared columns.
        settings: the axis, then the settings whose values are lines.
    """
    from nope_probe.figures.views import draw

    if view.kind == "cells":
        return draw(replace(view, y=("value",)), rows, columns)
    axis, *lines = settings
    names = [*rows]
    index = [*names[: names.index("number")], "row"]
    wide = rows.pivot_table(index=index, columns="number", values=[*VALUES], sort=False)
    ends = wide.columns.map(lambda at: at[0].replace("value", at[1]))
    wide = wide.set_axis(ends, axis=1).reset_index()
    wide["line"] = wide[lines].astype(str).agg(", ".join, axis=1) if lines else ""
    called = {str(x): plain(str(x)) for name in (axis, "line") for x in wide[name]}
    removed = dict.fromkeys(wide.get("removed", ()))
    weights = [name for name in removed if Condition.parse(name).weights]
    later = f"removed in {weights}" if weights else ""
    view = replace(view, x=axis, by=(*view.by, "line"), names=called, later=later)
    places = wide[axis]
    if places.dtype.kind in "if" and places.min() >= 0:
        above = places[places > 0]
        if above.max() > GROWTH * above.min():
            left = float(above.min()) / 3
            wide[axis] = places.where(places > 0, left).astype(float)
            view = replace(view, scale="log", names={**called, str(left): "0"})
    return draw(view, wide, columns)


def series_headline(
    rows: pd.DataFrame, what: str, columns: Columns, lines: Sequence[str], tested: str
) -> Headline:
    """Return the number that changes most along a line, for each condition and run.

    Args:
        rows: of `differences.csv`, with what each is of as `row`.
        what: the column that names the numbers.
        columns: the declared columns.
        lines: the settings whose values are lines.
        tested: how many numbers differ.
    """
    if rows.empty:
        return Headline(sentence=tested)
    values = rows.groupby([what, "row", *lines], sort=False)["value"]
    spread = (values.max() - values.min()).sort_values(ascending=False, kind="stable")
    number, row, *_ = spread.index[0]
    most = spread[number].index.get_level_values("row").unique()[:MOST_ROWS]
    shown, about = rows[(rows[what] == number) & rows["row"].isin(most)], columns[number]
    cells = [column_text(of, "value", about, "±z.2f") for of in shown.to_dict("records")]
    texts = shown.assign(cell=cells).pivot(index="row", columns="run", values="cell")
    texts = texts.reindex(index=shown["row"].unique(), columns=shown["run"].unique()).fillna("")
    texts = texts[(texts != "").any(axis=1)].rename_axis(columns=None)
    return Headline(
        sentence=SAID["most"].format(number=capitalised(about.label), row=row),
        table=texts.reset_index(names=f"{about.title} ±95%"),
        caption=tested,
    )


def row_text(row: Mapping[Any, Any], places: Sequence[str]) -> str:
    """Return what a row is of, such as `L2, without the causal mask`.

    Args:
        row: of a table.
        places: the columns that say it.
    """
    known = {name: row[name] for name in places if row[name] == row[name]}
    table, removed = known.pop("table", ""), known.pop("removed", None)
    by = str(known.pop("replacement", NO_REPLACEMENT))
    shown = [reader_of(known) if "layer" in known else str(table).replace("_", " ")]
    if removed is not None and (removed != INTACT.name or not any(shown)):
        shown.append(row_name(str(removed), by))
    shown += [words(str(of)) for name, of in known.items() if name not in ("layer", "head")]
    return ", ".join(filter(None, shown))
