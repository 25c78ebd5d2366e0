"""The circuit command as a user types it: the run's files, its output, its refusals."""

import json
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support.chromium import needs_chromium, opened
from support.command_line import refused, run_command

from nope_probe import circuit
from nope_probe.experiments.circuit.sections import _side_by_side
from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.reading.capture import capture_stages
from nope_probe.hooks.removing.edited_weights import plain_norms

N = 19
SMALL = ["--n-seqs", "23", "--seq-len", str(N), "--folds", "5", "--batch-size", "7"]


@pytest.fixture(scope="module")
def without_mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mlp"
    run_command(circuit, *SMALL, "--remove", "mlp", "--out", str(out))
    return out


@pytest.fixture(scope="module")
def model() -> Any:
    from nope_probe.models.load import load

    return load("nope-tiny").model


def maps_of(out: Path) -> dict[str, np.ndarray]:
    return load_file(out / "maps.safetensors")


def manifest_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


def tokens_of(out: Path) -> torch.Tensor:
    return torch.from_numpy(load_file(out / "tokens.safetensors")["tokens"])


def test_maps_on_disk_are_those_of_capture_stages(without_mlp: Path, model: Any) -> None:
    maps, tokens = maps_of(without_mlp), tokens_of(without_mlp)
    intact = capture_stages(model, tokens, n_folds=5)
    with ablated(model, Ablation(remove=["mlp"])):
        shown = capture_stages(model, tokens, n_folds=5)
    kinds = ("gram", "normalised", "se", "reference")
    assert maps.keys() == {f"{kind}/{letter}" for kind in kinds for letter in "abcdefghi"}
    for letter in shown.folds:
        for kind, truth in (("gram", shown), ("reference", intact)):
            seen = maps[f"{kind}/{letter}"]
            assert seen.shape == (N, N)
            assert seen.dtype == np.float32
            expected = truth.mean(letter).numpy()
            assert np.array_equal(np.isnan(seen), np.isnan(expected))
            gap = np.nanmax(np.abs(seen - expected))
            assert gap <= 1e-5 * np.nanmax(np.abs(expected))


def test_normalised_maps_are_the_maps_less_each_diagonals_mean(without_mlp: Path) -> None:
    maps = maps_of(without_mlp)
    for letter in "abcdefghi":
        gram, normalised = maps[f"gram/{letter}"], maps[f"normalised/{letter}"]
        for lag in range(1 - N, N):
            diagonal = np.diagonal(gram, lag)
            np.testing.assert_allclose(
                np.diagonal(normalised, lag), diagonal - diagonal.mean(), rtol=1e-4, atol=1e-4
            )


