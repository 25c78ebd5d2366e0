"""A run on disk: its arrays, tables and page, and a manifest with their checksums.

A run appears whole or not at all: it is written into a hidden folder next to it and renamed,
the manifest last. A finished run is shown again only where its files are as they were, and those of
its model and its data. None of it needs torch or TransformerLens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Int
from safetensors.numpy import load_file, save_file

from nope_probe.analyses.verdicts import answer_table, answers
from nope_probe.errors import UserError
from nope_probe.files import (
    JsonObject,
    file_checksum,
    json_checksum,
    local_path,
    read_json,
    remove,
    writing,
)
from nope_probe.run.manifest import FileRecord, Manifest, not_as_written, read_manifest
from nope_probe.run.processes import checkpoint_dir, print_line, validate_folder_place
from nope_probe.run.settings import FORMAT

PAGE = "report.html"
NO_BOUND = "(?<!_low)(?<!_high)$"  # of the names of columns without the ends of intervals
REPLICATES = " replicates"  # ends the columns whose cells are the replicates of an estimate
READ = ("estimates.safetensors", "maps.safetensors", "tokens.safetensors")  # with a run
# Size and time of change identify files of as many bytes, and their hash smaller files.
LARGE = 1 << 30
_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_UNREAD = ("generation_config.json", "run.json")
# Who wrote a model's configuration, and where from, does not change its numbers.
UNUSED_IN_FILE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished run.

    Attributes:
        manifest: command, settings, versions, and checksums of the files.
        arrays: per .safetensors file, without its ending, the named arrays (`maps`, `tokens`).
        tables: per .csv file, without its ending, the table.
        page: the report, as HTML.
        files: files that are moved into the run's folder under these names.
        headline: the sentence and the first table, as HTML; of runs from Python.
    """

    manifest: Manifest = field(default_factory=Manifest)
    arrays: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    page: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)
    headline: str = ""

    def __post_init__(self) -> None:
        """Take the columns of replicates out of the tables, and into the arrays `estimates`."""
        tables, estimates = dict[str, pd.DataFrame](), dict(self.arrays.get("estimates", {}))
        for name, table in self.tables.items():
            tables[name] = without_replicates(table)
            if len(tables[name].columns) < len(table.columns):
                estimates |= _replicates(name, table.drop(columns=tables[name].columns))
        if estimates:
            object.__setattr__(self, "tables", tables)
            object.__setattr__(self, "arrays", {**self.arrays, "estimates": estimates})

    def __repr__(self) -> str:
        """Return the names of the tables that have rows, and the number of maps, in one line."""
        tables = ", ".join(name for name, table in self.tables.items() if len(table))
        maps = [array for array in self.maps.values() if array.ndim > 1]
        of_maps = f"; {len(maps)} maps ({_shape_of(maps)})" if maps else ""
        of = self.manifest.model_name or self.manifest.kind
        return f"{type(self).__name__} of {of}: tables: {tables}{of_maps}"

    def _repr_html_(self) -> str:
        """Return what was run, its answer, and what it holds: its tables and groups of maps."""
        rows = []
        for name, table in self.tables.items():
            if len(table):
                columns = ", ".join(map(str, table.filter(regex=NO_BOUND)))
                rows.append((f"tables[{name!r}]", f"{len(table):,} rows", columns))
        groups: dict[str, dict[str, np.ndarray]] = {}
        for name, array in self.maps.items():
            group, slash, of_group = name.partition("/")
            groups.setdefault(group + slash, {})[of_group] = array
        for group, maps in groups.items():
            named = ", ".join(filter(None, maps))
            rows.append((f"maps[{group + '...'!r}]", _shape_of(maps.values()), named))
        contents = pd.DataFrame(rows, columns=["what", "size", "holds"])
        asked = f"<p><code>{escape(self.manifest.command)}</code></p>"
        return asked + self.headline + contents.to_html(index=False, border=0)

    @property
    def answer(self) -> pd.DataFrame:
        """What makes and what carries each number; see `answer_table`.

        Raises:
            UserError: for a run that removes no sources.
        """
        results = self.manifest.results
        if "positional_sources" not in results or "over_layers" not in self.tables:
            raise UserError("only a run of ablate that removes the sources has an answer")
        sources = results["positional_sources"]
        return answer_table(answers(self.tables["pattern"], results["conditions"], sources))

    @property
    def maps(self) -> Mapping[str, np.ndarray]:
        """The arrays of maps.safetensors; empty without such a file."""
        return self.arrays.get("maps", {})

    @property
    def query_positions(self) -> Int[np.ndarray, " row"] | None:
        """The queries of the maps' rows; None where maps have all rows."""
        queries = self.maps.get("query_positions")
        return None if queries is None else queries.astype("int64")


