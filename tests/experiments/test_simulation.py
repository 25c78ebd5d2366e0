"""The simulate and reproduce commands: their files, their output, their refusals."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support.command_line import refused, run_command

from nope_probe import reproduce, simulate
from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.analyses.parameter_free.theory import theory_scores
from nope_probe.errors import UserError
from nope_probe.experiments.paper.claims import figure9, figure10
from nope_probe.experiments.simulation import run as simulation_run
from nope_probe.runtime.folder import Run

SMALL = {"n_layers": 2, "n_samples": 70, "seq_len": 11, "d_model": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "small"
    return simulation_run.run(
        simulation_run.Settings(alpha=(0.0, 0.25), rope=True, out=out, **SMALL)
    )


def test_a_run_holds_four_maps_per_alpha_in_float32(folder):
    maps = load_file(folder / "maps.safetensors")
    kinds = ("score", "se", "theory", "normalised")
    assert set(maps) == {f"{kind}/alpha={a}" for kind in kinds for a in ("0", "0.25")}
    for each in maps.values():
        assert (each.dtype, each.shape) == (np.float32, (2, 11, 11))
        assert np.isnan(each[:, 0, 1:]).all()
        assert np.isfinite(each[:, -1]).all()


def test_the_maps_are_those_of_theory_and_simulation(folder):
    maps = load_file(folder / "maps.safetensors")
    alpha = torch.tensor([0.25])
    theory = theory_scores(alpha, 11, 2, ParameterFreeSpec(d_model=6, rope=True))[0].float().numpy()
    np.testing.assert_allclose(maps["theory/alpha=0.25"], theory, rtol=1e-6)
    gap = np.nanmax(np.abs(maps["score/alpha=0.25"] - theory))
    assert 0 < gap < 0.2
    for lag in range(11):
        diagonal = maps["normalised/alpha=0.25"].diagonal(-lag, 1, 2)
        assert np.abs(diagonal.mean(-1)).max() < 1e-6


def test_the_manifest_records_the_settings_and_the_files_checksums(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["settings"]["alpha"] == [0.0, 0.25]
    assert manifest["n_samples"] == {"0": 70, "0.25": 70}
    assert set(manifest["checksums"]) == {
        "layers.csv",
        "maps.safetensors",
        "report.html",
        "steps.csv",
    }


def test_the_report_shows_each_alpha_on_both_colour_scales(folder):
    page = (folder / "report.html").read_text()
    for alpha in ("0", "0.25"):
        assert f"Scores at alpha = {alpha}, on the paper&#x27;s scale of 0 to" in page
        assert f"Scores at alpha = {alpha}, each layer on its own colours: those of L" in page
    assert "Theory and simulation differ by" in page


def test_a_finished_run_is_shown_again_and_other_settings_are_refused(folder, capfd):
    before = (folder / "manifest.json").read_bytes()
    flags = ["--n-layers", 2, "--seq-len", 11, "--d-model", 6, "--rope", "--out", folder]
    run_command(simulate, "--alpha", 0, 0.25, "--n-samples", 70, *flags)
    assert "alpha = 0.25, in j: L0" in capfd.readouterr().out
    line = refused(capfd, folder, simulate, "--alpha", 0, "--n-samples", 70, *flags)
    assert "holds a run with other settings" in line
    assert (folder / "manifest.json").read_bytes() == before


def test_a_target_decides_how_many_samples_it_takes(tmp_path):
    settings = simulation_run.Settings(
        alpha=(0.25,), target_se=5e-3, out=tmp_path / "run", **{**SMALL, "n_samples": None}
    )
    layers = pd.read_csv(simulation_run.run(settings) / "layers.csv")
    assert layers["se"].max() <= 5e-3
    assert layers["n_samples"].min() % 64 == 0


def test_an_output_folder_that_is_a_file_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file"):
        simulation_run.run(simulation_run.Settings(out=tmp_path / "file", n_samples=10**9))


def test_figure_one_is_reproduced_but_for_its_third_number(capsys, tmp_path):
    run_command(reproduce, "figure1", "--out", tmp_path / "run")
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert "Reproduced: eq. (4) gives 0.15352" in first
    assert "Reproduced: eq. (4) gives 0.13210" in second
    assert "0.150" in third
    assert "Not reproduced: eq. (4) gives 0.15082" in third


def test_figure_twos_claim_on_layers_three_and_four_does_not_hold(capsys, tmp_path):
    run_command(reproduce, "figure2", "--n-samples", 512, "--out", tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert [". Reproduced: " in line for line in lines[:4]] == [True, False, True, True]
    assert "L2 is not increasing" in lines[1]
    assert "L3 is not increasing" in lines[1]


def simulated(maps, alpha):
    return Run(manifest={}, arrays={"maps": {f"score/alpha={alpha:g}": maps.numpy()}})


def test_figure_tens_claim_holds_for_a_relative_map_and_not_for_a_masked_one():
    for causal, reproduced in ((False, True), (True, False)):
        spec = ParameterFreeSpec(d_model=64, rope=True, causal=causal)
        maps = theory_scores(torch.tensor([0.0]), 50, 4, spec)[0]
        (claim,) = figure10(simulated(maps, 0.0))
        assert claim.reproduced == reproduced


def test_figure_nines_claims_fail_without_the_mask():
    for causal, reproduced in ((True, True), (False, False)):
        spec = ParameterFreeSpec(d_model=64, rope=True, causal=causal)
        maps = theory_scores(torch.tensor([0.5]), 50, 4, spec)[0]
        first, _ = figure9(simulated(maps, 0.5))
        assert first.reproduced == reproduced
