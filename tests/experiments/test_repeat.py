"""A run is repeated from its manifest, and what differs is told."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.command_line import refused, run_command
from support.refused_models import change

from nope_probe import ablate, behaviour, circuit, layers, reproduce, scores, simulate
from nope_probe.experiments.repeat import (
    Comparison,
    compare_reports,
    compare_runs,
    relative_difference,
    same_rows,
)
from nope_probe.runtime.folder import Run, read_run, write_run

SMALL = ["--layers", 1, "--n-seqs", 8, "--seq-len", 16, "--folds", 4]
RUNS: dict[str, tuple[ModuleType, list[object]]] = {
    "ablate": (ablate, [*SMALL, "--players", "sources"]),
    "scores": (scores, SMALL),
    "circuit": (circuit, [*SMALL[2:], "--explore", 0, "--remove", "mlp"]),
    "behaviour": (behaviour, [*SMALL[2:], "--measures", "loss", "--remove", "mlp"]),
    "simulate": (simulate, ["--n-samples", 130, "--n-layers", 2, "--seq-len", 11]),
}


def repeated(capfd: pytest.CaptureFixture[str], run: Path, *flags: object) -> tuple[int, str]:
    """Return the exit code of repeating a run, and the line that is printed."""
    capfd.readouterr()
    try:
        run_command(reproduce, run, *flags)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    return code, capfd.readouterr().out


@pytest.mark.parametrize("command", RUNS)
def test_a_run_that_is_repeated_has_the_same_bytes(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module, flags = RUNS[command]
    run_command(module, *flags, "--out", tmp_path / "run")
    code, line = repeated(capfd, tmp_path / "run", "--out", tmp_path / "again")
    assert (code, line) == (0, f"{tmp_path / 'run'}: the same, byte for byte\n")
    first, second = (
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("run", "again")
    )
    assert first["settings"] == second["settings"]
    assert first["threads"] == second["threads"] == torch.get_num_threads()
    for name in first["checksums"]:
        if name != "report.html":
            assert (tmp_path / "run" / name).read_bytes() == (
                tmp_path / "again" / name
            ).read_bytes()


def test_layers_is_repeated_from_what_it_printed(
    tiny: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(copytree(tiny("mistral").folder, tmp_path / "model"))
    run_command(layers, "--model", folder, "--json")
    file = tmp_path / "layers.json"
    file.write_text(capfd.readouterr().out)
    assert repeated(capfd, file) == (0, f"{file}: the same, byte for byte\n")
    change(folder, sliding_window=4)
    line = refused(capfd, tmp_path / "here", reproduce, file)
    assert line.startswith(f"the model has changed since the run in {file}: ")
    file.write_text("[]")
    line = refused(capfd, tmp_path / "here", reproduce, file)
    assert line == f"{file} is no file of layers --json, and no run's folder"


def test_data_and_models_that_changed_or_are_gone_are_named(
    tiny: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "a.jsonl", tmp_path / "run"
    rows = [json.dumps({"text": "in the other one there is more " * 9}) + "\n" for _ in range(8)]
    data.write_text("".join(rows))
    model = Path(copytree(tiny("smollm3-rope").folder, tmp_path / "model"))
    run_command(scores, *SMALL, "--model", model, "--data", data, "--out", run)
    data.write_text("".join(rows[1:]))
    line = refused(capfd, tmp_path / "here", reproduce, run)
    assert line.startswith(f"the data has changed since the run in {run}: {data} (a.jsonl); ")
    data.unlink()
    line = refused(capfd, tmp_path / "here", reproduce, run)
    assert line == f"the data that {run} was made from is not there any more"
    data.write_text("".join(rows))
    model.rename(tmp_path / "elsewhere")
    line = refused(capfd, tmp_path / "here", reproduce, run)
    assert line == f"the model that {run} was made from is not there any more"


def test_what_cannot_be_repeated_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "page", Run(manifest={"kind": "compare", "settings": {}}))
    line = refused(capfd, tmp_path / "here", reproduce, tmp_path / "page")
    assert "is a run of compare, which is not repeated: expected one of ablate, " in line
    old = {"kind": "scores", "settings": {"format": 1, "seed": 0}}
    write_run(tmp_path / "old", Run(manifest=old))
    line = refused(capfd, tmp_path / "here", reproduce, tmp_path / "old")
    assert "a run of another version of nope_probe" in line
    line = refused(capfd, tmp_path / "here", reproduce, tmp_path / "none")
    assert line.endswith("none holds no run: it has no manifest.json")


def written(folder: Path, values: list[float], label: str = "a", threads: int = 1) -> Path:
    """Write a run of one array and one table."""
    run = Run(
        manifest={"settings": {}, "threads": threads},
        arrays={"maps": {"score": np.array(values, dtype=np.float32)}},
        tables={"rows": pd.DataFrame({"label": [label], "value": [values[0]]})},
    )
    write_run(folder, run)
    return folder


def test_runs_are_compared_by_their_largest_difference(tmp_path: Path) -> None:
    before = written(tmp_path / "before", [1.0, -4.0, float("nan")])
    same = written(tmp_path / "same", [1.0, -4.0, float("nan")])
    close = written(tmp_path / "close", [1.0 + 2e-6, -4.0, float("nan")], threads=2)
    far = written(tmp_path / "far", [1.0 + 2e-5, -4.0, float("nan")])
    holes = written(tmp_path / "holes", [1.0, float("nan"), -4.0])
    shape = written(tmp_path / "shape", [1.0, -4.0])
    other = written(tmp_path / "other", [1.0, -4.0, float("nan")], label="b")
    assert str(compare_runs(before, same)) == f"{before}: the same, byte for byte"
    found = compare_runs(before, close)
    assert found.same
    assert not found.identical
    assert found.largest == pytest.approx(5e-7, rel=0.1)
    assert str(found).endswith("; threads 1 then, 2 now")
    assert not compare_runs(before, far).same
    assert "in maps.safetensors score" in str(compare_runs(before, far))
    assert compare_runs(before, holes).largest == float("inf")
    assert compare_runs(before, shape).missing == ("maps.safetensors score",)
    assert compare_runs(before, other).missing == ("rows of rows.csv",)
    assert not compare_runs(before, other).same


def test_differences_of_integers_and_of_zeros_count() -> None:
    assert relative_difference(np.array([1, 2]), np.array([1, 3])) == float("inf")
    assert relative_difference(np.zeros(2), np.array([0, 1e-30])) == float("inf")
    assert relative_difference(np.zeros(0), np.zeros(0)) == 0
    one = pd.DataFrame({"label": ["a"], "value": [1.0]})
    assert same_rows(one, one.assign(value=2.0))
    assert not same_rows(one, one.rename(columns={"value": "other"}))


def test_findings_of_layers_are_compared_number_by_number(tmp_path: Path) -> None:
    run = {"versions": {}, "threads": 1}
    before = {"layers": [{"scale": 2.0, "rope": True}], "run": run}

    def found(**values: object) -> Comparison:
        report = {"layers": [{"scale": 2.0, "rope": True} | values], "run": run}
        return compare_reports(tmp_path, before, report)

    assert found().identical
    assert found(scale=2.0 + 1e-6).same
    assert not found(scale=2.01).same
    assert found(scale=2.01).where == "layers.0.scale"
    assert not found(rope=False).same
    assert found(more=1).missing == ("layers.0.more",)


def test_a_run_that_comes_out_otherwise_ends_with_code_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, flags = RUNS["simulate"]
    run_command(command, *flags, "--out", tmp_path / "run")
    true = read_run(tmp_path / "run")
    maps = {
        name: np.where(values > 0, values * 1.001, values) for name, values in true.maps.items()
    }
    manifest = {name: value for name, value in true.manifest.items() if name != "checksum"}
    told = replace(true, manifest=manifest, arrays={"maps": maps}, page="told")
    write_run(tmp_path / "told", told)
    code, line = repeated(capfd, tmp_path / "told")
    assert code == 1
    assert line.startswith(f"{tmp_path / 'told'}: not the same: the largest difference is 0.001")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "told"]
