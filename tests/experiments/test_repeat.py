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

from nope_probe import (
    ablate,
    attention,
    behaviour,
    circuit,
    layers,
    reproduce,
    scores,
    simulate,
    trace,
)
from nope_probe.experiments.repeat import (
    Comparison,
    compare_reports,
    compare_runs,
    relative_difference,
)
from nope_probe.runtime.folder import Run, read_run, write_run

pytestmark = pytest.mark.usefixtures("unenforced", "undrawn")

SMALL = ["--layers", 1, "--n-seqs", 8, "--seq-len", 16, "--folds", 4]
RUNS: dict[str, tuple[ModuleType, list[object]]] = {
    "ablate": (ablate, [*SMALL, "--players", "sources"]),
    "attention": (attention, [*SMALL, "--text", "ab"]),
    "scores": (scores, SMALL),
    "circuit": (circuit, [*SMALL[2:], "--explore", 0, "--remove", "mlp"]),
    "behaviour": (behaviour, [*SMALL[2:], "--measures", "loss", "--remove", "mlp"]),
    "trace": (trace, [*SMALL[:-2], "--folds", 5, "--confirm", 0]),
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
def test_a_run_that_is_repeated_has_the_same_bytes_and_one_that_differs_ends_with_code_1(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module, flags = RUNS[command]
    run, again = tmp_path / "run", tmp_path / "again"
    run_command(module, *flags, "--out", run)
    code, line = repeated(capfd, run, "--out", again)
    assert (code, line) == (0, f"{run}: the same, byte for byte\n")
    first, second = (json.loads((out / "manifest.json").read_text()) for out in (run, again))
    assert first["settings"] == second["settings"]
    assert first["threads"] == second["threads"] == torch.get_num_threads()
    for name in {*first["checksums"]} - {"report.html"}:
        assert (run / name).read_bytes() == (again / name).read_bytes()
    if command != "simulate":
        return
    true = read_run(run)
    maps = {name: np.where(cells > 0, cells * 1.001, cells) for name, cells in true.maps.items()}
    manifest = {name: value for name, value in true.manifest.items() if name != "checksum"}
    told = tmp_path / "told"
    write_run(told, replace(true, manifest=manifest, arrays={"maps": maps}, page="told"))
    code, line = repeated(capfd, told)
    assert code == 1
    assert line.startswith(f"{told}: not the same: the largest difference is 0.001")
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"run", "again", "told"}


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
    old = {"kind": "scores", "settings": {"format": 1, "seed": 0}}
    write_run(tmp_path / "old", Run(manifest=old))
    for name, message in (
        ("page", "is a run of compare, which is not repeated: expected one of ablate, "),
        ("old", "a run of another version of nope_probe"),
        ("none", "none holds no run: it has no manifest.json"),
    ):
        assert message in refused(capfd, tmp_path / "here", reproduce, tmp_path / name)


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
    nan = float("nan")
    before = written(tmp_path / "before", [1.0, -4.0, nan])

    def against(*values: float, **run: Any) -> Comparison:
        return compare_runs(before, written(tmp_path / f"{values}{run}", [*values], **run))

    assert str(against(1.0, -4.0, nan)) == f"{before}: the same, byte for byte"
    close = against(1.0 + 2e-6, -4.0, nan, threads=2)
    assert close.same
    assert not close.identical
    assert close.largest == pytest.approx(5e-7, rel=0.1)
    assert str(close).endswith("; threads 1 then, 2 now")
    far = against(1.0 + 2e-5, -4.0, nan)
    assert not far.same
    assert "in maps.safetensors score" in str(far)
    assert against(1.0, nan, -4.0).largest == float("inf")
    assert against(1.0, -4.0).missing == ("maps.safetensors score",)
    other = against(1.0, -4.0, nan, label="b")
    assert (other.where, other.largest) == ("rows of rows.csv", float("inf"))


def test_differences_of_integers_and_of_zeros_count() -> None:
    assert relative_difference(np.array([1, 2]), np.array([1, 3])) == float("inf")
    assert relative_difference(np.zeros(2), np.array([0, 1e-30])) == float("inf")
    assert relative_difference(np.zeros(0), np.zeros(0)) == 0


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
