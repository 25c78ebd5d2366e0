"""Repeat a finished run from its manifest, and say whether it came out the same.

Runs are the same byte for byte, or up to the order of summation. A file of `layers --json` holds
findings and settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from nope_probe.errors import UserError
from nope_probe.experiments.layers import run as layers_run
from nope_probe.experiments.layers.run import as_json
from nope_probe.experiments.methods import methods_paragraph
from nope_probe.experiments.paper.settings import RepeatSettings as Settings
from nope_probe.files import read_json, validate_regular
from nope_probe.runtime.finished import validate_repeatable
from nope_probe.runtime.folder import read_manifest, read_table, validate_files
from nope_probe.runtime.settings import FORMAT, settings_from

# The experiment of a manifest's `kind`.
MODULES = {
    "ablate": "ablation",
    "attention": "attention",
    "scores": "scores",
    "circuit": "circuit",
    "behaviour": "behaviour",
    "trace": "trace",
    "simulate": "simulation",
}
TOLERANCE = 1e-6
# The page holds the command, the time and the duration, which differ.
NOT_COMPARED = ("report.html",)


def methods_of(settings: Settings) -> str:
    """Return the methods paragraph of a finished run; see `methods_paragraph`.

    Raises:
        UserError: for a path that is no run's folder, or a run without a paragraph.
    """
    if settings.out is not None:
        raise UserError("--out has no effect with --methods: no run is repeated")
    validate_regular(settings.run)
    if settings.run.is_file():
        raise UserError(f"--methods describes the folder of a run, and {settings.run} is a file")
    return methods_paragraph(read_manifest(settings.run))


def run(settings: Settings) -> Comparison:
    """Repeat a run, and return the comparison.

    Raises:
        UserError: for a folder without a run, or a run whose model or data changed or is missing.
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
    if "given" in manifest["settings"]:
        raise UserError(
            f"{settings.run} was made in Python, from a model or inputs in memory: it cannot be "
            "repeated from its manifest"
        )
    experiment: Any = import_module(f"nope_probe.experiments.{MODULES[kind]}.run")
    recorded = restored(experiment.Settings, settings.run, manifest["settings"])
    validate_repeatable(settings.run, manifest.get("sources"), recorded.sources())
    if "threads" in manifest:  # then sums are in the run's order
        torch.set_num_threads(manifest["threads"])
    with TemporaryDirectory() as temporary:
        out = settings.out or Path(temporary, "run")
        return compare_runs(settings.run, experiment.run(replace(recorded, out=out)))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two runs.

    Attributes:
        name: the run that was repeated.
        identical: whether every file has the same bytes.
        differences: of each array, relative to its largest number, by file and array.
        missing: files and arrays that one of the two runs lacks, or that have other shapes.
        changed: what may explain a difference, such as `torch 2.6 then, 2.7 now`.
    """

    name: str
    identical: bool
    differences: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The file and the array with the largest difference."""
        return max(self.differences, key=lambda name: self.differences[name], default="")

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(self.differences.values(), default=0.0)

    @property
    def same(self) -> bool:
        """Whether the runs are the same up to the order of summation."""
        return self.identical or (not self.missing and self.largest <= TOLERANCE)

    def __str__(self) -> str:
        """Return the comparison in one line."""
        if self.identical:
            return f"{self.name}: the same, byte for byte"
        if self.missing:
            difference = f"not the same: {', '.join(self.missing[:3])} in one of the two runs alone"
        else:
            difference = (
                f"{'the same' if self.same else 'not the same'}: the largest difference is "
                f"{self.largest:.2g} of an array's largest number, in {self.where} (at most "
                f"{TOLERANCE:g} is summation order)"
            )
        changed = f"; {', '.join(self.changed)}" if self.changed else ""
        return f"{self.name}: {difference}{changed}"


def restored(kind: type[Any], folder: Path, recorded: Mapping[str, Any]) -> Any:
    """Return the settings that a manifest records.

    Args:
        kind: the class of the command's settings.
        folder: the run's folder.
        recorded: those of the manifest.

    Raises:
        UserError: if an older or newer version wrote them.
    """
    values = {name: value for name, value in recorded.items() if name != "format"}
    known = {setting.name for setting in fields(kind)}
    if recorded.get("format", FORMAT) != FORMAT or not set(values) <= known:
        raise UserError(
            f"{folder} holds a run of another version of nope_probe, which means other numbers by "
            "its settings: it cannot be repeated with this one"
        )
    return settings_from(kind, values)


