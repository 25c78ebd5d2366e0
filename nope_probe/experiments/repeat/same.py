"""Whether two runs came out the same: byte for byte, or up to the order of summation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.runtime.folder import read_manifest, read_table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

TOLERANCE = 1e-6
# The page holds the command, the time and the duration, which differ.
NOT_COMPARED = ("report.html",)


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
