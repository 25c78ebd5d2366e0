"""`compare`: what is asked of two finished runs, and the page of their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from nope_probe.figures.intervals import column_text
from nope_probe.figures.names import row_name, words
from nope_probe.figures.words import INFORMATION, Column, Columns, View, listed, reader_of
from nope_probe.files import JsonObject
from nope_probe.removal import INTACT, NO_REPLACEMENT
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section
from nope_probe.run.flags import CommandSettings, LocalPath, Mistakes
from nope_probe.run.manifest import Manifest, read_manifest
from nope_probe.run.paths import folder_of
from nope_probe.studies.tidy import declared, row_maps, sections

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.run.folder import Run

PATTERN = "pattern/intact"  # the maps that two runs may share
COMPARED = ("ablate", "attention", "behaviour", "circuit", "trace")
PARTS = tuple(name for name, about in INFORMATION.items() if about.unit == "nats")
COLUMNS = {
    "table": Column("table", "The runs' table that the number stands in."),
    "number": Column("number", "Its column; what names its row are the columns before."),
    "value": Column("value", "The second run's number."),
    "base_value": Column("base value", "The first run's number."),
    "difference": Column("difference", "The second run's number less the first's.", signed=True),
    "p_holm": Column("p, by Holm's rule", "The chance of so large a difference, times tests left."),
    "differs": Column("differs", "Whether the difference survives Holm's rule within its table."),
    "method": Column("method", "`paired` fold by fold, or `unpaired`; of no test, blank."),
}
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
    caption="Red: more nats than in the first run, blue: fewer. A dot marks a change that survives "
    "Holm's rule. Heads behind a changed head change as well: look at the first layer with dots.",
)
NUMBERS = View(
    table="differences",
    title="All numbers that the runs share",
    caption="Differences that survive Holm's rule come first, the largest before the others.",
)


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    """Compare two finished runs of one command.

    Puts every number that they share on one page and in differences.csv: differences with
    intervals, paired if the runs had the same sequences, and tested. Patterns of runs of `ablate`
    are shown side by side, and of runs of `attention` the heads that changed are named.

    Attributes:
        runs: The folders of the runs; the first is the one to compare with.
        labels: Their names [their models, or their folders].
        out: Folder of the comparison [runs/compare-HASH].
    """

    command = "compare"
    examples = (
        "runs/ablate-nope-tiny-0a1b2c3d runs/ablate-rope-tiny-4e5f6a7b",
        "runs/one runs/two --labels before after",
    )
    showing = ("verbose",)

    runs: tyro.conf.Positional[tuple[LocalPath, ...]] = ()
    labels: tuple[str, ...] = ()
    out: LocalPath | None = None

    @property
    def subject(self) -> str:
        """The command that wrote the runs, for the default folder's name."""
        return read_manifest(self.runs[0]).kind

    def recorded(self) -> JsonObject:
        """Return the identity of a comparison: the runs' labels, and their files' checksums.

        Labels are as given, or the names of the models or folders, if these differ.
        """
        manifests = [read_manifest(folder) for folder in self.runs]
        models = [Path(manifest.model_name).name for manifest in manifests]
        folders = [folder.resolve().name for folder in self.runs]
        choices = map(list, (self.labels, models, folders, map(str, self.runs)))
        labels = next(names for names in choices if len({*names} - {""}) == len(manifests))
        named = zip(labels, manifests, strict=True)
        return {"runs": [{"label": name, "checksums": dict(of.checksums)} for name, of in named]}

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong with the runs, each with its message."""
        runs, labels = self.runs, self.labels
        yield len(runs) != 2, f"expected two runs to compare, got {len(runs)}"
        yield labels and len(labels) != 2, f"2 runs need as many --labels, got {len(labels)}"
        yield len({*labels}) == 1, "two runs have the same label; name them with --labels"
        yield len({folder.resolve() for folder in runs}) < 2, "a run was given twice"
        out = folder_of(self, self.recorded()).resolve()
        for folder in runs:
            is_inside = out.is_relative_to(folder.resolve())
            yield is_inside, f"{out} is in the run {folder}: take --out outside of the runs"
        yield from unlike(*map(read_manifest, runs))


def unlike(base: Manifest, other: Manifest) -> Mistakes:
    """Yield why two runs cannot be compared, each reason with its message."""
    for kind in (base.kind, other.kind):
        is_of = f"a run is of {kind}: runs of {listed(COMPARED)} can be compared"
        yield kind not in COMPARED, is_of
    for what, one, two in (
        ("commands", base.kind, other.kind),
        ("numbers of skipped keys (--skip-keys)", base.skip_keys, other.skip_keys),
        ("lengths of sequences (--seq-len)", base.seq_len, other.seq_len),
        ("rows (--query-rows)", base.settings.get("query_rows"), other.settings.get("query_rows")),
        ("blocks (--layer)", base.settings.get("layer"), other.settings.get("layer")),
    ):
        yield (
            one != two,
            f"the runs have unlike {what}: {one} and {two}; repeat one run with the other's",
        )


def report(run: Run) -> Report:
    """Return the report of a comparison, which reads the compared runs again."""
    from nope_probe.run.folder import read_run

    folders = run.manifest.results["folders"]
    runs = {label: read_run(folder) for label, folder in folders.items()}
    base, label = runs
    kind = runs[base].manifest.kind
    signed = {name: replace(INFORMATION[name], signed=True) for name in PARTS}
    columns = declared(kind) | signed | COLUMNS
    views, chapters = (
        ([HEADS], ("compare", "attention")) if kind == "attention" else ([NUMBERS], ("compare",))
    )
    return Report(
        title=f"{label} against {base}",
        headline=headline(label, base, run.tables["differences"], columns),
        sections=[*_maps(runs), *sections(views, run.tables, columns)],
        how_to_read=[note for chapter in chapters for note in notes.how_to_read(chapter)],
    )


def headline(label: str, base: str, table: pd.DataFrame, columns: Columns) -> Headline:
    """Return how many numbers, or heads, of a run differ, and those that differ most.

    Args:
        label: the second run's.
        base: the first run's.
        table: `differences.csv`, the numbers that differ most first.
        columns: the declared columns of the runs and of `differences.csv`.
    """
    tested, things = table[table["p_holm"].notna()], "numbers"
    changed = tested[tested["differs"]]
    if {*tested["table"]} == {"attention"}:
        things = "heads"
        tested, changed = (of.drop_duplicates(["layer", "head"]) for of in (tested, changed))
    most = furthest(table, columns)
    end = " beyond noise"
    if len(changed):
        number, before, after, _ = most.iloc[0]
        first = f", the first in L{changed['layer'].min():.0f}" if things == "heads" else ""
        end = f"{first}, most of all {number} ({after} against {before})"
    count = f"{len(changed) or 'None'} of {len(tested)} {things}"
    return Headline(
        sentence=f"{count} of {label} and {base} differ{end}.",
        table=most,
        caption="The number that differs most of each layer and condition, or head; the "
        f"difference is {label}'s value less that of {base}.",
    )


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
        cells.append({"number": f"{_place(row, places)}: {about.label}"})
        for name, style in styles.items():
            of = replace(COLUMNS[name], unit=about.unit)
            cells[-1][of.label] = column_text(row, name, of, style)
    return pd.DataFrame(cells)


def _place(row: Mapping[Any, Any], places: Sequence[str]) -> str:
    """Return what a row is of, such as `L2, without the causal mask`."""
    known = {name: row[name] for name in places if row[name] == row[name]}
    table, removed = known.pop("table"), str(known.pop("removed", INTACT.name))
    by = str(known.pop("replacement", NO_REPLACEMENT))
    shown = [reader_of(known) if "layer" in known else str(table).replace("_", " ")]
    if removed != INTACT.name:
        shown.append(row_name(removed, by))
    shown += [words(str(of)) for name, of in known.items() if name not in ("layer", "head")]
    return ", ".join(shown)


def _maps(runs: Mapping[str, Run]) -> Iterator[Section]:
    """Yield the runs' patterns side by side, of layers that both have."""
    from nope_probe.figures.maps import term_maps

    layers = sorted(set.intersection(*({*run.manifest.layers} for run in runs.values())))
    if layers and all(PATTERN in run.arrays.get("maps", {}) for run in runs.values()):
        maps = {
            label: row_maps(run, run.maps[PATTERN][[*map(run.manifest.layers.index, layers)]])
            for label, run in runs.items()
        }
        yield Section(
            title="The intact pattern in both runs",
            figure=lambda: term_maps(maps, title="The positional pattern", layers=layers),
            caption="Both maps have the colours of one scale. The strip on the left is the first "
            "key's lead, in its colours.",
        )