def compare_runs(before: Path, again: Path) -> Comparison:
    """Compare the arrays and tables of two finished runs of the same settings."""
    manifests = read_manifest(before), read_manifest(again)
    first, second = (
        {name: value for name, value in manifest["checksums"].items() if name not in NOT_COMPARED}
        for manifest in manifests
    )
    if first == second:
        return Comparison(name=str(before), identical=True)
    arrays = arrays_of(before, first), arrays_of(again, second)
    return compare(str(before), *arrays, changed=changes(*manifests))


def arrays_of(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return a run's arrays by file and name, and of each table the columns, rows and texts.

    A table's numbers are left out: ranks and quotients of the arrays' numbers can show the last
    digits of a sum.

    Args:
        folder: of the run.
        names: the files.
    """
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        if name.endswith(".safetensors"):
            tensors = load_file(folder / name)
            arrays |= {f"{name} {key}": array for key, array in tensors.items()}
        elif name.endswith(".csv"):
            table = read_table(folder / name)
            texts = table.select_dtypes(exclude="number").fillna("").to_numpy().ravel()
            arrays[f"rows of {name}"] = np.array([*table.columns, len(table), *texts], dtype=str)
    return arrays


def compare(
    name: str,
    before: Mapping[str, np.ndarray],
    again: Mapping[str, np.ndarray],
    *,
    changed: tuple[str, ...],
    floor: float = 0.0,
) -> Comparison:
    """Compare the arrays of two runs by name; see `Comparison` and `relative_difference`."""
    shared = [key for key in before if key in again and before[key].shape == again[key].shape]
    return Comparison(
        name=name,
        identical=False,
        differences={key: relative_difference(before[key], again[key], floor) for key in shared},
        missing=tuple(sorted({*before, *again} - {*shared})),
        changed=changed,
    )


def relative_difference(first: np.ndarray, second: np.ndarray, floor: float = 0.0) -> float:
    """Return the largest difference of two arrays, relative to the largest number of the first.

    The difference is infinite unless non-finite cells are the same in both.

    Args:
        first: an array.
        second: an array of its shape.
        floor: the least value to count as the first's largest number.
    """
    both_float = first.dtype.kind == second.dtype.kind == "f"
    if np.array_equal(first, second, equal_nan=both_float):
        return 0.0
    if not both_float or not np.array_equal(np.isfinite(first), np.isfinite(second)):
        return float("inf")
    a, b = (array[np.isfinite(first)].astype(np.float64) for array in (first, second))
    largest = max(float(np.abs(a).max(initial=0)), floor)
    return float(np.abs(a - b).max(initial=0)) / largest if largest else float("inf")


def changes(before: Mapping[str, Any], again: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the versions and settings of the machine that differ in two manifests."""
    machine = ("threads", "device")
    then, now = (
        {**manifest.get("versions", {}), **{name: manifest.get(name) for name in machine}}
        for manifest in (before, again)
    )
    changed = [name for name in now if then.get(name) != now[name]]
    return tuple(f"{name} {then.get(name)} then, {now[name]} now" for name in changed)


def repeat_layers(file: Path) -> Comparison:
    """Repeat the run that a file of `layers --json` holds, and return the comparison.

    Raises:
        UserError: for a file that holds something else, or a model that changed or is not there.
    """
    try:
        before = read_json(file)
        values, recorded = before["run"]["settings"], before["run"]["sources"]
        settings = settings_from(layers_run.Settings, {**values, "json": True})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is no file of layers --json, and no run's folder") from error
    validate_repeatable(file, recorded, settings.sources())
    again = json.loads(as_json(layers_run.run(settings), settings))
    return compare_reports(file, before, again)


def compare_reports(file: Path, before: dict[str, Any], again: dict[str, Any]) -> Comparison:
    """Compare the findings of two reports of `layers --json`."""
    first, second = (report | {"run": None} for report in (before, again))
    if first == second:
        return Comparison(name=str(file), identical=True)
    changed = changes(before["run"], again["run"])
    # Errors and residues near 0 are the last digits of sums.
    floor = 1000 * TOLERANCE
    leaves = dict(_leaves(first)), dict(_leaves(second))
    return compare(str(file), *leaves, changed=changed, floor=floor)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield every value in nested JSON by its path, such as `layers.0.rope_change`."""
    if not isinstance(value, (dict, list)):
        yield name, np.asarray(value)
        return
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inside, f"{name}.{key}" if name else str(key))
