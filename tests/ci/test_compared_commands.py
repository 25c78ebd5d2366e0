"""Two runs of every command are compared, number by number."""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.command_line import run_command
from support.finished_runs import WITHOUT_REPLICATES

from nope_probe import Run, compare, figures, read_run
from nope_probe.run.folder import write_run
from nope_probe.studies.commands import COMMANDS
from nope_probe.studies.compare import declared
from tests.support.manifests import manifest_of

SIZES = ["--data", "random", "--seq-len", 11, "--n-seqs", 8, "--folds", 4, "--bos", "never"]
LAYERED = [*SIZES, "--layers", 2]
RUNS: dict[str, list[Any]] = {  # flags of the commands whose runs are compared
    "ablate": [*LAYERED, "--remove", "sources"],
    "attention": LAYERED,
    "behaviour": ["--measures", "loss", "in-context", "--seq-len", 20, "--n-seqs", 8],
    "circuit": SIZES,
    "trace": [*LAYERED, "--n-seqs", 10, "--folds", 5, "--confirm", 0],
}
OTHERS = ("compare", "heads")


@pytest.fixture(scope="module")
def pairs(
    tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Path]]:
    """Two small runs of every command, of two models."""
    root = tmp_path_factory.mktemp("pairs")
    text = root / "text.jsonl"
    text.write_text("".join(f'{{"text": "{letter * 40}"}}\n' for letter in "abcdefghij"))
    folders = {name: [root / f"{name}-{i}" for i in range(2)] for name in RUNS}
    with pytest.MonkeyPatch.context() as patch:  # no test reads the pages
        patch.setattr("nope_probe.reports.page.Section.drawn", lambda section: None)
        for name, flags in RUNS.items():
            for i, model in enumerate(("llama", "smollm3")):
                subject = ["--model", tiny(model).folder]
                subject += ["--data", text] if name == "behaviour" else []
                module = import_module(f"nope_probe.{name}")
                run_command(module, *subject, *flags, "--out", folders[name][i])
    for name in OTHERS:
        folders[name] = [root / name] * 2
        write_run(root / name, Run(manifest=manifest_of(kind=name)))
    return folders


def test_every_command_that_writes_runs_is_compared() -> None:
    assert {*RUNS, *OTHERS} == {*COMMANDS}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", RUNS)
def test_two_runs_of_any_command_are_compared(
    name: str, pairs: dict[str, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(compare, *pairs[name], "--out", tmp_path / "out")
    base, other = map(read_run, pairs[name])
    compared = read_run(tmp_path / "out")
    rows = compared.tables["differences"]
    assert len(rows) > 4
    change = rows["value"] - rows["base_value"]
    pd.testing.assert_series_equal(rows["difference"], change, check_names=False, atol=1e-5)
    for (table, column), part in rows.groupby(["table", "number"]):
        for side, run in (("base_value", base), ("value", other)):
            stored = run.tables[table][column].to_numpy()
            known = part[side].dropna().to_numpy()
            assert np.isclose(known[:, None], stored, rtol=1e-6).any(1).all()
    said = f"{rows['differs'].sum()} of {rows['p_holm'].notna().sum()} numbers of smollm3 and llama"
    if name == "attention":
        n_changed = rows.groupby(["layer", "head"])["differs"].any().sum()
        said = f"{n_changed} of 12 heads of smollm3 and llama differ"
    assert said in " ".join(capsys.readouterr().out.split())
    tokens = [run.arrays["tokens"]["tokens"] for run in (base, other)]
    assert {*rows["method"].dropna()} == {"paired" if np.array_equal(*tokens) else "unpaired"}
    untested = rows[rows["method"].isna() & rows["difference"].notna()]
    assert {*(untested["table"] + "/" + untested["number"])} <= {*WITHOUT_REPLICATES}
    names = ["table", *(column for column in rows if column in declared(name))]
    names = [column for column in names if column not in ("value", "difference")]
    assert not rows.duplicated([*names, "number"]).any()


@pytest.mark.parametrize("name", RUNS)
def test_a_series_of_any_command_is_drawn_and_has_the_numbers_of_its_runs(
    name: str, pairs: dict[str, list[Path]], tmp_path: Path
) -> None:
    folders = [*pairs[name], Path(shutil.copytree(pairs[name][0], tmp_path / "again"))]
    run_command(compare, *folders, "--out", tmp_path / "out")
    series = read_run(tmp_path / "out")
    rows = series.tables["differences"]
    assert {*rows["run"]} == {folder.name for folder in folders}
    for folder, (_, of_run) in zip(folders, rows.groupby("run", sort=False), strict=True):
        tables = read_run(folder).tables
        for (table, column), part in of_run.groupby(["table", "number"]):
            for end in ("", "_low", "_high"):
                stored = tables[table][f"{column}{end}"].to_numpy()
                np.testing.assert_array_equal(part[f"value{end}"], stored)
    drawn = figures.of_run(series)
    assert [*drawn] == ["The numbers along the runs"]
    assert len(drawn["The numbers along the runs"].data)
    first, last = (rows[rows["run"] == folders[n].name]["value"].reset_index() for n in (0, 2))
    pd.testing.assert_frame_equal(first[["value"]], last[["value"]])
