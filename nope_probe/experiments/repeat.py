"""Repeat a finished run from its manifest, and say whether it came out the same.

The same is byte for byte, or up to the order of summation. Of `layers --json` one file holds the
findings and the settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from nope_probe.errors import UserError
from nope_probe.experiments.layers import run as layers_run
from nope_probe.experiments.layers.run import as_json
from nope_probe.files import read_json, validate_regular
from nope_probe.runtime.folder import read_manifest, read_table, validate_files
from nope_probe.runtime.identity import validate_repeatable
from nope_probe.runtime.settings import FORMAT, BoundedSettings

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_arg = tyro.conf.arg
# Which experiment a manifest's `kind` is.
MODULES = {
    "ablate": "ablation",
    "scores": "scores",
    "circuit": "circuit",
    "behaviour": "behaviour",
    "simulate": "simulation",
}
TOLERANCE = 1e-6
# The page holds the command, the time and the duration, which differ.
NOT_COMPARED = ("report.html",)


@dataclass(frozen=True, kw_only=True)
class Settings(BoundedSettings):
    """Repeat a finished run from its manifest, and say whether it came out the same.

    The same command is run with the same settings, and its files are compared: byte for byte where
    Python, libraries and the number of threads are the same, else to 1e-6 of each array's largest
    number. The exit code is 1 if they differ.
    """

    run: Annotated[
        tyro.conf.Positional[Path],
        _arg(help="The folder of a run, or the file that holds what `layers --json` printed."),
    ]
    out: Annotated[
        Path | None, _arg(help="Keep the repetition in this folder [a temporary one].")
    ] = None


def run(settings: Settings) -> Comparison:
    """Repeat a run, and return how the two compare.

    Raises:
        UserError: for a folder without a run, or one whose model or data changed or is not there.
    """
    validate_regular(settings.run)
    if settings.run.is_file():
        if settings.out is not None:
            raise UserError("--out is for runs with a folder, and layers has none")
        return repeat_layers(settings.run)
    manifest = read_manifest(settings.run)
    validate_files(settings.run, manifest)
    kind = manifest.get("kind")
    if kind not in MODULES:
        raise UserError(
            f"{settings.run} is a run of {kind}, which is not repeated: expected one of "
            f"{', '.join(MODULES)}, or what layers --json printed"
        )
    experiment: Any = import_module(f"nope_probe.experiments.{MODULES[kind]}.run")
    recorded = restored(experiment.Settings, settings.run, manifest["settings"])
    validate_repeatable(settings.run, manifest.get("sources"), recorded.sources())
    with ExitStack() as stack:
        out = settings.out or Path(stack.enter_context(TemporaryDirectory()), "run")
        set_threads(manifest.get("threads"))
        again = experiment.run(replace(recorded, out=out))
        return compare_runs(settings.run, again)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two runs compare.

    Attributes:
        name: the run that was repeated.
        identical: whether every file has the same bytes.
        largest: the largest difference of an array, relative to the array's largest number.
        where: the file and the array that it is in.
        missing: files and arrays that one of the two runs lacks, or that have other shapes.
        changed: what may explain a difference, such as `torch 2.6 then, 2.7 now`.
    """

    name: str
    identical: bool
    largest: float = 0.0
    where: str = ""
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether the runs are the same up to the order of summation."""
        return self.identical or (not self.missing and self.largest <= TOLERANCE)

    def __str__(self) -> str:
        """Return the comparison in one line."""
        if self.identical:
            return f"{self.name}: the same, byte for byte"
        if self.missing:
            found = f"not the same: {', '.join(self.missing[:3])} in one of the two runs alone"
        else:
            found = (
                f"{'the same' if self.same else 'not the same'}: the largest difference is "
                f"{self.largest:.2g} of an array's largest number, in {self.where} (at most "
                f"{TOLERANCE:g} is summation order)"
            )
        changed = f"; {', '.join(self.changed)}" if self.changed else ""
        return f"{self.name}: {found}{changed}"


def restored(kind: type[Any], folder: Path, recorded: Mapping[str, Any]) -> Any:
    """Return the settings that a manifest records.

    Args:
        kind: the class of the command's settings.
        folder: the run's folder.
        recorded: what the manifest holds.

    Raises:
        UserError: if an older or newer version wrote them.
    """
    values = {name: _value(value) for name, value in recorded.items() if name != "format"}
    known = get_type_hints(kind)
    if recorded.get("format", FORMAT) != FORMAT or not set(values) <= set(known):
        raise UserError(
            f"{folder} holds a run of another version of nope_probe, which means other numbers by "
            "its settings: it cannot be repeated with this one"
        )
    for name, value in values.items():
        if not _is_of(value, known[name]):
            raise UserError(f"{folder} cannot be repeated: its manifest has {value!r} as {name}")
    return kind(**values)


def _value(value: Any) -> Any:
    """Return a value from JSON as the settings hold it."""
    return tuple(value) if isinstance(value, list) else value


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON is of a setting's type."""
    of, inner = get_origin(hint), get_args(hint)
    if of is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if of is tuple:
        return isinstance(value, tuple) and all(_is_of(each, inner[0]) for each in value)
    if inner:  # a union
        return any(_is_of(value, each) for each in inner)
    return type(value) is hint or (hint is float and type(value) is int)


