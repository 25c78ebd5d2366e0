"""`compare`: what is asked of finished runs, and the page of their differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from nope_probe.errors import UserError
from nope_probe.figures.intervals import bound_columns, column_text
from nope_probe.figures.words import INFORMATION, Column, Columns, View, listed, reader_of
from nope_probe.files import JsonObject
from nope_probe.removal import INTACT, NO_REPLACEMENT
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section
from nope_probe.run.flags import CommandSettings
from nope_probe.run.manifest import Manifest, read_manifest
from nope_probe.run.paths import checkpoint_dir, default_output_dir
from nope_probe.studies.tidy import declared, sections

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.run.folder import Run

COMPARED = ("ablate", "attention", "behaviour", "circuit", "trace")
PARTS = (  # of a head's attention: nats
    *("information", "first_position", "first_content"),
    *("others_position", "others_content"),
)
UNLIKE = (  # what two runs are that cannot be compared
    "are of different commands, {} and {}",
    "skip different numbers of keys, {} and {}; run one again with the --skip-keys of the other",
    "have sequences of different lengths, {} and {}",
    "have maps of different rows; run one again with --query-rows",
    "are of different blocks, L{} and L{}",
)
COLUMNS = {
    "table": Column("table", "The runs' table that the number stands in."),
    "number": Column("number", "Its column; what names its row are the columns before."),
    "run": Column("run", "The label of the run."),
    "value": Column("value", "The run's number."),
    "base_value": Column("base value", "The first run's number."),
    "difference": Column("difference", "The run's number less the first run's.", signed=True),
    "p_holm": Column("p, by Holm's rule", "The chance of so large a difference, times tests left."),
    "differs": Column("differs", "Whether the difference survives Holm's rule within its table."),
    "method": Column("method", "`paired` fold by fold, or `unpaired`; of no test, blank."),
}
HEADS = View(
    table="differences",
    title="Which heads changed",
    rows=f"number in {[*PARTS]}",
    y=("difference",),
    x="head",
    by=("layer",),
    panels="number",
    kind="cells",
    marked="differs",
    caption="Red: more nats than in the first run, blue: fewer. A dot marks a change that survives "
    "Holm's rule. Heads behind a changed head change as well: look at the first layer with dots.",
)
ALL = View(
    table="differences",
    title="All numbers that the runs share",
    caption="Differences that survive Holm's rule come first, the largest in widths of their "
    "interval before the others.",
)


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    """Compare finished runs of one command with the first run.

    Puts every number that they share on one page and in differences.csv: differences with
    intervals, paired if the runs had the same sequences, and tested. Runs of `ablate` are shown
    without each source, and of runs of `attention` the heads that changed are named.

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

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    labels: tuple[str, ...] = ()
    out: Path | None = None

    @property
    def subject(self) -> str:
        """The command that wrote the runs, for the default folder's name."""
        return read_manifest(self.runs[0]).kind

    def recorded(self) -> JsonObject:
        """Return the identity of a comparison: the runs' names, and their files' checksums."""
        manifests = [read_manifest(folder) for folder in self.runs]
        named = zip(self.names(manifests), manifests, strict=True)
        return {
            "runs": [{"label": name, "checksums": dict(of.checksums)} for name, of in named],
        }

    def names(self, manifests: Sequence[Manifest]) -> list[str]:
        """Return the runs' labels: as given, or their models, or their folders."""
        models = [Path(manifest.model_name).name for manifest in manifests]
        folders = [folder.resolve().name for folder in self.runs]
        paths = [str(folder) for folder in self.runs]
        return [*self.labels] or next(
            (names for names in (models, folders) if len({*names} - {""}) == len(names)), paths
        )

    def validate(self) -> None:
        """Check that the runs can be compared, and that the folder is outside of them.

        Raises:
            UserError: for models, fewer than two runs, a folder without a finished run, or runs of
                different commands, lengths, rows or skipped keys.
        """
        super().validate()
        self._validate_folders()
        base, *_ = manifests = [read_manifest(folder) for folder in self.runs]
        if len({*self.names(manifests)}) < len(self.runs):
            raise UserError("two runs have the same label; name them with --labels")
        for folder, manifest in zip(self.runs, manifests, strict=True):
            if manifest.kind not in COMPARED:
                kinds = listed(COMPARED)
                raise UserError(f"{folder} is of {manifest.kind}: runs of {kinds} can be compared")
            for unlike, *both in zip(UNLIKE, *map(_must_agree, (base, manifest)), strict=True):
                if both[0] != both[1]:
                    raise UserError(f"{self.runs[0]} and {folder} {unlike.format(*both)}")
        out = self.out or default_output_dir("compare", self.subject, self.recorded())
        for folder in self.runs:
            if out.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{out} is in the run {folder}: take --out outside of the runs")

    def _validate_folders(self) -> None:
        n_runs = len(self.runs)
        if n_runs < 2:
            raise UserError(f"expected two runs or more to compare, got {n_runs}")
        if self.labels and len(self.labels) != n_runs:
            raise UserError(f"{n_runs} runs need as many --labels, got {len(self.labels)}")
        if len({folder.resolve() for folder in self.runs}) < n_runs:
            raise UserError("a run was given twice")
        for folder in self.runs:
            if checkpoint_dir(folder).is_dir() and not folder.is_dir():
                raise UserError(f"the run in {folder} is not finished; run its command again")
            if not (folder / "manifest.json").is_file():
                raise UserError(
                    f"{folder} holds no run: it has no manifest.json. Run a command on a model "
                    "first, such as python -m nope_probe.ablate --model rope-tiny --out "
                    "runs/rope-tiny, and compare the folders of its runs"
                )


