"""The compare command: what it reads, the differences it writes, the pages, and its refusals."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.command_line import refused, run_command

from nope_probe import ablate, compare
from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure
from nope_probe.maps.estimates import fold_weights
from nope_probe.run.folder import Run, read_run, write_run
from nope_probe.run.manifest import read_manifest
from nope_probe.run.processes import checkpoint_dir, locked
from nope_probe.studies.tables import interval_columns
from tests.support.manifests import manifest_of

N, FOLDS, LAYERS = 13, 5, 2


def maps(seed: int, slope: float = 0.5, n: int = N) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(FOLDS, LAYERS, n, n, generator=generator)
    masked = torch.ones(n, n).triu(1).bool()
    return (slope * torch.arange(n) + noise).masked_fill(masked, torch.nan)


def write(
    folder: Path,
    folds: torch.Tensor,
    *,
    model: str,
    tokens: str = "same",
    **manifest: Any,
) -> Path:
    """Write a finished run of `ablate --remove none` by hand."""
    arrays: dict[str, Any] = {
        "maps": {
            "score/intact": folds.mean(0).numpy(),
            "se/intact": standard_error(folds, fold_weights(len(folds))).numpy(),
        }
    }
    about = {
        "model": {"name": model},
        "data": {"sha256": tokens},
        "settings": {"folds": FOLDS, "seq_len": folds.shape[-1]},
        "fold_sizes": [2] * FOLDS,
        "conditions": ["intact"],
        "layers": [*range(LAYERS)],
        "command": f"ablate {model}",
        "kind": "ablate",
        **manifest,
    }
    rows = [
        {"layer": layer, "removed": "intact", "replacement": "none"}
        | interval_columns(**vars(measures))
        for layer, measures in measure(folds, manifest.get("skip_keys", 0)).items()
    ]
    tables = {"pattern": pd.DataFrame(rows)}
    write_run(
        folder, Run(manifest=manifest_of(**about), arrays=arrays, tables=tables, page="a page")
    )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs on the same sequences."""
    return [write(tmp_path / name, maps(seed), model=name) for seed, name in enumerate("ab")]


def test_differences_are_paired_where_the_sequences_are_the_same(tmp_path: Path) -> None:
    folds = {"x": maps(0), "y": maps(1, slope=0.9)}
    runs = [write(tmp_path / f"run-{name}", folds[name], model=name) for name in folds]
    out = tmp_path / "out"
    run_command(compare, *runs, "--out", out)
    compared = read_run(out)
    rows = compared.tables["differences"]
    assert set(rows.dropna(subset=["difference"])["method"]) == {"paired"}
    table = rows.set_index(["layer", "number"])
    base, other = folds["x"], folds["y"]
    for layer in range(LAYERS):
        expected = measure(other)[layer].locality.value - measure(base)[layer].locality.value
        assert table.loc[(layer, "locality"), "difference"] == pytest.approx(expected)
    page = (out / "report.html").read_text()
    assert "less that of x" in page
    assert 'href="../run-x/report.html">x</a>' in page
    assert "The intact pattern in both runs" not in page, "no run keeps the pattern's map"


def test_a_finished_comparison_is_shown_again_and_one_in_progress_is_locked(
    runs: list[Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    shutil.rmtree(runs[1])
    write(runs[1], maps(0), model="b")  # the same maps as a's
    with locked(checkpoint_dir(out)):
        line = refused(capfd, tmp_path, compare, *runs, "--out", out)
        assert "another process is at work on the run in" in line
    assert not out.exists()
    run_command(compare, *runs, "--out", out)
    manifest = read_manifest(out)
    assert "0 of 10 numbers of b and a differ beyond noise; " in (out / "report.html").read_text()
    assert manifest.kind == "compare"
    assert {"report.html", "differences.csv"} <= set(manifest.checksums)
    assert [*tmp_path.glob(".out*")] == []
    capfd.readouterr()
    monkeypatch.setattr("nope_probe.studies.compare_run.analyse", None)
    run_command(compare, *runs, "--out", out)
    assert f"shown again from {out}" in capfd.readouterr().err
    shutil.rmtree(runs[1])
    write(runs[1], maps(7), model="b")
    assert "other settings" in refused(capfd, tmp_path, compare, *runs, "--out", out)


def test_folders_that_cannot_be_compared_are_refused(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, other = runs
    (tmp_path / "empty").mkdir()
    (tmp_path / ".c.unfinished").mkdir()
    inside = f"is in the run {other}: take --out outside of the runs"
    (tmp_path / ".d.unfinished").mkdir()
    going = f"{tmp_path / 'c'}, {tmp_path / 'd'} are not finished"
    for arguments, message in (
        ([], "expected two runs or more to compare, got 0"),
        ([base], "expected two runs or more to compare, got 1"),
        ([base, other, base], "a run was given twice"),
        ([base, tmp_path / "c", tmp_path / "d"], going),
        ([base, base], "a run was given twice"),
        ([base, tmp_path / "empty"], "holds no run: it has no manifest.json"),
        ([base, tmp_path / "c"], "is not finished; run its command again"),
        ([base, other, "--out", other / "compared"], inside),
    ):
        assert message in refused(capfd, tmp_path, compare, *arguments)
    assert inside in refused(capfd, other, compare, base, other)  # whose runs/ would be in it


def test_models_in_the_place_of_runs_are_answered_by_the_command_to_type(
    runs: list[Path], tiny: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["nope-tiny", "gpt2"], [runs[0], tiny("llama").folder]):
        line = refused(capfd, tmp_path, compare, *arguments)
        assert "such as python -m nope_probe.ablate --model" in line


@pytest.mark.usefixtures("undrawn")
def test_a_model_that_begins_with_bos_is_compared_with_one_that_does_not(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    flags = ["--data", "random", "--seq-len", 11, "--n-seqs", 8, "--folds", 4, "--layers", 2]
    for bos in ("always", "never"):
        out = ["--bos", bos, "--out", tmp_path / bos]
        run_command(ablate, "--remove", "none", "--model", tiny("llama").folder, *flags, *out)
        assert read_run(tmp_path / bos).manifest.skip_keys == 1
    run_command(compare, tmp_path / "always", tmp_path / "never", "--out", tmp_path / "out")
    differences = read_run(tmp_path / "out").tables["differences"]
    assert {"amplitude", "lead"} <= {*differences["number"]}
