"""The simulate command: its files and its output."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from scipy import stats
from support.command_line import refused, run_command
from support.rounding import assert_same, rounding

import simulate
import simulation_study
import theory
from nope_probe.analyses.theory import theory_scores
from nope_probe.errors import UserError
from nope_probe.stages import ParameterFreeSpec
from simulated_curves import Curves, simulated_curves
from simulation_page import headline
from simulation_settings import TheorySettings

SMALL = {"n_layers": 2, "seq_len": 11, "d_model": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "small"
    settings = simulation_study.Settings(
        alpha=(0.0, 0.25), rope=True, n_samples=70, out=out, **SMALL
    )
    return simulation_study.Simulate.run(settings)


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
    files = {"estimates.safetensors", "layers.csv", "maps.safetensors", "report.html", "steps.csv"}
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


def test_every_number_of_a_layer_follows_from_its_maps(folder, tmp_path):
    """Without the control variate, the same samples have `se_plain`."""
    maps, spec = load_file(folder / "maps.safetensors"), ParameterFreeSpec(d_model=6, rope=True)
    settings = simulation_study.Settings(
        alpha=(0.0, 0.25), rope=True, n_samples=70, control_variate=False, out=tmp_path, **SMALL
    )
    plain = pd.read_csv(simulation_study.Simulate.run(settings) / "layers.csv")
    table, every_step = (pd.read_csv(folder / f"{name}.csv") for name in ("layers", "steps"))
    assert list(zip(table["alpha"], table["layer"], strict=True)) == [
        (alpha, layer) for alpha in (0.0, 0.25) for layer in (0, 1)
    ]
    theory = theory_scores(torch.tensor([0.0, 0.25]).double(), 11, 2, spec).flatten(0, 1).numpy()
    below = np.tri(11, k=-1, dtype=bool)
    for row, exact in zip(table.itertuples(), theory, strict=True):
        name = f"alpha={row.alpha:g}"
        score, se = (maps[f"{kind}/{name}"][row.layer].astype(float) for kind in ("score", "se"))
        gap = (score - exact)[below]
        steps = [
            [values[i, i - g + 1] - values[i, i - g] for i in range(g, 11)]
            for values in (score, exact)
            for g in range(2, 11)
        ]
        means = np.array([np.mean(of_distance) for of_distance in steps]).reshape(2, 9)
        own = every_step[(every_step["alpha"] == row.alpha) & (every_step["layer"] == row.layer)]
        assert list(own["distance"]) == list(range(2, 11))
        assert_same(own["step"], means[0], size=1.0)
        assert_same(own["theory"], means[1], size=1.0)
        threshold = stats.t.ppf(1 - 0.05 / (2 * 9), 31) * own["se"]
        falling = [
            (i, j) for i in range(11) for j in range(i - 1)
            if exact[i, j + 1] - exact[i, j] < -spec.resolution
        ]  # fmt: skip
        falls = [[values[i, j + 1] - values[i, j] for i, j in falling] for values in (score, exact)]
        pairs = [np.sign(score[i, j + 8] - score[i, j]) for i in range(11) for j in range(i - 8)]
        expected = {
            "n_samples": 70,
            "se": np.sqrt((se[below] ** 2).mean()),
            "se_plain": plain.loc[row.Index, "se"],
            "variance_ratio": (row.se_plain / row.se) ** 2,
            "gap_rms": np.sqrt((gap**2).mean()),
            "gap_max": np.abs(gap).max(),
            "monotonicity": (np.mean(pairs) + 1) / 2,
            "distances": 9,
            "rises": (own["step"] > threshold).sum(),
            "falls": (own["step"] < -threshold).sum(),
            "falling_cells": len(falling),
            "fall": np.mean(falls[0]) if falling else np.nan,
            "theory_fall": np.mean(falls[1]) if falling else np.nan,
        }
        for column, value in expected.items():
            found = getattr(row, column)
            assert found == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), column
    assert table["falling_cells"].max() > 0
    assert (table["variance_ratio"] > 1).any()
    assert list(table["verdict"].isin(["flat", "not increasing"])) == [True] * 4


def test_lines_of_theory_are_in_the_panel_of_their_layers_dots_and_noise_is_drawn_flat() -> None:
    x = np.arange(5.0)
    values = np.stack([1 + 1e-8 * np.arange(5), np.arange(5.0)])
    curves = Curves(x=x, values=values, errors=np.full((2, 5), 2e-3), theory=values + 1e-3)
    figure = simulated_curves({"alpha=0": curves}, title="", x_title="", y_title="")
    line, dots = figure.data[2:]
    assert (line.mode, dots.mode) == ("lines", "markers")
    assert line.xaxis == dots.xaxis == "x2"
    assert list(dots.error_y.array) == [2e-3] * 5
    assert list(line.y - dots.y) == pytest.approx([1e-3] * 5)
    low, high = figure.layout.yaxis.range
    assert (high - low, (high + low) / 2) == pytest.approx((10 * 8 * 1e-3, 1), rel=1e-2)
    assert figure.layout.yaxis2.range is None
    assert [note.text for note in figure.layout.annotations] == ["L0: flat, within noise", "L1"]
    assert figure.layout.xaxis2.matches == "x"


def test_a_simulation_tells_of_each_alpha_the_layers_in_which_nearer_keys_score_higher() -> None:
    verdicts = ["flat", "increasing", "not increasing", "flat", "increasing", "increasing"]
    layers = pd.DataFrame({"alpha": [0.0] * 3 + [0.2] * 3, "layer": [0, 1, 2] * 2})
    lead = headline(layers.assign(verdict=verdicts))
    assert lead.sentence == ("Nearer keys score higher in L1 at alpha = 0, L1, L2 at alpha = 0.2.")
    assert lead.table.iloc[2].tolist() == ["in L2", "do not always score higher", "score higher"]


def test_theory_needs_the_maps_that_the_mean_field_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nope_probe.run.processes.free_memory", lambda: 16 * 10**9)
    with pytest.raises(
        UserError, match=r"at least 25\.1 GB of memory, and 16\.0 GB are free; lower"
    ):
        simulation_study.print_critical_alphas(TheorySettings(seq_len=4096))


def test_the_command_prints_the_alpha_above_which_each_layer_increases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_command(theory, "--n-layers", 3, "--alpha", 0.01)
    printed = capsys.readouterr().out
    assert "L2: increases in j above alpha = 0.0104" in printed
    assert "smallest step -8.4" in printed
