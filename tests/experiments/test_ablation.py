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

from nope_probe import ablate, load
from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.maps.centred import row_centred

SMALL = ["--n-seqs", "24", "--seq-len", "19", "--folds", "4", "--batch-size", "11"]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "default"
    run_command(ablate, *SMALL, "--out", str(out))
    return out


def manifest_of(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def test_a_run_holds_every_file_whose_checksum_is_in_its_manifest(default_run: Path):
    manifest = manifest_of(default_run)
    names = {path.name for path in default_run.iterdir()} - {"manifest.json"}
    assert set(manifest["checksums"]) == names
    assert {"maps.safetensors", "folds.safetensors", "tokens.safetensors"} < names
    assert {"sources.csv", "players.csv", "interactions.csv", "pattern.csv"} < names
    assert manifest["complete"]
    assert manifest["model"]["rope_layers"] == [True] * 4
    assert manifest["model"]["parity"]["logits"] < 1e-4


def test_the_default_player_sets_are_five_single_players_and_the_circuits(default_run: Path):
    players = pd.read_csv(default_run / "players.csv")
    by_set = players.groupby("player_set")["player"].unique().map(list).to_dict()
    assert by_set == {
        "players": ["mask", "rope", "w_q", "w_k", "w_o"],
        "circuits": ["mask", "rope", "qk", "ov"],
    }


def test_every_condition_has_a_map_named_by_what_it_keeps(default_run: Path):
    maps = load_file(default_run / "maps.safetensors")
    scores = [name.removeprefix("score/") for name in maps if name.startswith("score/")]
    assert len(scores) == 32 + 8
    assert {"mask+rope+w_q+w_k+w_o+w_v", "rope+w_q+w_k+w_o+w_v", "w_v", "none"} < set(scores)
    assert all(array.shape == (4, 19, 19) for array in maps.values())
    assert all(array.dtype == np.float32 for array in maps.values())


def test_a_maps_cells_are_blank_above_the_diagonal_unless_the_mask_is_off(default_run: Path):
    maps = load_file(default_run / "maps.safetensors")
    above = np.triu(np.ones((19, 19), bool), 1)
    intact = maps["score/mask+rope+w_q+w_k+w_o+w_v"]
    assert np.isnan(intact[:, above]).all()
    assert np.isfinite(intact[:, ~above]).all()
    assert np.isfinite(maps["score/rope+w_q+w_k+w_o+w_v"]).all()


def test_the_maps_on_disk_are_those_of_the_ablated_model(default_run: Path):
    from nope_probe.models.load import load

    model = load("rope-tiny").model
    tokens = torch.from_numpy(load_file(default_run / "tokens.safetensors")["tokens"])
    maps = load_file(default_run / "maps.safetensors")
    gains = calibrate(model, tokens)
    with ablated(model, Ablation(remove=["rope", "w_q"]), gains):
        truth = capture_scores(model, tokens, n_folds=4).mean.numpy()
    ours = maps["score/mask+w_k+w_o+w_v"]
    assert np.nanmax(np.abs(ours - truth)) < 1e-5 * np.nanmax(np.abs(truth))


KEPT = np.tril(np.ones((19, 19), bool), -1) & (np.arange(19) > 0)  # the BOS key is left out


def centred(score: np.ndarray) -> np.ndarray:
    means = np.where(KEPT, score, 0).sum(-1, keepdims=True) / np.maximum(KEPT.sum(-1)[:, None], 1)
    return score - means


def test_the_page_gets_finished_patterns(default_run: Path):
    maps = load_file(default_run / "maps.safetensors")
    for name, scores in {
        "all": "score/mask+rope+w_q+w_k+w_o+w_v",
        "mean_term": "mean_covariance/mean",
        "covariance_term": "mean_covariance/covariance",
    }.items():
        pattern, truth = maps[f"pattern/{name}"], centred(maps[scores])
        assert np.array_equal(np.isfinite(pattern), np.broadcast_to(KEPT, pattern.shape))
        np.testing.assert_allclose(pattern[:, KEPT], truth[:, KEPT], atol=1e-4)


def test_sources_and_shapley_maps_add_up_on_disk(default_run: Path):
    maps = load_file(default_run / "maps.safetensors")
    pattern = centred(maps["score/mask+rope+w_q+w_k+w_o+w_v"])[:, KEPT]
    sources = sum(maps[f"source/{term}"] for term in ("content", "mask", "rope", "mask_x_rope"))
    np.testing.assert_allclose(sources[:, KEPT], pattern, atol=1e-4)
    neither = centred(maps["score/w_q+w_k+w_o+w_v"])[:, KEPT]
    players = {
        "shapley": ("mask", "rope", "w_q", "w_k", "w_o"),
        "shapley_circuits": ("mask", "rope", "qk", "ov"),
    }
    for prefix, names in players.items():
        shapley = sum(maps[f"{prefix}/{name}"] for name in names)
        np.testing.assert_allclose(shapley[:, KEPT], pattern - neither, atol=1e-4)


def test_players_without_a_source_have_a_base_with_which_they_add_up(tmp_path: Path):
    chosen = ["--players", "w_q", "w_k", "--layers", "2", "--data", "random"]
    run_command(ablate, *SMALL, *chosen, "--out", str(tmp_path / "run"))
    maps = load_file(tmp_path / "run" / "maps.safetensors")
    added = sum(maps[f"shapley/{name}"] for name in ("w_q", "w_k", "base"))
    np.testing.assert_allclose(added[:, KEPT], maps["pattern/all"][:, KEPT], atol=1e-4)
    players = pd.read_csv(tmp_path / "run" / "players.csv").query("layer == 1")
    assert list(players["player"]) == ["w_q", "w_k", "base"]
    assert players["share"].sum() == pytest.approx(1)
    assert players["alone"].isna().all()


def test_packed_folds_average_to_the_map(default_run: Path):
    folds = load_file(default_run / "folds.safetensors")["score/rope+w_q+w_k+w_o+w_v"]
    score = load_file(default_run / "maps.safetensors")["score/rope+w_q+w_k+w_o+w_v"]
    assert folds.shape == (4, 4, 19 * 20 // 2)
    row, column = np.tril_indices(19)
    np.testing.assert_allclose(folds.mean(0), score[:, row, column], rtol=1e-4, atol=1e-5)


def test_the_mask_and_w_o_change_no_score_of_the_first_layer(default_run: Path):
    maps = load_file(default_run / "maps.safetensors")
    below = np.tril(np.ones((19, 19), bool))
    intact = maps["score/mask+rope+w_q+w_k+w_o+w_v"][:, below]
    for kept in ("rope+w_q+w_k+w_o+w_v", "mask+rope+w_q+w_k+w_v"):
        without = maps[f"score/{kept}"][:, below]
        np.testing.assert_allclose(without[0], intact[0], rtol=1e-5, atol=1e-6)
        assert np.abs(without[1] - intact[1]).max() > 0.01


def test_a_finished_run_is_shown_again_and_not_recomputed(
    default_run: Path, capsys: pytest.CaptureFixture[str]
):
    before = (default_run / "manifest.json").read_bytes()
    run_command(ablate, *SMALL, "--out", str(default_run))
    shown = capsys.readouterr().out
    assert "the sources of the positional pattern" in shown
    assert "mask x rope" in shown
    assert (default_run / "manifest.json").read_bytes() == before


def test_a_run_does_not_depend_on_the_batch_size(tmp_path: Path):
    few = ["--players", "sources", "--n-seqs", "13", "--seq-len", "17", "--folds", "4"]
    for size in ("3", "13"):
        run_command(ablate, *few, "--batch-size", size, "--out", str(tmp_path / size))
    three, all_at_once = (load_file(tmp_path / size / "folds.safetensors") for size in ("3", "13"))
    assert three.keys() == all_at_once.keys()
    for name, folds in three.items():
        np.testing.assert_allclose(folds, all_at_once[name], rtol=1e-5, atol=1e-6)


def test_sources_alone_run_no_condition_of_players(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    nope = ["--model", "nope-tiny", "--players", "sources"]
    run_command(ablate, *SMALL, *nope, "--out", str(tmp_path / "run"))
    # Two conditions, on text and on shuffled tokens.
    said = capsys.readouterr().err.splitlines()
    assert "running 2 conditions in 4 passes over 24 sequences" in said
    maps = load_file(tmp_path / "run" / "maps.safetensors")
    scores = {name for name in maps if name.startswith("score/")}
    assert scores == {"score/mask", "score/none"}
    assert {"source/content", "source/mask"} < set(maps)
    for name in ("players", "interactions"):
        table = pd.read_csv(tmp_path / "run" / f"{name}.csv")
        assert len(table) == 0
        assert {"layer", "player_set", "share", "share_low", "share_high"} < set(table)


@pytest.mark.parametrize("name", ["shuffled_books.jsonl", "random.jsonl"])
def test_a_files_name_does_not_say_what_its_tokens_are(name: str, tmp_path: Path):
    words = np.random.default_rng(0).choice(["def", "return", "while", "x", "="], (11, 200))
    texts = [json.dumps({"text": " ".join(row)}) for row in words]
    (tmp_path / name).write_text("\n".join(texts))
    chosen = ["--players", "sources", "--layers", "2", "--data", tmp_path / name]
    small = ["--n-seqs", "8", "--seq-len", "11", "--folds", "4"]
    run_command(ablate, *small, *chosen, "--out", tmp_path / "run")
    rows = pd.read_csv(tmp_path / "run" / "non_relative.csv")
    assert rows["tokens"].tolist() == ["text", "text", "shuffled", "shuffled"]


def test_players_can_be_unions_and_have_a_range_over_reparametrisations(tmp_path: Path):
    chosen = ["--players", "rope", "w_q+mlp", "w_k", "--reparametrise", "1", "--layers", "2"]
    run_command(ablate, *SMALL, *chosen, "--out", str(tmp_path / "run"))
    players = pd.read_csv(tmp_path / "run" / "players.csv").set_index(["layer", "player"])
    w_k = players.loc[(1, "w_k")]
    assert w_k["lost_reparametrised_min"] < w_k["lost_reparametrised_max"]
    assert w_k["lost_reparametrised_min"] <= w_k["lost"] <= w_k["lost_reparametrised_max"]
    assert list(players.loc[0].index) == ["rope", "w_q+mlp", "w_k"]


PLAYERS = {
    "halves of RoPE": ["--players", "mask", "rope_high", "rope_low", "w_q"],
    "one half": ["--players", "mask", "rope_high"],
    "all pairs by number": ["--players", "rope[0:3]", "rope[3:8]+mask"],
    "bands": ["--bands", "3"],
    "replacements": ["--bands", "2", "--players", "rope", "qk", "--replacement", "mean", "zero"],
    "own layer": ["--bands", "2", "--scope", "own"],
    "reparametrised": ["--bands", "2", "--players", "rope", "w_k", "--reparametrise", "1"],
    "sources": ["--players", "sources"],
}


@pytest.mark.parametrize("case", PLAYERS)
def test_the_pages_explorer_shows_the_model_without_what_is_switched_off(case: str, tmp_path: Path):
    small = ["--n-seqs", "8", "--seq-len", "11", "--folds", "4", "--layers", "2"]
    run_command(ablate, *small, *PLAYERS[case], "--out", tmp_path / "run")
    manifest, explorer = manifest_of(tmp_path / "run"), explorer_on(tmp_path / "run")
    shown = patterns_in(explorer, n_layers=2)
    players = [each["components"] for each in explorer["players"]]
    assert len(shown) == 2 ** len(players)
    tokens = torch.from_numpy(load_file(tmp_path / "run/tokens.safetensors")["tokens"])
    model = load("rope-tiny", n_layers=2).model
    gains, settings = calibrate(model, tokens), manifest["settings"]
    for number, patterns in enumerate(shown):
        removed = [name for bit, each in enumerate(players) if number >> bit & 1 for name in each]
        for layer, pattern in enumerate(patterns):
            where = {"both": None, "own": [layer], "upstream": list(range(layer))}
            ablation = Ablation(
                remove=removed,
                layers=where[settings["scope"]],
                replacement=settings["replacement"][0],
            )
            with ablated(model, ablation, gains if ablation.needs_calibration else None):
                scores = capture_scores(model, tokens, n_folds=4)
            expected = row_centred(scores.mean, manifest["skip_keys"])[layer].numpy()
            step = np.nanmax(np.abs(expected)) / 32767
            np.testing.assert_allclose(pattern, expected, atol=step + 1e-5)
    names = manifest["conditions"]
    assert len(names) == len({*names})


def explorer_on(out: Path) -> dict[str, Any]:
    [frame] = re.findall(r'srcdoc="([^"]*)"', (out / "report.html").read_text("utf-8"))
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    [content] = re.findall(pattern, unescape(frame), re.S)
    return json.loads(content)


def patterns_in(explorer: dict[str, Any], n_layers: int) -> np.ndarray:
    """Return the patterns [combination, layer, query_pos, key_pos] that an explorer draws."""
    [view] = explorer["views"]
    assert [each["shape"] for each in view["panels"]] == ["below"]
    codes = np.frombuffer(b64decode(view["cells"]), "<i2").astype(float)
    codes[codes == -32768] = np.nan
    offsets = np.frombuffer(b64decode(view["offsets"]), "<u4").astype(int)
    scales = np.frombuffer(b64decode(view["scales"]), "<f4")
    below = np.tri(view["n"], k=-1, dtype=bool)
    maps = np.full((len(offsets), *below.shape), np.nan)
    for place, (offset, scale) in enumerate(zip(offsets, scales, strict=True)):
        maps[place][below] = codes[offset : offset + below.sum()] * scale
    return maps.reshape(-1, n_layers, *below.shape)


def test_a_scope_limits_the_layers_in_which_a_removal_acts(tmp_path: Path):
    for scope in ("own", "upstream"):
        chosen = ["--players", "mask", "w_q", "--scope", scope, "--layers", "2"]
        run_command(ablate, *SMALL, *chosen, "--out", str(tmp_path / scope))
    own, upstream = (
        load_file(tmp_path / scope / "maps.safetensors") for scope in ("own", "upstream")
    )
    below = np.tril(np.ones((19, 19), bool))

    def change(maps: dict[str, np.ndarray], kept: str, layer: int) -> float:
        return float(
            np.abs(maps[f"score/{kept}"] - maps["score/mask+rope+w_q"])[layer, below].max()
        )

    without_mask, without_w_q = "rope+w_q", "mask+rope"
    assert change(own, without_mask, layer=1) < 1e-5  # in its own layer the mask moves no score
    assert change(own, without_w_q, layer=0) > 0.01
    assert change(upstream, without_w_q, layer=0) == 0  # nothing lies before layer 1
    assert change(upstream, without_mask, layer=1) > 0.01


def test_a_parameter_free_model_takes_gaussian_vectors(tmp_path: Path):
    model = ["--model", "parameter-free", "--data", "gaussian", "--alpha", "0.2"]
    run_command(ablate, *SMALL, *model, "--out", str(tmp_path / "run"))
    sources = pd.read_csv(tmp_path / "run" / "sources.csv").set_index(["layer", "term"])
    assert sources.loc[(2, "mask"), "share"] > 0.9
    vectors = load_file(tmp_path / "run" / "tokens.safetensors")["vectors"]
    assert vectors.shape == (24, 19, 64)


def test_the_report_loads_nothing_and_has_the_headline(default_run: Path):
    page = (default_run / "report.html").read_text()
    assert "the positional pattern of attention prefers near keys" in page
    assert 'src="http' not in page
    assert len(page) < 15e6


BAD = {
    "fewer sequences than folds": (["--n-seqs", "7"], "7 sequences do not fill 8 folds"),
    "a player the model lacks": (
        ["--model", "nope-tiny", "--players", "mask", "rope"],
        "the model has no rope; it has mask, w_q, w_k, w_o, w_v, mlp",
    ),
    "an unknown player": (["--players", "w_x"], "unknown player 'w_x'"),
    "overlapping players": (["--players", "qk", "w_q"], "--players: qk and w_q share w_q"),
    "too few windows": (
        ["--n-seqs", "99999"],
        r"documents of 63 tokens or more give \d+ sequences",
    ),
    "a missing device": (["--device", "cuda:7"], "no device 'cuda:7' on this machine"),
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
