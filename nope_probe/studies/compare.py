"""`compare`: what is asked of finished runs, and the pages of their differences.

Two runs are shown by their largest differences, and three or more as a series: what differs among
their settings is the axis of its figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

import tyro

from nope_probe.figures.intervals import column_text
from nope_probe.figures.words import INFORMATION, Columns, View, columns
from nope_probe.files import JsonObject
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section
from nope_probe.run.flags import CommandSettings, LocalPath, Mistakes
from nope_probe.run.manifest import Manifest, read_manifest, what_differs
from nope_probe.run.paths import checkpoint_dir, folder_of
from nope_probe.studies.compare_series import PARTS, row_text, series_report
from nope_probe.studies.tidy import declared, row_maps, sections

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.run.folder import Run

SAID = notes.captions("compare")
PATTERN = "pattern/intact"  # the maps that two runs may share
COMPARED = ("ablate", "attention", "behaviour", "circuit", "trace")
COLUMNS = columns("compare")
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


def unlike(manifests: Sequence[Manifest]) -> Mistakes:
    """Yield why runs cannot be compared, each reason with its message."""
    yield len(manifests) < 2, f"expected two runs or more to compare, got {len(manifests)}"
    kinds = [*dict.fromkeys(manifest.kind for manifest in manifests)]
    for kind in kinds:
        is_of = f"a run is of {kind}: runs of {', '.join(COMPARED)} can be compared"
        yield kind not in COMPARED, is_of
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
        how_to_read=[note for chapter in chapters for note in notes.how_to_read(chapter)],
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
    number, before, after, _ = most.iloc[0]
    sentence = SAID["first"].format(
        n_differ=tested["differs"].sum(),
        n=len(tested),
        things=things,
        label=label,
        base=base,
        number=number,
        after=after,
        before=before,
    )
    caption = SAID["furthest"].format(label=label, base=base)
    return Headline(sentence=sentence, table=most, caption=caption)


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
