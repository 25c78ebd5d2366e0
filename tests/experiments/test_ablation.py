"""The ablate command as a user types it: the run's files, its output, its refusals."""

import json
import re
from base64 import b64decode
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support.command_line import refused, run_command
from support.rounding import MEASURE, NETWORK, assert_same

from nope_probe import ablate, load
from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.maps.centred import row_centred

N = 13
SMALL = ["--n-seqs", "16", "--seq-len", str(N), "--folds", "5", "--batch-size", "11"]
INTACT = "score/mask+rope+w_q+w_k+w_o+w_v"
KEPT = np.tril(np.ones((N, N), bool), -1) & (np.arange(N) > 0)  # the BOS key is left out


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "default"
    run_command(ablate, *SMALL, "--layers", "2", "--out", str(out))
    return out


@pytest.fixture(scope="module")
def maps(default_run: Path) -> dict[str, np.ndarray]:
    return load_file(default_run / "maps.safetensors")


def manifest_of(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def test_a_run_holds_every_file_whose_checksum_is_in_its_manifest(default_run: Path):
    manifest = manifest_of(default_run)
    names = {path.name for path in default_run.iterdir()} - {"manifest.json"}
    assert set(manifest["checksums"]) == names
    assert {"maps.safetensors", "folds.safetensors", "tokens.safetensors"} < names
    assert {"sources.csv", "players.csv", "interactions.csv", "pattern.csv"} < names
    assert manifest["complete"]
    assert manifest["model"]["rope_layers"] == [True] * 2
    assert manifest["model"]["parity"]["logits"] < 1e-4
    players = pd.read_csv(default_run / "players.csv")
    assert players.groupby("player_set")["player"].unique().map(list).to_dict() == {
        "players": ["mask", "rope", "w_q", "w_k", "w_o"],
        "circuits": ["mask", "rope", "qk", "ov"],
    }
    page = (default_run / "report.html").read_text()
    assert "RoPE makes the positional pattern of L1: " in page
    assert '<th scope="row">W_Q and W_K</th>' in page
    assert 'src="http' not in page
    assert len(page) < 15e6


def test_every_condition_has_a_map_named_by_what_it_keeps(maps: dict[str, np.ndarray]):
    scores = [name.removeprefix("score/") for name in maps if name.startswith("score/")]
    assert len(scores) == 32 + 8
    assert {INTACT.removeprefix("score/"), "rope+w_q+w_k+w_o+w_v", "w_v", "none"} < set(scores)
    assert {(array.shape, array.dtype.name) for array in maps.values()} == {((2, N, N), "float32")}
    below = np.tri(N, dtype=bool)
    assert np.array_equal(np.isfinite(maps[INTACT]), [below] * 2)
    assert np.isfinite(maps["score/rope+w_q+w_k+w_o+w_v"]).all()


def centred(score: np.ndarray) -> np.ndarray:
    means = np.where(KEPT, score, 0).sum(-1, keepdims=True) / np.maximum(KEPT.sum(-1)[:, None], 1)
    return score - means


def test_patterns_sources_and_shapley_maps_add_up_on_disk(maps: dict[str, np.ndarray]):
    pattern, neither = (centred(maps[name])[:, KEPT] for name in (INTACT, "score/w_q+w_k+w_o+w_v"))
    terms = [centred(maps[f"mean_covariance/{term}"])[:, KEPT] for term in ("mean", "covariance")]
    sums = [
        (["pattern/all"], pattern),
        (["pattern/mean_term"], terms[0]),
        (["pattern/covariance_term"], terms[1]),
        (["source/content", "source/mask", "source/rope", "source/mask_x_rope"], pattern),
        ([f"shapley/{name}" for name in ("mask", "rope", "w_q", "w_k", "w_o")], pattern - neither),
        ([f"shapley_circuits/{name}" for name in ("mask", "rope", "qk", "ov")], pattern - neither),
    ]
    for names, total in sums:
        added = sum(maps[name] for name in names)
        assert np.array_equal(np.isfinite(added), [KEPT] * 2), names
        assert_same(added[:, KEPT], total, MEASURE)


def test_the_mean_term_is_the_sum_of_rotation_and_what_was_written(default_run: Path):
    table = pd.read_csv(default_run / "mean_covariance.csv")
    shares = table.pivot(index="layer", columns="term", values="share").dropna()
    assert 1 in shares.index
    parts = shares[["rotation", "written_key", "written_query", "written_both"]].sum(axis=1)
    assert_same(parts, shares["mean"])
    assert (shares["mean"] + shares["covariance"]).to_numpy() == pytest.approx(1, abs=NETWORK)
    assert shares.loc[1, "rotation"] > 0.9


def test_a_finished_run_is_shown_again_and_not_recomputed(
    default_run: Path, capsys: pytest.CaptureFixture[str]
):
    before = (default_run / "manifest.json").read_bytes()
    run_command(ablate, *SMALL, "--layers", "2", "--out", str(default_run))
    assert "RoPE makes the positional pattern of L1: " in capsys.readouterr().out
    assert (default_run / "manifest.json").read_bytes() == before


def test_sources_alone_run_no_condition_of_players(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    nope = ["--model", "nope-tiny", "--players", "sources", "--layers", "2"]
    run_command(ablate, *SMALL, *nope, "--out", str(tmp_path / "run"))
    # Two conditions, on text and on shuffled tokens.
    said = capsys.readouterr().err.splitlines()
    assert any(
        line.startswith("running 2 conditions in 4 passes over 16 sequences;") for line in said
    )
    maps = load_file(tmp_path / "run" / "maps.safetensors")
    assert {name for name in maps if name.startswith("score/")} == {"score/mask", "score/none"}
    assert {"source/content", "source/mask"} < set(maps)
    for name in ("players", "interactions"):
        table = pd.read_csv(tmp_path / "run" / f"{name}.csv")
        assert len(table) == 0
        assert {"layer", "player_set", "share", "share_low", "share_high"} < set(table)


def test_a_files_name_does_not_say_what_its_tokens_are(tmp_path: Path):
    words = np.random.default_rng(0).choice(["def", "return", "while", "x", "="], (11, 200))
    file = tmp_path / "random.jsonl"
    file.write_text("\n".join(json.dumps({"text": " ".join(row)}) for row in words))
    chosen = ["--players", "sources", "--layers", "1", "--data", file]
    run_command(ablate, *SMALL, *chosen, "--out", tmp_path / "run")
    rows = pd.read_csv(tmp_path / "run" / "non_relative.csv")
    assert rows["tokens"].tolist() == ["text", "shuffled"]


PLAYERS = {
    "one half": ["--players", "mask", "rope_high"],
    "all pairs by number": ["--players", "rope[0:3]", "rope[3:8]+mask"],
    "bands": ["--bands", "2", "--players", "rope", "qk", "--replacement", "mean", "zero"],
    "a union": ["--players", "mask", "w_q+mlp"],
    "sources": ["--players", "sources"],
}


@pytest.mark.parametrize("case", PLAYERS)
def test_the_pages_explorer_shows_the_model_without_what_is_switched_off(case: str, tmp_path: Path):
    small = ["--n-seqs", "8", "--seq-len", "11", "--folds", "4", "--layers", "2"]
    run_command(ablate, *small, "--data", "random", *PLAYERS[case], "--out", tmp_path / "run")
    manifest, explorer = manifest_of(tmp_path / "run"), explorer_on(tmp_path / "run")
    shown = patterns_in(explorer, n_layers=2)
    players = [player["components"] for player in explorer["players"]]
    assert len(shown) == 2 ** len(players)
    tokens = torch.from_numpy(load_file(tmp_path / "run/tokens.safetensors")["tokens"])
    model = load("rope-tiny", n_layers=2).model
    gains = calibrate(model, tokens)
    for number, patterns in enumerate(shown):
        removed = [name for bit, names in enumerate(players) if number >> bit & 1 for name in names]
        for layer, pattern in enumerate(patterns):
            ablation = Ablation(remove=removed, replacement=manifest["replacements"][0])
            with ablated(model, ablation, gains if ablation.needs_calibration else None):
                scores = capture_scores(model, tokens, n_folds=4)
            expected = row_centred(scores.mean, manifest["skip_keys"])[layer].numpy()
            step = np.nanmax(np.abs(expected)) / 32767
            np.testing.assert_allclose(
                pattern, expected, atol=step + MEASURE * np.nanmax(np.abs(expected))
            )


def explorer_on(out: Path) -> dict[str, Any]:
    [frame] = re.findall(r'srcdoc="([^"]*)"', (out / "report.html").read_text("utf-8"))
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    [content] = re.findall(pattern, unescape(frame), re.S)
    return json.loads(content)


def patterns_in(explorer: dict[str, Any], n_layers: int) -> np.ndarray:
    """Return the patterns [combination, layer, query_pos, key_pos] that an explorer draws."""
    view = explorer["view"]
    codes = np.frombuffer(b64decode(view["cells"]), "<i2").astype(float)
    codes[codes == -32768] = np.nan
    offsets = np.frombuffer(b64decode(view["offsets"]), "<u4").astype(int)
    scales = np.frombuffer(b64decode(view["scales"]), "<f4")
    below = np.tri(view["n"], k=-1, dtype=bool)
    maps = np.full((len(offsets), *below.shape), np.nan)
    for place, (offset, scale) in enumerate(zip(offsets, scales, strict=True)):
        maps[place][below] = codes[offset : offset + below.sum()] * scale
    return maps.reshape(-1, n_layers, *below.shape)


def test_a_parameter_free_model_takes_gaussian_vectors(tmp_path: Path):
    model = ["--model", "parameter-free", "--data", "gaussian", "--alpha", "0.2", "--layers", "3"]
    run_command(ablate, *SMALL, *model, "--out", str(tmp_path / "run"))
    sources = pd.read_csv(tmp_path / "run" / "sources.csv").set_index(["layer", "term"])
    assert sources.loc[(2, "mask"), "share"] > 0.9
    vectors = load_file(tmp_path / "run" / "tokens.safetensors")["vectors"]
    assert vectors.shape == (16, N, 64)


BAD = {
    "a player the model lacks": (
        ["--model", "nope-tiny", "--players", "mask", "rope"],
        "the model has no rope; it has mask, w_q, w_k, w_o, w_v, mlp",
    ),
    "too few windows": (
        ["--n-seqs", "99999"],
        r"documents of 63 tokens or more give \d+ sequences",
    ),
    "weights of a parameter-free model": (
        ["--model", "parameter-free", "--data", "gaussian", "--players", "w_q"],
        "identities already",
    ),
    "a folder without a config": (["--model", "."], "has no config.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    arguments, message = BAD[case]
    assert re.search(message, refused(capfd, tmp_path, ablate, *arguments))
