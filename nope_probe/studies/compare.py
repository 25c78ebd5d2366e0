"""`compare`: what is asked of finished runs, and the page of their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from nope_probe.errors import UserError
from nope_probe.figures.intervals import bound_columns, interval_of, interval_text
from nope_probe.figures.words import INFORMATION, Column, View, listed, reader_of
from nope_probe.files import JsonObject
from nope_probe.models.names import resolve
from nope_probe.removal import INTACT, NO_REPLACEMENT
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Link, Listing, Report, Section
from nope_probe.run.flags import CommandSettings
from nope_probe.run.manifest import Manifest, read_manifest
from nope_probe.run.paths import checkpoint_dir, default_output_dir
from nope_probe.studies.attention import text_view
from nope_probe.studies.tidy import declared, sections

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.run.folder import Run

COMPARED = ("ablate", "attention", "behaviour", "circuit", "trace")
# Settings that choose the tokens and their folds.
OF_TOKENS = (
    *("data", "n_seqs", "seq_len", "folds", "seed"),
    *("windows", "pack", "bos", "shuffle", "beyond_context"),
)
PARTS = (  # of a head's attention: nats
    *("information", "first_position", "first_content"),
    *("others_position", "others_content"),
)
FEW_FOLDS = 16  # with fewer, t has heavy tails: hardly any of hundreds of numbers is named
NAMED = 3  # heads in the sentence
TEXT_BYTES = 2_500_000  # of each run's text
OF_SIDES = "Order: how much of the intact model's pattern among the other keys is there."
LESS = "A difference is a run's number less that of {base}."
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
LAYERS = View(
    table="differences",
    title="Positional pattern",
    y=("difference",),
    by=("removed", "replacement"),
    panels="number",
    rows="difference_low == difference_low",
    caption="The run's measure of the pattern less the first run's.",
)
VIEWS = {"attention": HEADS, "pattern": LAYERS}  # by table; of all others, the numbers are shown


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
        if self.labels:
            return [*self.labels]
        if all(models) and len({*models}) == len(models):
            return models
        return folders if len({*folders}) == len(folders) else [str(path) for path in self.runs]

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
            for wrong in _unlike(base, manifest):
                raise UserError(f"{self.runs[0]} and {folder} {wrong}")
        out = self.out or default_output_dir("compare", self.subject, self.recorded())
        for folder in self.runs:
            if out.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{out} is in the run {folder}: take --out outside of the runs")

    def _validate_folders(self) -> None:
        n_runs = len(self.runs)
        if models := [folder for folder in self.runs if _is_model(folder)]:
            raise UserError(_commands_instead(self.runs, models))
        if n_runs < 2:
            raise UserError(f"expected two runs or more to compare, got {n_runs}")
        if self.labels and len(self.labels) != n_runs:
            raise UserError(f"{n_runs} runs need as many --labels, got {len(self.labels)}")
        if len({folder.resolve() for folder in self.runs}) < n_runs:
            raise UserError("a run was given twice")
        for folder in self.runs:
            if checkpoint_dir(folder).is_dir() and not folder.is_dir():
                raise UserError(f"the run in {folder} is not finished; run its command again")


def _unlike(base: Manifest, other: Manifest) -> Iterator[str]:
    """Yield why two runs cannot be compared."""
    if other.kind != base.kind:
        yield f"are of different commands, {base.kind} and {other.kind}"
    if other.skip_keys != base.skip_keys:
        skipped = f"skip different numbers of keys, {base.skip_keys} and {other.skip_keys}"
        yield f"{skipped}; run one again with the --skip-keys of the other"
    if other.seq_len != base.seq_len:
        yield f"have sequences of different lengths, {base.seq_len} and {other.seq_len}"
    if other.settings.get("query_rows") != base.settings.get("query_rows"):
        yield "have maps of different rows; run one again with --query-rows"
    if other.kind == "circuit" and other.settings["layer"] != base.settings["layer"]:
        layers = " and ".join(f"L{of_run.settings['layer']}" for of_run in (base, other))
        yield f"are of different blocks, {layers}"


def _as_typed(folder: Path) -> str:
    """Return a path as it is typed here; settings hold absolute paths."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _is_model(folder: Path) -> bool:
    """Return whether a model is named where a run is expected."""
    name = _as_typed(folder)
    if (folder / "manifest.json").is_file() or ("/" in name and not folder.exists()):
        return False
    try:
        return bool(resolve(name))
    except UserError:
        return False


