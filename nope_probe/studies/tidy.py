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
        View(table="offsets", title="By distance", y=("mean",), x="offset", panels="layer",
             kind="curves", folded=True),
        View(table="head_sources", title="Heads", y=("lost",), x="head", by=("layer",),
             kind="cells"),
        View(table="order", title="The orders"),
    )

`sections(VIEWS, run.tables, COLUMNS)` are the sections of the page. Views of tables that a run
lacks are left out. What no view can draw (maps, a text) is a `Section` as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from nope_probe.analyses.verdicts import exceeds_noise
from nope_probe.figures.intervals import ValueAndBounds, column_text
from nope_probe.figures.names import named, row_name
from nope_probe.figures.words import PLACES, Column, Columns, View
from nope_probe.removal import NO_REPLACEMENT
from nope_probe.reports.page import Section

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from nope_probe.figures.panels import RowMaps
    from nope_probe.run.folder import Run

Tables: TypeAlias = "Mapping[str, pd.DataFrame]"


def declared(command: str) -> dict[str, Column]:
    """Return the columns of a command's CSV files by name.

    A number with an interval has two more columns, whose names end in `_low` and `_high`.
    """
    return {**PLACES, **import_module(f"nope_probe.studies.{command}").COLUMNS}


def sections(
    views: Sequence[View],
    tables: Tables,
    columns: Columns,
    marks: Mapping[str, Mapping[str, int]] | None = None,
) -> Iterator[Section]:
    """Yield the sections of a page, a section for each view whose table has rows.

    A table that several views draw is under the figure of the first.

    Args:
        views: in the page's order.
        tables: the run's.
        columns: the study's numbers.
        marks: by table, named places on x to mark with lines, such as the trained context.
    """
    from nope_probe.figures.views import draw, is_drawn

    first = {view.table: view for view in reversed(views)}
    for view in views:
        table = tables.get(view.table)
        if table is not None and len(table):
            drawn = table.query(view.rows) if view.rows else table
            yield Section(
                title=view.title,
                caption=view.caption,
                figure=partial(draw, view, drawn, columns, (marks or {}).get(view.table))
                if is_drawn(view, drawn)
                else None,
                table=table if view is first[view.table] else None,
                columns={**PLACES, **columns},
                folded=view.folded,
            )


def row_maps(run: Run, values: np.ndarray) -> RowMaps:
    """Return maps of a run [layer, row, key_pos], which know the queries of their rows."""
    from nope_probe.figures.panels import RowMaps

    return RowMaps(values=values, queries=run.query_positions, skip_keys=run.manifest.skip_keys)


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
        >>> import pandas as pd
        >>> costs = pd.DataFrame({"removed": ["mask"], "cost": [1.5], "cost_low": [1.0]})
        >>> nats = {"cost": Column("cost", unit="nats")}
        >>> brief(costs.assign(cost_high=2.0), "removed", ["cost"], nats).to_dict("records")
        [{'removed': 'without the causal mask', 'cost, nats': '1.50 [1.00, 2.00]'}]
    """
    import pandas as pd

    known = {**PLACES, **columns}
    cells: dict[str, dict[str, str]] = {}
    for row in table.to_dict("records"):
        by_what = row.get("replacement", NO_REPLACEMENT)
        removed = row_name(row[first], by_what) if first == "removed" else ""
        of_row = cells.setdefault(removed or named({}, first, row[first]), {})
        for name in numbers:
            about = known[str(row[by])] if by else known[name]
            of_row[about.title] = column_text(row, name, about, "z.0f" if about.is_share else style)
    frame = pd.DataFrame.from_dict(cells, orient="index").fillna("")
    return frame.reset_index(names=known.get(first, Column(first)).label)


def above_noise(rows: pd.DataFrame, fold_sizes: Sequence[int] = ()) -> pd.Series[bool]:
    """Return which rows have an amplitude that exceeds the noise of all rows.

    Args:
        rows: one model's layers, or its heads.
        fold_sizes: sequences per fold.
    """
    import pandas as pd

    ends = rows[["amplitude", "amplitude_low"]].to_numpy(float).tolist()
    clear = [exceeds_noise(value, low, len(rows), fold_sizes) for value, low in ends]
    return pd.Series(clear, rows.index, dtype=bool)


def strongest_row(rows: pd.DataFrame, fold_sizes: Sequence[int] = ()) -> pd.Series | None:
    """Return the row that pages show first, of all commands: the one with the largest lead.

    Only rows whose pattern exceeds the noise count (see `above_noise`); where no key is first, the
    row with the largest pattern is returned.

    Args:
        rows: `lead` and `amplitude` (nats) with their bounds, of the intact model.
        fold_sizes: sequences per fold.

    Returns:
        None if no pattern exceeds the noise.
    """
    above = rows[above_noise(rows, fold_sizes)]
    if above.empty:
        return None
    has_lead = "lead" in above and above["lead"].notna().any()
    sizes = above["lead"].abs().fillna(0.0) if has_lead else above["amplitude"]
    return above.iloc[int(sizes.argmax())]


def preferred_keys(locality: ValueAndBounds) -> str:
    """Return which keys a pattern of some locality prefers: `near`, `far` or `neither`."""
    _, low, high = locality
    return "near" if low > 0 else "far" if high < 0 else "neither"