def test_removing_the_mlp_leaves_the_residual_stream_as_it_was(without_mlp: Path) -> None:
    maps = maps_of(without_mlp)
    np.testing.assert_allclose(maps["gram/g"], maps["gram/e"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(maps["gram/f"], maps["reference/f"], rtol=1e-5, atol=1e-5)
    assert np.abs(maps["reference/g"] - maps["reference/e"]).max() > 10


def test_errors_are_those_of_the_fold_means(without_mlp: Path, model: Any) -> None:
    saved = load_file(without_mlp / "tokens.safetensors")
    documents = torch.from_numpy(saved["documents"])
    maps = capture_stages(model, tokens_of(without_mlp), n_folds=5, documents=documents)
    weights, folds = (maps.counts / maps.counts.sum()).numpy(), maps.folds["e"].numpy()
    # The delete-one-fold jackknife: m_(f), the mean without a fold, is m + w (m - m_f) / (1 - w),
    # and with h = 1 / w its variance is sum_f (m_(f) - m)^2 (h - 1) / F.
    mean = np.einsum("f,fqk->qk", weights, folds)
    moved = (weights / (1 - weights))[:, None, None] * (mean - folds)
    variance = np.einsum("f,fqk->qk", 1 / weights - 1, moved**2) / 5
    np.testing.assert_allclose(maps_of(without_mlp)["se/e"], variance**0.5, rtol=1e-4, atol=1e-6)


def test_scores_are_blank_above_the_diagonal_and_gram_maps_are_symmetric(
    without_mlp: Path,
) -> None:
    maps = maps_of(without_mlp)
    above = np.triu(np.ones((N, N), bool), 1)
    for letter in "abcdefghi":
        values = maps[f"gram/{letter}"]
        if letter in "bi":
            assert np.array_equal(np.isnan(values), above)
        else:
            np.testing.assert_allclose(values, values.T, rtol=1e-5)


def test_a_run_holds_every_file_whose_checksum_is_in_its_manifest(without_mlp: Path) -> None:
    manifest = manifest_of(without_mlp)
    names = {path.name for path in without_mlp.iterdir()} - {"manifest.json"}
    assert set(manifest["checksums"]) == names
    arrays = {"maps.safetensors", "tokens.safetensors", "folds.safetensors"}
    assert names == {*arrays, "stages.csv", "report.html"}
    assert manifest["removed"] == ["mlp"]
    table = pd.read_csv(without_mlp / "stages.csv")
    assert list(table["stage"]) == list("abcdefghi") * 2
    assert list(table["layer"]) == [0, 0, 0, 0, 0, 0, 0, 1, 1] * 2
    assert list(table["model"].unique()) == ["intact", "ablated"]


def test_the_last_layer_has_a_to_g_and_is_named_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(circuit, *SMALL, "--layer", "3", "--out", str(tmp_path / "run"))
    grams = {name[-1] for name in maps_of(tmp_path / "run") if name.startswith("gram/")}
    assert grams == set("abcdefg")
    last = "L3 is the last, so there is no next layer: (h) and (i) do not exist."
    assert last in capsys.readouterr().out
    assert last in (tmp_path / "run" / "report.html").read_text()


def test_a_layers_h_and_i_are_the_next_layers_a_and_b(tmp_path: Path) -> None:
    for layer in ("2", "3"):
        run_command(circuit, *SMALL, "--layer", layer, "--out", str(tmp_path / layer))
    second, third = (maps_of(tmp_path / layer) for layer in ("2", "3"))
    for ours, theirs in (("h", "a"), ("i", "b")):
        np.testing.assert_allclose(second[f"gram/{ours}"], third[f"gram/{theirs}"], rtol=1e-5)


def test_a_finished_run_is_shown_again_and_not_recomputed(
    without_mlp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (without_mlp / "manifest.json").read_bytes()
    monkeypatch.setattr("nope_probe.experiments.circuit.run.capture", None)
    run_command(circuit, *SMALL, "--remove", "mlp", "--out", str(without_mlp))
    shown = " ".join(capsys.readouterr().out.split())
    for sentence in manifest_of(without_mlp)["headline"]:
        assert sentence in shown
    assert (without_mlp / "manifest.json").read_bytes() == before


def test_without_the_mask_there_are_scores_of_later_keys_and_circuits_are_their_weights(
    tmp_path: Path,
) -> None:
    run_command(circuit, *SMALL, "--remove", "qk", "mask", "--out", str(tmp_path / "run"))
    maps = maps_of(tmp_path / "run")
    assert np.isfinite(maps["gram/b"]).all()
    assert np.isnan(maps["reference/b"]).any()
    assert manifest_of(tmp_path / "run")["removed"] == ["mask", "w_q", "w_k"]


def test_a_parameter_free_model_takes_gaussian_vectors_and_has_no_ffn(tmp_path: Path) -> None:
    chosen = ["--model", "parameter-free", "--data", "gaussian", "--alpha", "0.2"]
    run_command(circuit, *SMALL, *chosen, "--out", str(tmp_path / "run"))
    maps, absent = maps_of(tmp_path / "run"), manifest_of(tmp_path / "run")["absent"]
    assert {name[-1] for name in maps} == set("abcdghi")
    assert absent.keys() == {"e", "f"}
    assert "no FFN" in absent["e"]
    np.testing.assert_allclose(np.diagonal(maps["gram/b"]), 1, rtol=1e-5)  # unit vectors


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_folders_go_through_bridges(
    name: str,
    tmp_path: Path,
    tiny: Callable[[str], Any],
) -> None:
    text = "the quick brown fox jumps over the lazy dog and runs away from here. "
    texts = pd.DataFrame({"text": [f"{number} {text * 4}" for number in range(11)]})
    texts.to_json(tmp_path / "text.jsonl", orient="records", lines=True)
    chosen = ["--model", str(tiny(name).folder), "--data", str(tmp_path / "text.jsonl")]
    run_command(circuit, *SMALL, *chosen, "--out", str(tmp_path / "run"))
    maps, manifest = maps_of(tmp_path / "run"), manifest_of(tmp_path / "run")
    has = {entry.removeprefix("gram/") for entry in maps if entry.startswith("gram/")}
    assert has == set("abcdghi" if name == "gemma2" else "abcdefghi")
    assert set(manifest["absent"]) == set("abcdefghi") - has
    stages = set(pd.read_csv(tmp_path / "run" / "stages.csv")["stage"])
    assert stages == has


BAD = {
    "no such layer": (["--layer", "5"], "has 4 layers, L0 to L3; there is no --layer 5"),
    "layers count from 0": (["--layer", "-1"], "--layer -1: expected 0 <= layer <= 999"),
    "an unknown component": (["--remove", "w_x"], "'w_x'"),
    "a component the model lacks": (
        ["--remove", "rope"],
        "the model has no rope; it has mask, w_q, w_k, w_o, w_v, mlp",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    case: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments, message = BAD[case]
    assert message in refused(capfd, tmp_path, circuit, *arguments)


@needs_chromium
def test_a_browser_draws_the_report_without_an_error(without_mlp: Path, tmp_path: Path) -> None:
    report = without_mlp / "report.html"
    elements = opened(report.read_text(), tmp_path)
    assert elements.count('class="plot js-plotly-plot"') == 3
    assert "less diagonal means" in elements
    assert "Stage by stage: intact, ablated, difference" in elements
    assert report.stat().st_size < 15e6


def test_removing_the_norms_weights_compares_with_the_intact_model(tmp_path: Path, model: Any):
    out = tmp_path / "run"
    run_command(circuit, *SMALL, "--remove", "norms", "mlp", "--out", str(out))
    assert manifest_of(out)["removed"] == ["mlp", "norms"]
    tokens = torch.from_numpy(load_file(out / "tokens.safetensors")["tokens"])
    with plain_norms(model), ablated(model, Ablation(remove=["mlp"])):
        truth = capture_stages(model, tokens, n_folds=5)
    maps = maps_of(out)
    for letter in ("f", "h"):
        np.testing.assert_allclose(maps[f"gram/{letter}"], truth.mean(letter), rtol=1e-4, atol=1e-4)
        assert np.abs(maps[f"gram/{letter}"] - maps[f"reference/{letter}"]).max() > 0.1
    page = unescape((out / "report.html").read_text())
    assert "without the MLPs and the norms' weights" in page
    assert "without MLP + norm weights" in page


def test_the_page_shows_each_stage_of_both_models_on_one_scale_beside_their_difference() -> None:
    random = np.random.default_rng(0)
    maps = {
        f"{kind}/{letter}": (1 + 19 * (letter == "g")) * random.normal(size=(N, N))
        for kind in ("gram", "reference")
        for letter in "ag"
    }
    [section] = _side_by_side(maps, ("mask",))
    figure = section.drawn()
    assert figure is not None
    panels = figure.data
    names = ["(a) intact", "(a) ablated", "(a) difference"]
    assert [panel.name for panel in panels[:3]] == names
    for index, letter in enumerate("ag"):
        intact, ablated, change = panels[3 * index : 3 * index + 3]
        np.testing.assert_allclose(intact.z, maps[f"reference/{letter}"], rtol=1e-6)
        np.testing.assert_allclose(change.z, ablated.z - intact.z, atol=1e-5)
        scales = [figure.layout[panel.coloraxis] for panel in (intact, ablated, change)]
        assert (scales[0].cmin, scales[0].cmax) == (scales[1].cmin, scales[1].cmax)
        assert scales[2].cmin == -scales[2].cmax
    tops = [figure.layout[panels[index].coloraxis].cmax for index in (0, 3)]
    assert tops[1] > 10 * tops[0], "stages that differ twentyfold do not share colours"
    assert not [*_side_by_side({"gram/a": np.eye(N)}, ())]