def _must_agree(manifest: Manifest) -> tuple[Any, ...]:
    """Return what runs must have in common, in the order of `UNLIKE`."""
    asked = manifest.settings
    of_run = manifest.kind, manifest.skip_keys, manifest.seq_len
    return *of_run, asked.get("query_rows"), asked.get("layer")


def columns_of(command: str) -> dict[str, Column]:
    """Return the declared columns of a command's tables by name."""
    return declared(import_module(f"nope_probe.studies.{command}").Settings)


def share_sequences(manifests: Sequence[Manifest]) -> bool:
    """Return whether all runs had the same sequences, dealt to the same folds."""
    dealt = [(of.data.sha256, of.settings.get("folds"), of.fold_sizes) for of in manifests]
    return all(of_run == dealt[0] for of_run in dealt)


def report(run: Run) -> Report:
    """Return the report of a comparison, which reads the compared runs again."""
    from nope_probe.run.folder import read_run

    table, folders = run.tables["differences"], run.manifest.results["folders"]
    runs = {label: read_run(folder) for label, folder in folders.items()}
    base, *others = runs
    by_run = {label: table[table["run"] == label] for label in others}
    known = {
        name: replace(column, neutral=None, signed=True, bounded=False, blank="", noise="")
        for name, column in {
            **INFORMATION,
            **columns_of(runs[base].manifest.kind),
            **COLUMNS,
        }.items()
    }
    heads = [
        section
        for label in others
        for section in sections(
            [replace(HEADS, title=f"{HEADS.title} in {label}")],
            {"differences": by_run[label].query("table == 'attention'")},
            known,
        )
    ]
    topics = ("compare", "attention") if heads else ("compare",)
    return Report(
        title=f"{', '.join(others)} against {base}",
        headline=Headline(
            sentence=" ".join(sentence(label, rows) for label, rows in by_run.items()),
            table=furthest(table, known),
            caption=f"A row has the number that differs most; the difference is the run's value "
            f"less that of {base}.",
        ),
        sections=[
            *_maps(runs),
            *heads,
            *sections([ALL], {"differences": table}, known),
        ],
        how_to_read=[note for topic in topics for note in notes.how_to_read(topic)],
    )


def sentence(label: str, rows: pd.DataFrame) -> str:
    """Return how many numbers, or heads, of a run differ, and which differs most.

    Args:
        label: the run's.
        rows: its rows of `differences.csv`, those that differ most first.
    """
    tested, things = rows[rows["p_holm"].notna()], "numbers"
    changed = tested[tested["differs"]]
    if {*tested["table"]} == {"attention"}:
        places, things = ["layer", "head"], "heads"
        tested, changed = (of.drop_duplicates(places) for of in (tested, changed))
    if changed.empty:
        return f"None of {len(tested)} {things} of {label} differ beyond noise."
    first = f", the first in L{changed['layer'].min():.0f}" if things == "heads" else ""
    most = changed.iloc[0].to_dict()
    values = f"{most['value']:.3g} against {most['base_value']:.3g}"
    counts = f"{len(changed)} of {len(tested)} {things} of {label} differ{first}"
    return f"{counts}, most of all {_item(most)} ({values})."


def _places(names: Iterable[Any]) -> list[str]:
    """Return the columns that say what a row of `differences.csv` is of."""
    numbers = (*COLUMNS, *bound_columns("difference"))
    return [name for name in names if name not in numbers]


def _item(row: Mapping[Any, Any]) -> str:
    """Return what a row is of in the words of the tables, such as `L2, mask: lead`."""
    named = {name: row[name] for name in _places(row) if row[name] == row[name]}
    reader = reader_of(named) if "layer" in named else str(row["table"]).replace("_", " ")
    others = (str(value) for name, value in named.items() if name not in ("layer", "head"))
    shown = [reader, *(text for text in others if text not in (INTACT.name, NO_REPLACEMENT))]
    return f"{', '.join(shown)}: {row['number']}"


def furthest(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """Return the rows that differ most as text: of each layer and condition, or head, a number.

    Args:
        table: `differences.csv`, the numbers that differ most first.
        columns: the compared runs' numbers.
    """
    import pandas as pd

    first = table.drop_duplicates(["table", *_places(table), "run"])
    n_runs, cells = first["run"].nunique(), []
    for row in first.groupby("run", sort=False).head(MOST_ROWS // n_runs).to_dict("records"):
        about = columns[row["number"]]
        cell = {"number": _item(row)} | ({"run": row["run"]} if n_runs > 1 else {})
        for name in ("base_value", "value", "difference"):
            shown = replace(COLUMNS[name], unit=about.unit)
            cell[shown.label] = column_text(row, name, shown, "+.3g" if shown.signed else ".3g")
        cells.append(cell)
    return pd.DataFrame(cells)


def _maps(runs: Mapping[str, Run]) -> Iterator[Section]:
    """Yield the runs' patterns side by side, of layers that all of them have."""
    import numpy as np

    from nope_probe.figures.maps import term_maps
    from nope_probe.figures.panels import RowMaps

    name = "pattern/intact"
    if not all(name in run.arrays.get("maps", {}) for run in runs.values()):
        return
    maps = {
        label: dict(zip(run.manifest.layers, run.maps[name], strict=True))
        for label, run in runs.items()
    }
    layers = sorted(set.intersection(*({*of_run} for of_run in maps.values())))
    shown = {
        label: RowMaps(
            values=np.stack([maps[label][layer] for layer in layers]),
            queries=run.query_positions,
            skip_keys=run.manifest.skip_keys,
        )
        for label, run in runs.items()
        if layers
    }
    if shown:
        yield Section(
            title="The intact pattern in every run",
            figure=lambda: term_maps(shown, title="The positional pattern", layers=layers),
            caption="All maps have the colours of one scale. The column on the left is the first "
            "key's lead over the others.",
        )
