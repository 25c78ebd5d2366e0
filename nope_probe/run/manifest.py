"""What a run's manifest.json says: a record for all commands, which writes and reads itself.

It needs no torch, since a finished run is shown without it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from itertools import accumulate, product
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pydantic import TypeAdapter

from nope_probe.errors import UserError
from nope_probe.files import JsonObject, json_checksum, read_json
from nope_probe.models.info import ModelInfo
from nope_probe.run.processes import checkpoint_dir
from nope_probe.run.settings import FORMAT

if TYPE_CHECKING:
    import pandas as pd

FileRecord: TypeAlias = dict[str, dict[str, str | int]]  # a source's files, their hash or size
Record = TypeVar("Record")
PRECISION = ("n_seqs", "folds", "batch_size")  # of how well numbers are known, the last axis
STEP = re.compile(r"[-_/]?(?:step|checkpoint)[-_]?(\d+)", re.IGNORECASE)
MOST_TOKENS = 60  # that an error lists
LIBRARIES = ("nope-probe", "torch", "transformer-lens", "transformers", "numpy", "tokenizers")
OF_FILE = ("format", "complete", "checksum")  # entries of manifest.json that check the file itself


@dataclass(frozen=True, kw_only=True)
class RunModel(ModelInfo):
    """The model of a run.

    Attributes:
        weights: the hash of its weights, buffers and settings.
    """

    weights: str


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Where a run's sequences come from.

    Attributes:
        name: of the data.
        bos: whether all sequences begin with a BOS token; None for simulated vectors.
        sha256: of the sequences.
        notes: what a reader has to know of them.
        bos_token: the BOS token's text, if they have one.
        alpha: the expected inner products of simulated vectors.
        padding: how many rows and tokens are padding.
    """

    name: str = ""
    bos: bool | None = None
    sha256: str = ""
    notes: tuple[str, ...] = ()
    bos_token: str = ""
    alpha: tuple[float, ...] = ()
    padding: str = ""


