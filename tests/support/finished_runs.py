"""Runs of commands that many tests read: what the folder of each holds, and its first lines say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from scipy.special import stdtrit
from support.command_line import ended, module_of

from nope_probe import Run, read_run
from nope_probe.figures.words import bound_columns
from nope_probe.reports.page import Headline, Section
from nope_probe.studies.compare import declared

# What makes a run small, of the flags that its command has.
SIZES = {"n_seqs": "20", "seq_len": "24", "folds": "5", "layers": "2"}
DRAWN = Section.drawn  # which some tests leave out


@dataclass(frozen=True)
class Finished:
    """The folder of a run, and what its command printed in 80 columns."""

    folder: Path
    printed: str

    @cached_property
    def run(self) -> Run:
        return read_run(self.folder)

    @cached_property
    def page(self) -> str:
        return (self.folder / "report.html").read_text(encoding="utf-8")


def finish(line: str, folder: Path) -> Finished:
    """Run a line to its end in a new folder; sizes that it does not name are small."""
    finished = Finished(folder / "run", show(line, folder / "run"))
    assert_whole(finished.folder)
    return finished


def show(line: str, out: Path) -> str:
    """Return what a line with small sizes prints in 80 columns, of a new or a finished run."""
    command, *words = shlex.split(line)
    flags = {field.name for field in fields(module_of(command).Settings)}
    flags -= {"layers"} if command in ("behaviour", "circuit") else set()  # of few lines of these
    for name, size in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        if name in flags and flag not in words:
            words += [flag, size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "drawn", DRAWN)
        patch.setenv("COLUMNS", "80")
        end = ended(command, [*words, "--out", str(out)], out.parent)
    assert end.code == 0, end.err
    return end.out


def assert_whole(folder: Path) -> None:
    """Check that a run has the files of its manifest, and numbers that can be.

    No number is infinite, a value lies within its interval, and the run keeps the replicates that
    the interval comes from.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"]
    files = {path.name for path in folder.iterdir()}
    assert files == {"manifest.json", *manifest["checksums"]}
    columns = declared(manifest["kind"])
    stored = folder / "estimates.safetensors"
    estimates = load_file(stored) if stored.exists() else {}
    for path in folder.glob("*.csv"):
        if path.stat().st_size > 1:
            table = pd.read_csv(path, keep_default_na=False, na_values=[""])
            assert_table(table, path.name)
            ends = {end for name in table for end in bound_columns(name)}
            assert {*table} - ends <= {*columns}, f"{path.name} has columns without a declaration"
            if manifest["kind"] != "compare":
                assert_replicates(table, path.stem, estimates)
    for path in folder.glob("*.safetensors"):
        for name, values in load_file(path).items():
            assert not np.isinf(values).any(), f"{path.name}: {name}"


def assert_table(table: pd.DataFrame, file: str) -> None:
    """Check the columns of numbers of a table."""
    numbers = table.select_dtypes("number")
    for name in numbers:
        assert not np.isinf(numbers[name]).any(), f"{file}: {name}"
        if f"{name}_low" in numbers:
            low, value, high = (numbers[f"{name}{end}"] for end in ("_low", "", "_high"))
            assert not ((value < low) | (value > high)).any(), f"{file}: {name} is outside"


# A difference of two RMS, and what is compared with single costs.
WITHOUT_REPLICATES = ("pattern/mask_adds", "tests/cost", "tests/chance")


def assert_replicates(table: pd.DataFrame, file: str, estimates: Mapping[str, np.ndarray]) -> None:
    """Check that the numbers of a table, and their intervals, are those of their replicates."""
    for name in (name for name in table if f"{name}_low" in table and len(table)):
        if (key := f"{file}/{name}") in WITHOUT_REPLICATES or table[name].isna().all():
            continue
        numbers = table[[name, f"{name}_low", f"{name}_high"]].to_numpy(float)
        if np.isnan(numbers).all():  # unknown everywhere: there is nothing to keep
            continue
        of_table = estimates[f"weights/{file}"]
        weights = np.atleast_2d(estimates.get(f"weights/{key}", of_table))
        weights = np.broadcast_to(weights, (len(table), weights.shape[1]))
        for kept, of_fold, (value, low, high) in zip(estimates[key], weights, numbers, strict=True):
            np.testing.assert_allclose(kept[0], value, rtol=1e-6, atol=1e-12, err_msg=key)
            used = of_fold > 0
            if used.sum() < 2 or not np.isclose(high - value, value - low, rtol=1e-6):
                continue  # no interval, or one that is wider than the jackknife's
            share, without = of_fold[used], kept[1:][used]
            pseudo = (kept[0] - (1 - share) * without) / share
            spread = share / (1 - share) * (pseudo - share @ pseudo) ** 2
            half = stdtrit(1 / (share @ share) - 1, 0.975) * spread.mean() ** 0.5
            assert half == pytest.approx(value - low, rel=1e-4, abs=1e-7), key


NUMBER = r"(?<![\w.-])[+-]?\d+(?:[.,]\d+)*%?"  # not the digits of a name, such as L1H3 or gpt-2


def headlines(lead: Headline | None) -> Iterator[Headline]:
    """Yield a headline and those after it."""
    while lead is not None:
        yield lead
        lead = lead.then


def assert_numbers_are_cells(lead: Headline) -> None:
    """Assert that a sentence of numbers is one, and that each number is in a cell of its table."""
    for of_table in headlines(lead):
        numbers = re.findall(NUMBER, of_table.sentence)
        if numbers:
            assert of_table.table is not None
            cells = " ".join(map(str, of_table.table.to_numpy().flatten()))
            assert {*numbers} <= {*re.findall(NUMBER, cells)}, of_table.sentence
            assert not re.search(r"[.!?] ", of_table.sentence), "one sentence"