def _commands_instead(folders: Sequence[Path], models: Sequence[Path]) -> str:
    """Return what to type in the place of a comparison of models: a run of each comes first."""
    runs = {_as_typed(model): f"runs/{model.name}" for model in models}
    commands = [
        f"python -m nope_probe.ablate --model {model} --out {run}" for model, run in runs.items()
    ]
    compared = " ".join(runs.get(name, name) for name in map(_as_typed, folders))
    return (
        f"compare takes the folders of finished runs, not models: run "
        f"{' && '.join([*commands, f'python -m nope_probe.compare {compared}'])}"
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison says of its runs.

    Attributes:
        compared: the command that wrote them.
        labels: their names; the first is the base.
        folders: their folders.
        pages: where their pages are, from the comparison's page.
        headline: the result, and how differences were taken.
    """

    compared: str
    labels: tuple[str, ...]
    folders: tuple[str, ...]
    pages: tuple[str, ...]
    headline: tuple[str, ...]


def columns_of(command: str) -> dict[str, Column]:
    """Return the declared columns of a command's tables by name."""
    return declared(import_module(f"nope_probe.studies.{command}").Settings)


def share_sequences(manifests: Sequence[Manifest]) -> bool:
    """Return whether all runs had the same sequences, dealt to the same folds."""
    dealt = [(of.data.sha256, of.settings.get("folds"), of.fold_sizes) for of in manifests]
    return all(each == dealt[0] for each in dealt)


def report(run: Run) -> Report:
    """Return the report of a comparison, which reads the compared runs again."""
    from nope_probe.run.folder import read_run

    table, compared = run.tables["differences"], run.manifest.results_as(Comparison)
    runs = dict(zip(compared.labels, map(read_run, compared.folders), strict=True))
    sentence, *method = compared.headline
    less = LESS.format(base=compared.labels[0])
    sides, heads = side_by_side(runs), ordered_heads(table)
    brief, caption = (_brief(table), less) if sides.empty else (sides, OF_SIDES)
    if heads:
        brief, caption = _most_changed(heads), f"{less} Changes are in nats."
    return Report(
        title=f"{', '.join(compared.labels[1:])} against {compared.labels[0]}",
        headline=Headline(sentence=sentence, table=brief, caption=caption),
        sections=[
            *_differences(table, compared, [*VIEWS]),
            *_texts(runs),
            _pages(runs, compared),
            *_differences(table, compared, [x for x in table["table"].unique() if x not in VIEWS]),
        ],
        how_to_read=[*notes.how_to_read("attention" if heads else "compare"), *method, less],
    )


def headline(runs: Mapping[str, Run], table: pd.DataFrame) -> list[str]:
    """Return the result in a sentence or two, and how differences were taken and tested.

    Args:
        runs: by label, the first is the base.
        table: `differences.csv`.
    """
    from nope_probe.studies.ablate_page import Answer

    answers = {label: Answer.of(run) for label, run in runs.items()}
    sentences = [changed_heads(label, heads) for label, heads in ordered_heads(table).items()]
    if not sentences:
        if all(answers.values()):
            sentences = [f"{label}: {of.sentence()}" for label, of in answers.items() if of]
        n, known = table["differs"].sum(), table["p_holm"].notna().sum()
        sentences.append(f"{n} of {known} numbers differ, by Holm's rule within each table.")
    return [" ".join(sentences), _method([run.manifest for run in runs.values()])]


def _method(manifests: Sequence[Manifest]) -> str:
    """Return how differences were taken and tested, and what would test them better."""
    base, *others = (manifest.settings for manifest in manifests)
    said = "Numbers are tested by t over folds, those of a table together by Holm's rule. "
    if share_sequences(manifests):
        said += "The runs had the same sequences: differences are paired over folds."
    else:
        unlike = (name for name in OF_TOKENS for of in others if of.get(name) != base.get(name))
        flags = [f"--{name.replace('_', '-')}" for name in dict.fromkeys(unlike)]
        cure = f"run both with the same {listed(flags)}" if flags else "their tokenizers differ"
        said += f"The runs had different sequences, so differences are unpaired and wider: {cure}."
    fewest = min(len(manifest.fold_sizes) for manifest in manifests)
    if fewest < FEW_FOLDS:
        said += f" With {fewest} folds few numbers can be named: take --folds {FEW_FOLDS}."
    return said


def ordered_heads(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the heads of each run of `attention` but the first, those that changed most first.

    Returns:
        By label: layer, head, information, position and content (differences in nats), and changed.
    """
    import pandas as pd

    heads = {}
    for label, rows in table[table["table"] == "attention"].groupby("run", sort=False):
        wide = rows.pivot(index=["layer", "head"], columns="number", values="difference")
        if not {*PARTS} <= {*wide}:
            continue
        found = pd.DataFrame(
            {
                "information": wide["information"],
                "position": wide["first_position"] + wide["others_position"],
                "content": wide["first_content"] + wide["others_content"],
                "changed": rows.groupby(["layer", "head"])["differs"].any(),
                "order": wide[[*PARTS]].abs().max(axis=1),
            }
        )
        ordered = found.sort_values(["changed", "order"], ascending=False, kind="stable")
        heads[str(label)] = ordered.drop(columns="order").reset_index()
    return heads


def changed_heads(label: str, heads: pd.DataFrame) -> str:
    """Return a sentence on which heads changed in a run, and from which layer on.

    Args:
        label: the run's.
        heads: as `ordered_heads` returns them.
    """
    changed = heads[heads["changed"]]
    if changed.empty:
        return f"None of {len(heads)} heads of {label} changed beyond noise."
    first, *more = changed[:NAMED].to_dict("records")
    then = f", then {listed([reader_of(row) for row in more])}" if more else ""
    from_layer = f", the first in L{changed['layer'].min():.0f}" if len(changed) > 1 else ""
    return (
        f"{len(changed)} of {len(heads)} heads of {label} changed{from_layer}: "
        f"{reader_of(first)} most (position {first['position']:+.2g} nats, content "
        f"{first['content']:+.2g}){then}."
    )


def _most_changed(heads: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the heads of each run that changed most, as text."""
    import pandas as pd

    rows = [
        {"run": label, "head": reader_of(row)}
        | {name: f"{row[name]:+.2f}" for name in ("information", "position", "content")}
        | {"changed": "yes" if row["changed"] else "no"}
        for label, table in heads.items()
        for row in table[: max(2, MOST_ROWS // len(heads))].to_dict("records")
    ]
    return pd.DataFrame(rows)


def side_by_side(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return the values of each run, of its shown layer; empty for other runs than `ablate`'s."""
    import pandas as pd

    from nope_probe.studies.ablate_page import Answer

    tables = []
    for label, run in runs.items():
        answer = Answer.of(run)
        if answer is None:
            return pd.DataFrame()
        rows = answer.table()
        name, *numbers = rows.columns
        headings = {column: f"{label} {answer.place}, {column}" for column in numbers}
        tables.append(
            rows.rename(columns=headings).set_index(rows[name].rename(""))[[*headings.values()]]
        )
    return pd.concat(tables, axis=1).fillna("").reset_index()


def _item(row: Mapping[Any, Any], names: Sequence[str]) -> str:
    """Return the item of a row in words, such as `L2, mask`; its table if it has no layer."""
    has_layer = "layer" in names and row["layer"] == row["layer"]
    reader = reader_of(row) if has_layer else str(row["table"]).replace("_", " ")
    others = [str(row[name]) for name in names if name not in ("layer", "head")]
    return ", ".join(
        [reader, *(x for x in others if x not in (INTACT.name, NO_REPLACEMENT, "nan"))]
    )


def _brief(table: pd.DataFrame) -> pd.DataFrame:
    """Return the clearest differences as text."""
    import pandas as pd

    numbers = {*COLUMNS, *bound_columns("difference")}
    names = [str(name) for name in table if name not in numbers]
    clear = table[table["differs"]].sort_values("p_holm", kind="stable")
    rows = clear[:MOST_ROWS].to_dict("records")
    return pd.DataFrame(
        {
            "what": [f"{_item(row, names)}: {row['number']}" for row in rows],
            "run": [row["run"] for row in rows],
            "difference": [interval_text(interval_of(row, "difference"), "+z.3g") for row in rows],
        }
    )


def _differences(
    table: pd.DataFrame, compared: Comparison, tables: Sequence[str]
) -> Iterator[Section]:
    """Yield the differences in some of the runs' tables, drawn where there is a view of them."""
    known = {
        name: replace(column, neutral=None, signed=True, bounded=False, blank="", noise="")
        for name, column in {**INFORMATION, **columns_of(compared.compared)}.items()
    }
    for name in tables:
        for label, rows in table[table["table"] == name].groupby("run", sort=False):
            topic = name.replace("_", " ").capitalize()
            view = VIEWS.get(name, View(table="differences", title=topic))
            if len(compared.labels) > 2:
                view = replace(view, title=f"{view.title}: {label}")
            shown = {"differences": rows.drop(columns="table").dropna(axis=1, how="all")}
            yield from sections([view], shown, {**known, **COLUMNS})


def _texts(runs: Mapping[str, Run]) -> Iterator[Section]:
    """Yield the view of each run's text, if all runs have one."""
    if all(run.manifest.text is not None for run in runs.values()):
        for label, run in runs.items():
            yield Section(
                title=f"Attention of {label} on your text",
                html=text_view(run).html(TEXT_BYTES),
                caption="Click a token to shade the keys it attends to. The bar under it: how far "
                "these weights are from other texts' mean, in nats.",
            )


def _pages(runs: Mapping[str, Run], compared: Comparison) -> Section:
    rows = [
        (Link(text=label, href=page), run.manifest.command, Path(folder).name)
        for (label, run), page, folder in zip(
            runs.items(), compared.pages, compared.folders, strict=True
        )
    ]
    return Section(
        title="The pages of the runs",
        caption="The first run is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