def set_threads(count: int | None) -> None:
    """Compute with so many threads, as the run did: sums are in the same order then."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def compare_runs(before: Path, again: Path) -> Comparison:
    """Compare the arrays and tables of two finished runs of the same settings.

    Arrays decide: a table holds ranks and quotients of theirs, in which the last digits of a sum
    can show. Its rows and columns have to be the same.
    """
    first, second = read_manifest(before), read_manifest(again)
    sums = [
        {name: value for name, value in each["checksums"].items() if name not in NOT_COMPARED}
        for each in (first, second)
    ]
    if sums[0] == sums[1]:
        return Comparison(name=str(before), identical=True)
    differences, missing = dict[str, float](), sorted({*sums[0]} ^ {*sums[1]})
    for name in sorted({*sums[0]} & {*sums[1]}):
        if name.endswith(".safetensors"):
            pair = _arrays(before / name), _arrays(again / name)
            missing += [f"{name} {key}" for key in sorted(_unlike(*pair))]
            differences |= {
                f"{name} {key}": relative_difference(pair[0][key], pair[1][key])
                for key in {*pair[0]} & {*pair[1]} - _unlike(*pair)
            }
        elif name.endswith(".csv") and not same_rows(
            read_table(before / name), read_table(again / name)
        ):
            missing.append(f"rows of {name}")
    where = max(differences, key=lambda key: differences[key], default="")
    return Comparison(
        name=str(before),
        identical=False,
        largest=differences.get(where, 0.0),
        where=where,
        missing=tuple(missing),
        changed=tuple(changes(first, second)),
    )


def relative_difference(first: np.ndarray, second: np.ndarray) -> float:
    """Return the largest difference of two arrays, relative to the largest number of the first.

    Cells that are not finite have to be the same ones, else the difference is infinite.
    """
    import numpy as np

    if np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
        return 0.0
    if first.dtype.kind != "f":
        return float("inf")
    a, b = first.astype(np.float64), second.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    largest = float(np.abs(a[finite]).max(initial=0))
    return (
        float(np.abs(a[finite] - b[finite]).max(initial=0)) / largest if largest else float("inf")
    )


def changes(before: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """Return which versions and settings of the machine two manifests differ in."""
    records = [
        {**each.get("versions", {}), "threads": each.get("threads"), "device": each.get("device")}
        for each in (before, again)
    ]
    return [
        f"{name} {records[0].get(name)} then, {records[1].get(name)} now"
        for name in records[1]
        if records[0].get(name) != records[1].get(name)
    ]


def same_rows(first: pd.DataFrame, second: pd.DataFrame) -> bool:
    """Return whether two tables have the same columns, rows and texts, whatever their numbers."""
    if list(first.columns) != list(second.columns) or len(first) != len(second):
        return False
    texts = [
        table.select_dtypes(exclude="number").fillna("").reset_index(drop=True)
        for table in (first, second)
    ]
    return bool(texts[0].equals(texts[1]))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path)


def _unlike(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names that one of two files lacks, or that have other shapes in it."""
    shared = {*first} & {*second}
    return ({*first} ^ {*second}) | {n for n in shared if first[n].shape != second[n].shape}


def repeat_layers(file: Path) -> Comparison:
    """Repeat the run that a file of `layers --json` holds, and return how the two compare.

    Raises:
        UserError: for a file that holds something else, or a model that changed or is not there.
    """
    before = read_report(file)
    try:
        values = before["run"]["settings"]
        settings = layers_run.Settings(
            **{**values, "expect": tuple(values["expect"]), "json": True}
        )
        recorded = before["run"]["sources"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{file} holds no settings of layers; print it again with --json"
        ) from error
    validate_repeatable(file, recorded, settings.sources())
    again = json.loads(as_json(layers_run.run(settings), settings))
    return compare_reports(file, before, again)


def read_report(file: Path) -> dict[str, Any]:
    """Read what `layers --json` printed.

    Raises:
        UserError: for anything else.
    """
    try:
        report = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no file of layers --json, and no run's folder") from error
    if not isinstance(report, dict):
        raise UserError(f"{file} is no file of layers --json, and no run's folder")
    return report


def compare_reports(file: Path, before: dict[str, Any], again: dict[str, Any]) -> Comparison:
    """Compare the findings of two reports."""
    found = [dict(_leaves(each | {"run": None})) for each in (before, again)]
    missing = sorted({*found[0]} ^ {*found[1]})
    shared = {name: (found[0][name], found[1][name]) for name in found[0] if name in found[1]}
    differences = {name: _difference(*pair) for name, pair in shared.items()}
    where = max(differences, key=lambda name: differences[name], default="")
    return Comparison(
        name=str(file),
        identical=found[0] == found[1],
        largest=differences.get(where, 0.0),
        where=where,
        missing=tuple(missing),
        changed=tuple(changes(before["run"], again["run"])),
    )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return every value in nested JSON by its path, such as `layers.0.rope_change`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inside:
        path = f"{name}.{key}" if name else str(key)
        if isinstance(each, (dict, list)):
            yield from _leaves(each, path)
        else:
            yield path, each


def _difference(first: Any, second: Any) -> float:
    """Return the relative difference of two numbers; of other values 0 or infinity."""
    if first == second:
        return 0.0
    if isinstance(first, float) and isinstance(second, float):
        # Errors and residues near 0 are sums' last digits.
        return abs(first - second) / max(abs(first), abs(second), 1000 * TOLERANCE)
    return float("inf")
