"""`compare`: what is asked of finished runs, and the pages of their differences.

Two runs are shown by their largest differences, and three or more as a series: what differs among
their settings is the axis of its figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import tyro

from nope_probe.figures.names import plain, row_name, words
from nope_probe.figures.words import (
    HALF_WIDTH,
    HEAD_MEASURES,
    INFORMATION,
    NUMBERS,
    PLACES,
    Column,
    Columns,
    View,
    capitalised,
    column_text,
    columns,
    reader_of,
)
from nope_probe.files import JsonObject
from nope_probe.removal import INTACT, NO_REPLACEMENT, Condition
from nope_probe.reports.page import (
    MOST_ROWS,
    Headline,
    Report,
    Section,
    captions,
    how_to_read,
    row_maps,
    sections,
)
from nope_probe.run.flags import CommandSettings, LocalPath, Mistakes, folder_of
from nope_probe.run.manifest import Manifest, read_manifest, what_differs
from nope_probe.run.processes import checkpoint_dir
from nope_probe.studies.behaviour import LEADING, WORDS
from nope_probe.studies.circuit import SHOWN

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from nope_probe.run.folder import Run

SAID = captions("compare")
PATTERN = "pattern/intact"  # the maps that two runs may share
COLUMNS = columns("compare")
PARTS = tuple(name for name, about in INFORMATION.items() if about.unit == "nats")
HEADS = View(
    table="differences",
    title="Which heads changed",
    rows=f"table == 'attention' and number in {[*PARTS]}",
    y=("difference",),
    x="head",
    by=("layer",),
    panels="number",
    kind="cells",
    marked="differs",
    caption=SAID["heads"],
)
ALL = View(
    table="differences",
    title="All numbers that the runs share",
    caption=SAID["all"],
)

VALUES = ("value", "value_low", "value_high")
GROWTH = 8  # times, beyond which an axis is logarithmic
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


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    """Compare finished runs of one command: two, or a series.

    Puts every number that they share on one page and in differences.csv: differences with
    intervals, paired if the runs had the same sequences, and tested. Of two runs of `ablate` the
    patterns are shown side by side, and of two of `attention` the heads that changed are named.
    Three runs or more are drawn along the setting that differs, and neighbours are tested.

    Attributes:
        runs: The folders of the runs; of two, the first is the one to compare with.
        out: Folder of the comparison [runs/compare-HASH].
    """

    command = "compare"
    examples = (
        "runs/ablate-nope-tiny-0a1b2c3d runs/ablate-rope-tiny-4e5f6a7b",
        "runs/length-*",
    )
    showing = ("image", "verbose")

    runs: tyro.conf.Positional[tuple[LocalPath, ...]] = ()
    out: LocalPath | None = None

    @property
    def subject(self) -> str:
        """The command that wrote the runs, for the default folder's name."""
        return read_manifest(self.runs[0]).kind

    def differing(self) -> tuple[pd.DataFrame, list[str]]:
        """Return what differs among the runs; see `what_differs`."""
        names = [folder.resolve().name for folder in self.runs]
        names = names if len({*names}) == len(names) else [*map(str, self.runs)]
        return what_differs([*map(read_manifest, self.runs)], names, declared(self.subject))

    def recorded(self) -> JsonObject:
        """Return the identity of a comparison: the runs' labels, and their files' checksums."""
        named = zip(self.differing()[0].index, map(read_manifest, self.runs), strict=True)
        return {"runs": [{"label": label, "checksums": dict(of.checksums)} for label, of in named]}

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong with the runs, each with its message."""
        runs = self.runs
        yield len({folder.resolve() for folder in runs}) < len(runs), "a run was given twice"
        going = [f"{of}" for of in runs if checkpoint_dir(of).is_dir() and not of.is_dir()]
        yield len(going) > 1, f"{', '.join(going)} are not finished; run their commands again"
        yield from unlike([*map(read_manifest, runs)])
        out = folder_of(self, self.recorded()).resolve()
        for folder in runs:
            is_inside = out.is_relative_to(folder.resolve())
            yield is_inside, f"{out} is in the run {folder}: take --out outside of the runs"


def declared(command: str) -> dict[str, Column]:
    """Return the columns of a command's CSV files by name.

    A number with an interval has two more columns, whose names end in `_low` and `_high`.
    """
    return {**PLACES, **import_module(f"nope_probe.studies.{command}").COLUMNS}


def unlike(manifests: Sequence[Manifest]) -> Mistakes:
    """Yield why runs cannot be compared, each reason with its message."""
    yield len(manifests) < 2, f"expected two runs or more to compare, got {len(manifests)}"
    kinds = [*dict.fromkeys(manifest.kind for manifest in manifests)]
    for kind in kinds:
        is_of = f"a run is of {kind}: runs of {', '.join(SERIES)} can be compared"
        yield kind not in SERIES, is_of
    yield len(kinds) > 1, f"the runs have unlike commands: {', '.join(kinds)}; take those of one"


def cells_of(manifest: Manifest) -> tuple[object, ...]:
    """Return what positions and cells of maps mean the same in: length, rows, and skipped keys."""
    return manifest.seq_len, manifest.settings.get("query_rows"), manifest.skip_keys


def report(run: Run) -> Report:
    """Return the report of a comparison; that of two runs reads them again."""
    from nope_probe.run.folder import read_run

    folders, table = run.manifest.results["folders"], run.tables["differences"]
    if len(folders) > 2:
        series = series_report(run)
        return replace(series, sections=[*series.sections, pages_of(run)])
    runs = {label: read_run(folder) for label, folder in folders.items()}
    base, label = runs
    kind = runs[base].manifest.kind
    signed = {name: replace(INFORMATION[name], signed=True) for name in PARTS}
    columns = {**declared(kind), **signed, **COLUMNS}
    views = [HEADS if kind == "attention" else ALL]
    chapters = ["compare", *["attention"] * (kind == "attention")]
    return Report(
        title=f"{label} against {base}",
        headline=headline(label, base, table, columns),
        sections=[*_maps(runs), *sections(views, run.tables, columns), pages_of(run)],
        how_to_read=[note for chapter in chapters for note in how_to_read(chapter)],
    )


def pages_of(run: Run) -> Section:
    """Return the section with links to the pages of the compared runs."""
    pages = run.manifest.results["pages"].items()
    links = (f'<li><a href="{escape(page)}">{escape(label)}</a></li>' for label, page in pages)
    return Section(title="The runs", caption="", html=f"<ul>{''.join(links)}</ul>")


def headline(label: str, base: str, table: pd.DataFrame, columns: Columns) -> Headline:
    """Return how many numbers, or heads, of a run differ, and those that differ most.

    Args:
        label: the second run's.
        base: the first run's.
        table: `differences.csv`, the numbers that differ most first.
        columns: the declared columns of the runs and of `differences.csv`.
    """
    tested, things = table[table["p_holm"].notna()], "numbers"
    if {*tested["table"]} == {"attention"}:
        tested, things = tested.drop_duplicates(["layer", "head"]), "heads"
    most = furthest(table, columns)
    said = {"label": label, "base": base, "n_differ": tested["differs"].sum(), "n": len(tested)}
    sentence = SAID["first"].format(*most.iloc[0], things=things, **said)
    return Headline(sentence=sentence, table=most, caption=SAID["furthest"].format(**said))


def furthest(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """Return the rows that differ most as text: of each layer and condition, or head, a number.

    Args:
        table: `differences.csv`, the numbers that differ most first.
        columns: the declared columns of the runs and of `differences.csv`.
    """
    import pandas as pd

    places = [*table][: [*table].index("number")]
    styles = {"base_value": ".3g", "value": ".3g", "difference": "+.3g"}
    cells = []
    for row in table.drop_duplicates(places).head(MOST_ROWS).to_dict("records"):
        about = columns[row["number"]]
        cells.append({"number": f"{row_text(row, places)}: {about.label}"})
        for name, style in styles.items():
            of = replace(COLUMNS[name], unit=about.unit)
            cells[-1][of.label] = column_text(row, name, of, style)
    return pd.DataFrame(cells)


def _maps(runs: Mapping[str, Run]) -> Iterator[Section]:
    """Yield the runs' patterns side by side, of layers that both have."""
    from nope_probe.figures.maps import term_maps

    layers = sorted(set.intersection(*({*run.manifest.layers} for run in runs.values())))
    alike = len({cells_of(run.manifest) for run in runs.values()}) == 1
    if alike and layers and all(PATTERN in run.arrays.get("maps", {}) for run in runs.values()):
        maps = {
            label: row_maps(run, run.maps[PATTERN][[*map(run.manifest.layers.index, layers)]])
            for label, run in runs.items()
        }
        yield Section(
            title="The intact pattern in both runs",
            figure=lambda: term_maps(maps, title="The positional pattern", layers=layers),
            caption=SAID["maps"],
        )


def series_report(run: Run) -> Report:
    """Return the report of three runs or more: a figure along what differs, and its table."""
    results, table = run.manifest.results, run.tables["differences"]
    kind, lines, names = results["of"], results["lines"], [*map(str, table)]
    axis, *others = names[1 : names.index("table")]
    places = names[names.index("table") + 1 : names.index("number")]
    columns = {**declared(kind), **(WORDS if kind == "behaviour" else {})}
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
        how_to_read=how_to_read("compare"),
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
    cells = [column_text(of, "value", about, HALF_WIDTH) for of in shown.to_dict("records")]
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