@dataclass(frozen=True, kw_only=True)
class ShownText:
    """The text that a run shows.

    Attributes:
        pieces: the text of each token.
        bos: the name of the BOS token; empty without one.
        notes: what a reader has to know of the text.
    """

    pieces: tuple[str, ...]
    bos: str
    notes: tuple[str, ...] = ()

    def token(self, named: int | str) -> int:
        """Return the number of a token, given by its number or by the word that it ends.

        Args:
            named: a number, below 0 from the end; or a word.

        Raises:
            UserError: listing the tokens, for a number that does not exist, or a word that does
                not stand there once.

        Example:
            >>> text = ShownText(pieces=("", "def", " wid", "th", "("), bos="<bos>")
            >>> text.token("width"), text.token(-1)
            (3, 4)
        """
        n, ends, places = len(self.pieces), list(accumulate(map(len, self.pieces))), list[int]()
        if isinstance(named, int):
            places = [named % n] if -n <= named < n else []
        elif named:
            words = re.finditer(rf"(?<!\w){re.escape(named)}(?!\w)", "".join(self.pieces))
            places = [bisect_left(ends, word.end()) for word in words]
        if len(places) == 1:
            return places[0]
        shown = [place for place in places or range(n) if self.pieces[place].strip()]
        tokens = ", ".join(f"{at} {self.pieces[at].strip()!r}" for at in shown[:MOST_TOKENS])
        more = ", ..." if len(shown) > MOST_TOKENS else ""
        raise UserError(
            f"--query {named}: the text has {n} tokens, 0 to {n - 1}: take the number of one: "
            f"{tokens}{more}"
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """How a run was made, and which files it has.

    Entries of a kind of run that has none of them (None, or empty) are not written.

    Attributes:
        kind: the command.
        command: the command line, as one would type it, or the call from Python, with each setting
            that is not the default.
        settings: what identifies the run: the command's settings, and checksums of what a call
            from Python `given`.
        model: the model; None for a run without one.
        versions: of Python and the libraries.
        threads, device, dtype: on which the last bits of numbers depend.
        finished, seconds: the end of the run, and how long the process took that finished it; 0
            of a comparison, which runs no model.
        sources: the hash of each file of the model and of the data.
        data: where the sequences come from.
        documents: how many documents they come from; None if each is drawn by itself.
        distinct_sequences: how many are different.
        fold_sizes: sequences per fold; a text alone is one.
        skip_keys: how many keys count as first.
        query_stride: between queries whose keys are ranked.
        layers: the numbers of the layers that have maps.
        removed: the removed components or, of `ablate`, the conditions without weights.
        text: the text that is shown.
        results: further entries, the command's.
        checksums: of the run's files, by name.
    """

    kind: str = ""
    command: str = ""
    settings: JsonObject = field(default_factory=dict)
    model: RunModel | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    device: str = ""
    dtype: str = ""
    finished: str = ""
    seconds: float = 0.0
    sources: Mapping[str, FileRecord | None] | None = None
    data: RunData = RunData()
    documents: int | None = None
    distinct_sequences: int = 0
    fold_sizes: tuple[int, ...] = ()
    skip_keys: int = 0
    query_stride: int = 0
    layers: tuple[int, ...] = ()
    removed: tuple[str, ...] | None = None
    text: ShownText | None = None
    results: JsonObject = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The name of the model, empty without one; of a model in a local folder, the folder's."""
        name = "" if self.model is None else self.model.name
        return Path(name).name if Path(name).is_absolute() else name

    @property
    def seq_len(self) -> int:
        """The length of its sequences, in tokens; 0 without sequences, and of a text alone."""
        return 0 if self.fold_sizes == (1,) else self.settings.get("seq_len", 0)

    def to_json(self) -> JsonObject:
        """Return the entries of manifest.json."""
        defaults = asdict(type(self)())
        # None and 0 say something of sequences.
        kept = ("documents", "skip_keys") if self.fold_sizes else ()
        entries = {
            name: value
            for name, value in asdict(self).items()
            if value != defaults[name] or name in kept
        }
        return entries | entries.pop("results", {})

    @classmethod
    def of_json(cls, entries: JsonObject) -> Manifest:
        """Return the manifest that has these entries."""
        known = {entry.name for entry in fields(cls)}
        results = {k: v for k, v in entries.items() if k not in known and k not in OF_FILE}
        return record_of(cls, {**entries, "results": results})


def what_differs(
    manifests: Sequence[Manifest], names: Sequence[str], taken: Collection[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """Return what differs among runs: their settings, or their names where nothing else does.

    The step of a checkpoint, in a revision or in the name of a folder, is a setting of its own. The
    axis is the setting with the most values; a number with more than two comes first, if there are
    two runs or more on a line.

    Args:
        manifests: the runs'.
        names: those of their folders.
        taken: names that settings must not have, next to which they stand in a table.

    Returns:
        A row for each run, under its name, and a column for each setting that differs: the axis,
        then as many as tell runs at one place of it from each other, then the others. With it, the
        columns of the second kind.
    """
    table = _settings_of(manifests, names)
    table = table.rename(columns=lambda name: f"{name} of run" if name in taken else name)
    settings = sorted(map(str, table), key=lambda name: name in PRECISION)

    def count(names: Sequence[str]) -> int:
        return len(table[[*names]].drop_duplicates()) if names else 1

    lines_along = {axis: [axis] for axis in settings}
    for along, name in product(lines_along.values(), settings):
        along += [name] if count([*along, name]) > count(along) else []

    def rank(axis: str) -> tuple[bool, int]:
        n_places, n_lines = count([axis]), count(lines_along[axis][1:])
        is_number = table[axis].dtype.kind in "if" and n_places > 2
        return is_number and 2 * n_lines <= len(table), n_places

    axis, *lines = lines_along[max(settings, key=rank)]
    table = table[[*dict.fromkeys([axis, *lines, *settings])]]
    rows = table[[axis, *lines]].to_dict("records")
    named = ([x if isinstance(x, str) else f"{of} {x}" for of, x in row.items()] for row in rows)
    return table.set_axis([*map(", ".join, named)]), lines


def _settings_of(manifests: Sequence[Manifest], names: Sequence[str]) -> pd.DataFrame:
    """Return the settings that differ among runs, in a row for each, or the names."""
    import pandas as pd

    table = pd.DataFrame([{"seed": None} | of.settings for of in manifests], dtype=object)
    models = [of.model.name if of.model else of.settings.get("model", "") for of in manifests]
    table = table.assign(model=models, seed="seed " + table["seed"].astype(str), given=None)
    table = table.map(lambda x: " ".join(map(str, x)) if isinstance(x, list) else x)
    table = table.where(table.notna(), "default")
    if table.duplicated().any():
        table["run"] = names
    for name in table.columns.intersection(["revision", "model", "run"]):
        steps = table[name].str.extract(STEP)[0]
        if steps.notna().all() and steps.nunique() > 1:
            table[name] = table[name].str.replace(STEP, "", regex=True)
            table["step"] = steps.astype(int)
    for name in table.columns.intersection(["model", "data"]):
        last = table[name].map(lambda path: Path(path).name)
        table[name] = last if last.nunique() == table[name].nunique() else table[name]
    return table.loc[:, table.nunique() > 1].infer_objects()


def record_of(kind: type[Record], entries: JsonObject) -> Record:
    """Return the record that has these entries, as JSON holds them; others are left out."""
    record: type = kind
    return _adapter_of(record).validate_python(entries)


_adapter_of = cache(TypeAdapter)  # which takes longer to make than to use


def read_manifest(out: Path) -> Manifest:
    """Read a run's manifest, and check that it is as the run wrote it.

    Raises:
        UserError: if no manifest can be read, it was changed, or the run has another format.
    """
    try:
        manifest = read_json(out / "manifest.json")
        rest = {name: value for name, value in manifest.items() if name != "checksum"}
    except (FileNotFoundError, NotADirectoryError) as error:
        unfinished = f"the run in {out} is not finished; run its command again"
        no_run = (
            f"{out} holds no run: it has no manifest.json. Name the folder of a run, such as "
            "python -m nope_probe.ablate --model rope-tiny --out runs/rope-tiny makes"
        )
        raise UserError(unfinished if checkpoint_dir(out).is_dir() else no_run) from error
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{out} holds no run: its manifest cannot be read; remove {out} and run again"
        ) from error
    if manifest.get("checksum") != json_checksum(rest):
        raise not_as_written(out, "manifest.json")
    if manifest.get("format") != FORMAT:
        of = f"format {manifest['format']}" if "format" in manifest else "an earlier format"
        raise UserError(
            f"{out} holds a run of {of}, and this version of nope_probe reads format {FORMAT}: "
            "numbers of the same name may mean other things; remove it and run its command again"
        )
    return Manifest.of_json(manifest)


def not_as_written(out: Path, name: str) -> UserError:
    """Return the error for a file of a run that is not as the run wrote it."""
    return UserError(f"{out / name} is not the file that the run wrote; remove {out} and run again")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that the numbers depend on."""
    return {"python": python_version(), **{name: version(name) for name in LIBRARIES}}
