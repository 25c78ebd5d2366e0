"""Numbers and views: a study declares both once, and its page, terminal and docs follow.

A study's module has two declarations. `COLUMNS` names its numbers, by their columns in CSV files:

    COLUMNS = {
        "lost": Column("lost", "What is lost without a source.", "nats", signed=True),
        "kept": Column("kept", "What is left of the pattern.", SHARE, blank=NO_PATTERN),
    }

A table that is long (a row per measure, with a column `value`) has its measures in `COLUMNS` as
well: a panel that is a measure takes its title and unit from there. `VIEWS` say which table the
page shows, and how it is drawn, in the order of the page:

    VIEWS = (
        View(table="sources", title="Lost without a source", y=("lost",), by=("removed",)),
        View(table="queries", title="By query", y=("rms",), x="query", by=(), panels="layer",
             kind="curves", folded=True),
        View(table="head_sources", title="Heads", y=("lost",), x="head", by=("layer",),
             kind="cells"),
        View(table="order", title="The orders"),
    )

`sections(VIEWS, run.tables, COLUMNS)` are the sections of the page. Views of tables that a run
lacks are left out. What no view can draw (maps, a text, a graph) is a `Section` as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module

import pandas as pd

from nope_probe.figures.intervals import column_text
from nope_probe.figures.views import PLACES, Columns, View, draw, is_drawn, named
from nope_probe.figures.words import Column
from nope_probe.reports.page import Section

Tables = Mapping[str, pd.DataFrame]


def declared(settings: type) -> dict[str, Column]:
    """Return the columns of a command's CSV files by name, given the class of its settings.

    A number with an interval has two more columns, whose names end in `_low` and `_high`.
    """
    return {**PLACES, **import_module(settings.__module__).COLUMNS}


def sections(
    views: Sequence[View],
    tables: Tables,
    columns: Columns,
    marks: Mapping[str, Mapping[str, float]] | None = None,
) -> Iterator[Section]:
    """Yield the sections of a page, a section for each view whose table has rows.

    Args:
        views: in the page's order.
        tables: the run's.
        columns: the study's numbers.
        marks: by table, named places on x to mark with lines, such as the trained context.
    """
    for view in views:
        table = tables.get(view.table, pd.DataFrame())
        drawn = table.query(view.rows) if view.rows and len(table) else table
        if len(table):
            yield Section(
                title=view.title,
                caption=view.caption,
                figure=partial(draw, view, drawn, columns, (marks or {}).get(view.table))
                if is_drawn(view, drawn)
                else None,
                table=table,
                columns={**PLACES, **columns},
                folded=view.folded,
            )


def brief(
    table: pd.DataFrame,
    first: str,
    numbers: Sequence[str],
    columns: Columns,
    *,
    by: str = "",
    style: str = "z.2f",
) -> pd.DataFrame:
    """Return a small table as text: a row for each value of a column, a cell for each number.

    Args:
        table: numbers, with their bounds if they have any.
        first: the column whose values name the rows.
        numbers: the columns that are shown; of a long table the one that is.
        columns: the study's numbers, which give headings and units.
        by: of a long table, the column whose values (keys of `columns`) are the headings.
        style: the format of numbers; percents have no decimals.

    Example:
        >>> costs = pd.DataFrame({"removed": ["mask"], "cost": [1.5], "cost_low": [1.0]})
        >>> nats = {"cost": Column("cost", unit="nats")}
        >>> brief(costs.assign(cost_high=2.0), "removed", ["cost"], nats).to_dict("records")
        [{'removed': 'without the causal mask', 'cost, nats': '1.50 [1.00, 2.00]'}]
    """
    known = {**PLACES, **columns}
    view = View(table="", title="")
    cells: dict[str, dict[str, str]] = {}
    for row in table.to_dict("records"):
        of_row = cells.setdefault(str(row[first]), {})
        for name in numbers:
            about = known[str(row[by])] if by else known[name]
            of_row[about.title] = column_text(row, name, about, "z.0f" if about.is_share else style)
    names = {value: named(view, first, value) for value in cells}
    frame = pd.DataFrame.from_dict(cells, orient="index").fillna("")
    frame.insert(0, known.get(first, Column(first)).label, [names[value] for value in cells])
    return frame.reset_index(drop=True)
