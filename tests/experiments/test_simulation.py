"""The simulate command: its files and its output."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.command_line import refused, run_command
from support.rounding import assert_same, rounding

from nope_probe import simulate
from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.analyses.parameter_free.theory import theory_scores
from nope_probe.experiments.simulation import run as simulation_run

SMALL = {"n_layers": 2, "seq_len": 11, "d_model": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "small"
    settings = simulation_run.Settings(alpha=(0.0, 0.25), rope=True, n_samples=70, out=out, **SMALL)
    return simulation_run.run(settings)


def test_a_run_holds_the_maps_of_theory_and_simulation_in_float32(folder):
    maps = load_file(folder / "maps.safetensors")
    kinds = ("score", "se", "theory", "normalised")
    assert set(maps) == {f"{kind}/alpha={a}" for kind in kinds for a in ("0", "0.25")}
    for values in maps.values():
        assert (values.dtype, values.shape) == (np.float32, (2, 11, 11))
        assert np.isnan(values[:, 0, 1:]).all()
        assert np.isfinite(values[:, -1]).all()
    alpha = torch.tensor([0.25])
    theory = theory_scores(alpha, 11, 2, ParameterFreeSpec(d_model=6, rope=True))[0].float().numpy()
    assert_same(maps["theory/alpha=0.25"], theory)
    assert 0 < np.nanmax(np.abs(maps["score/alpha=0.25"] - theory)) < 0.2
    for lag in range(11):
        diagonal = maps["normalised/alpha=0.25"].diagonal(-lag, 1, 2)
        assert np.abs(diagonal.mean(-1)).max() < rounding(11)


def test_manifest_and_report_say_what_was_run_and_it_is_shown_again(folder, capfd):
    before = (folder / "manifest.json").read_bytes()
    manifest = json.loads(before)
    assert manifest["complete"]
    assert manifest["settings"]["alpha"] == [0.0, 0.25]
    assert manifest["n_samples"] == {"0": 70, "0.25": 70}
    files = {"layers.csv", "maps.safetensors", "report.html", "steps.csv"}
    assert set(manifest["checksums"]) == files
    page = (folder / "report.html").read_text()
    for alpha in ("0", "0.25"):  # on the paper's colours, and each layer on its own
        assert page.count(f"Scores at alpha = {alpha}, ") >= 2
    flags = ["--n-layers", 2, "--seq-len", 11, "--d-model", 6, "--rope", "--out", folder]
    run_command(simulate, "--alpha", 0, 0.25, "--n-samples", 70, *flags, "--verbose")
    shown = capfd.readouterr().out
    assert "at alpha = 0.25" in shown
    assert "The numbers of every layer" in shown
    line = refused(capfd, folder, simulate, "--alpha", 0, "--n-samples", 70, *flags)
    assert "holds a run with other settings" in line
    assert (folder / "manifest.json").read_bytes() == before