def without_replicates(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table without its columns of replicates, which are cells of Python objects."""
    return table.filter(regex=f"(?<!{REPLICATES})$")


def _replicates(name: str, table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return a table's replicates by `table/column`, [row, 1 + fold], and the folds' weights.

    The weights by `weights/table` are [fold], or [row, fold] if rows have their numbers from
    different sequences, as those of text and of random tokens. Folds that a row lacks weigh 0. A
    column of other sequences than those before it has its weights by `weights/table/column`.

    Args:
        name: the table's.
        table: its columns of replicates; a cell without any is None or NaN.
    """
    cells = table.to_numpy(object)
    n_folds = max((len(getattr(cell, "weights", ())) for cell in cells.flat), default=0)
    arrays, shared = dict[str, np.ndarray](), np.zeros((len(table), n_folds))
    for column, of_rows in zip(table.columns.str.removesuffix(REPLICATES), cells.T, strict=True):
        values, weights = np.full((len(table), 1 + n_folds), np.nan), np.zeros_like(shared)
        for row, cell in enumerate(of_rows):
            if hasattr(cell, "weights"):
                values[row, : len(cell.values)] = cell.values
                weights[row, : len(cell.weights)] = cell.weights
        both = weights.any(1) & shared.any(1)
        if np.array_equal(weights[both], shared[both]):
            shared = np.where(weights.any(1, keepdims=True), weights, shared)
        else:
            arrays[f"weights/{name}/{column}"] = weights
        arrays[f"{name}/{column}"] = values
    rows = np.unique(shared[shared.any(axis=1)], axis=0)
    return arrays | {f"weights/{name}": rows[0] if len(rows) == 1 else shared}


def _shape_of(maps: Iterable[np.ndarray]) -> str:
    """Return the shape of the largest of some arrays."""
    return " × ".join(map(str, max(maps, key=np.ndim).shape))


def write_run(out: Path, run: Run) -> None:
    """Write a run into a folder that does not exist yet, or is empty.

    The process holds the run's unfinished folder, if others may write the run too. Remains of a
    killed process are removed.

    Raises:
        StorageError: if the folder holds something, or cannot be written to.
    """
    partial = checkpoint_dir(out) / "run"
    remove(partial)
    try:
        with writing(f"the run to {out}"):
            partial.mkdir(parents=True)
            _write_files(partial, run)
            if out.is_dir():
                out.rmdir()
            partial.rename(out)
    finally:
        remove(partial)


def _write_files(folder: Path, run: Run) -> None:
    for name, arrays in run.arrays.items():
        contiguous = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        save_file(contiguous, folder / f"{name}.safetensors")
    for name, table in run.tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.8g")
    (folder / PAGE).write_text(run.page, encoding="utf-8")
    for name, path in run.files.items():
        shutil.move(path, folder / name)
    for path in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
        shutil.copymode(folder / PAGE, path)
    checksums = {path.name: file_checksum(path) for path in sorted(folder.iterdir())}
    about = replace(run.manifest, checksums=checksums).to_json()
    manifest = json.loads(json.dumps({**about, "format": FORMAT, "complete": True}))
    manifest["checksum"] = json_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def validate_files(out: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Check files of a run, by default all, against the checksums in its manifest.

    Raises:
        UserError: naming a file that differs.
    """
    for name in manifest.checksums if names is None else names:
        checksum = manifest.checksums[name]
        if not (out / name).is_file() or file_checksum(out / name) != checksum:
            raise not_as_written(out, name)


def read_run(folder: Path | str, arrays: Collection[str] = READ) -> Run:
    """Read a finished run of any command: its tables and maps, without the model.

    The page and the fold maps stay on disk.

    Args:
        folder: the run's folder.
        arrays: the files of arrays to read; with fewer than all, no other is checked either.

    Raises:
        UserError: if it is incomplete or a file is not the one that the manifest names.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> import pandas as pd
        >>> from nope_probe import read_run
        >>> from nope_probe.run.folder import Run, write_run
        >>> run = Run(
        ...     arrays={"maps": {"score": np.zeros((1, 5, 5))}},
        ...     tables={"pattern": pd.DataFrame({"layer": [0], "amplitude": [0.5]})},
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     write_run(Path(folder, "run"), run)
        ...     saved = read_run(Path(folder, "run"))
        >>> saved.tables["pattern"]["amplitude"].item(), saved.maps["score"].shape
        (0.5, (1, 5, 5))
    """
    out = local_path(folder)
    manifest = read_manifest(out)
    names = sorted(manifest.checksums)
    read = [name for name in names if name in arrays or name.endswith(".csv")]
    validate_files(out, manifest, names if arrays == READ else read)
    files = [out / name for name in read]
    return Run(
        manifest=manifest,
        arrays={file.stem: load_file(file) for file in files if file.suffix != ".csv"},
        tables={file.stem: read_table(file) for file in files if file.suffix == ".csv"},
    )


def read_table(path: Path) -> pd.DataFrame:
    """Read a run's table; a table without columns is empty."""
    if path.stat().st_size <= 1:
        return pd.DataFrame()
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


def is_finished(folder: Path, recorded: JsonObject, sources: Mapping[str, Path | None]) -> bool:
    """Return whether a folder holds the finished run of some settings, and say so.

    What a killed process left of the run is removed.

    Args:
        folder: the run's.
        recorded: what identifies the run, as its manifest holds it.
        sources: where the files of its model and data are now.

    Raises:
        UserError: for a folder that holds something else or cannot be made, and for a file of the
            run, or of its model and data, that changed since.
    """
    if not os.path.isfile(folder / "manifest.json"):
        if os.path.isdir(folder) and os.listdir(folder):
            raise UserError(f"{folder} holds other files; choose another --out")
        validate_folder_place(folder)
        return False
    manifest = read_manifest(folder)
    if json_checksum(manifest.settings) != json_checksum(recorded):
        raise UserError(f"{folder} holds a run with other settings; choose another --out")
    validate_files(folder, manifest)
    validate_unchanged(folder, manifest.sources or {}, sources)
    # A process may have been killed after it wrote the run and before it cleaned up.
    remove(checkpoint_dir(folder))
    duration = f", in {manifest.seconds:.0f} s" if manifest.seconds else ""
    print_line(f"finished before{duration}: shown again from {folder}")
    return True


def record_sources(sources: Mapping[str, Path | None]) -> dict[str, FileRecord | None]:
    """Return the hashes of the files of each source; None for a source without files here.

    Raises:
        UserError: for a file that cannot be read.
    """
    return {name: None if path is None else _record(path) for name, path in sources.items()}


def _record(path: Path) -> FileRecord:
    """Return the hashes of a source's files; of files of a gigabyte or more, size and time."""
    record = FileRecord()
    try:
        for file in _source_files(path):
            name, stat = os.path.relpath(file, path if path.is_dir() else path.parent), file.stat()
            if stat.st_size >= LARGE:
                record[name] = {"size": stat.st_size, "modified": stat.st_mtime_ns}
            else:
                record[name] = {"sha256": _source_checksum(file)}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return record


def _source_files(path: Path) -> list[Path]:
    """Return the files at a path: the file itself, a model's, or all in a folder."""
    if path.is_file():
        return [path]
    if (path / "config.json").is_file():
        files = [file for pattern in _MODEL_FILES for file in path.glob(pattern)]
        return sorted(file for file in files if file.name not in _UNREAD)
    return sorted(file for file in path.rglob("*") if file.is_file())


def _source_checksum(path: Path) -> str:
    """Return the checksum of a file; of a configuration, only settings that change numbers."""
    if path.name == "config.json":
        with suppress(ValueError, AttributeError):  # loading the model says what is wrong with it
            config = read_json(path)
            return json_checksum({k: v for k, v in config.items() if k not in UNUSED_IN_FILE})
    return file_checksum(path)


def validate_unchanged(
    run: Path, recorded: Mapping[str, FileRecord | None], sources: Mapping[str, Path | None]
) -> None:
    """Check that a finished run's sources are unchanged, where their files are here.

    Args:
        run: the run's folder or file.
        recorded: its manifest's record.
        sources: where the sources are now.

    Raises:
        UserError: naming a file that differs.
    """
    for name, now in record_sources(sources).items():
        before = recorded.get(name)
        if now is not None and before is not None and before != now:
            file = min(file for file in {*before, *now} if before.get(file) != now.get(file))
            raise UserError(
                f"the {name} has changed since the run in {run}: {sources[name]} ({file}); "
                "choose another --out"
            )
