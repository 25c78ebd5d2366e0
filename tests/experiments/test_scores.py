"""The scores command as a user types it: its maps are those of plain transformers."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from scipy.stats import spearmanr
from support.command_line import refused, run_command
from support.plain_states import plain_states
from support.tiny_models import tokenizer, tokens

from nope_probe import ablate, scores
from nope_probe.experiments.scores.sections import _map_sections
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.runtime.folder import Run

N_SEQS, N_POS, N_FOLDS, N_HEADS = 29, 13, 5, 6
SMALL = ["--n-seqs", "29", "--seq-len", "13", "--folds", "5", "--batch-size", "11"]
WEIGHTS = np.array([6, 6, 6, 6, 5]) / N_SEQS  # of the folds
BELOW = np.tril(np.ones((N_POS, N_POS), bool))
ModelOf = Callable[[str], tuple[Any, str]]


@pytest.fixture(scope="module")
def done(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A per-head run on the folder of a Llama with grouped keys."""
    out = tmp_path_factory.mktemp("runs") / "llama"
    model = ["--model", str(tiny("llama").folder), "--layers", "2", "--data", "random"]
    run_command(scores, *SMALL, *model, "--per-head", "--out", str(out))
    return out


@pytest.fixture(scope="module")
def truth(done: Path, tiny: Callable[[str], Any]) -> np.ndarray:
    """Plain transformers' scores of the run's tokens: [layer, seq, head, query, key]."""
    windows = torch.from_numpy(load_file(done / "tokens.safetensors")["tokens"])
    states = plain_states(tiny("llama").hf, windows)
    return torch.stack([each.scores().double() for each in states]).numpy()


def close(seen: np.ndarray, true: np.ndarray) -> bool:
    error = np.abs(seen - true)[..., BELOW].max()
    return bool(error <= 1e-5 * np.abs(true[..., BELOW]).max())


def test_maps_are_the_mean_of_plain_transformers_scores(done: Path, truth: np.ndarray):
    maps = load_file(done / "maps.safetensors")
    assert set(maps) == {"score", "se", "normalised", "score_per_head"}
    assert maps["score"].shape == (2, N_POS, N_POS)
    assert maps["score_per_head"].shape == (2, N_HEADS, N_POS, N_POS)
    assert close(maps["score"], truth.mean((1, 2)))
    assert close(maps["score_per_head"], truth.mean(1))
    for each in maps.values():
        assert each.dtype == np.float32
        assert np.isnan(each[..., ~BELOW]).all()
        assert np.isfinite(each[..., BELOW]).all()


def test_standard_errors_come_from_the_variance_between_folds(done: Path, truth: np.ndarray):
    per_seq = truth.mean(2)
    folds = np.stack([per_seq[:, fold::N_FOLDS].mean(1) for fold in range(N_FOLDS)])
    squares = (folds - per_seq.mean(1)) ** 2  # of folds of 6, 6, 6, 6 and 5 sequences
    odds = WEIGHTS / (1 - WEIGHTS)
    se = (np.einsum("f,f...->...", odds, squares) / N_FOLDS) ** 0.5
    seen = load_file(done / "maps.safetensors")["se"]
    np.testing.assert_allclose(seen[:, BELOW], se[:, BELOW], rtol=1e-3, atol=1e-6)


def test_a_normalised_map_is_the_score_map_less_each_diagonals_mean(done: Path):
    maps = load_file(done / "maps.safetensors")
    for score, normalised in zip(maps["score"], maps["normalised"], strict=True):
        for lag in range(N_POS):
            diagonal = np.diagonal(score, -lag)
            np.testing.assert_allclose(
                np.diagonal(normalised, -lag), diagonal - diagonal.mean(), atol=1e-5
            )


def test_tables_have_a_row_per_layer_and_per_head(done: Path):
    pattern, heads = pd.read_csv(done / "pattern.csv"), pd.read_csv(done / "heads.csv")
    assert list(pattern["layer"]) == [0, 1]
    rows = heads[["layer", "head"]].to_numpy().tolist()
    assert rows == [[layer, head] for layer in (0, 1) for head in range(N_HEADS)]
    for name in ("amplitude", "locality", "edge_contrast"):
        known = heads.dropna(subset=[name])
        assert len(known) == 2 * N_HEADS
        assert (known[f"{name}_low"] <= known[name]).all()
        assert (known[name] <= known[f"{name}_high"]).all()


def test_a_heads_amplitude_is_that_of_its_own_map(done: Path, truth: np.ndarray):
    heads = pd.read_csv(done / "heads.csv").set_index(["layer", "head"])
    folds = np.stack([truth[1, fold::N_FOLDS, 3].mean(0) for fold in range(N_FOLDS)])
    rows = [folds[:, i, 1:i] for i in range(2, N_POS)]  # the BOS key is left out
    centred = np.concatenate([row - row.mean(-1, keepdims=True) for row in rows], -1)
    gram = centred @ centred.T / centred.shape[-1]
    pairs = np.outer(WEIGHTS, WEIGHTS) * (1 - np.eye(N_FOLDS))
    square = (gram * pairs).sum() / pairs.sum()
    amplitude = np.sign(square) * np.abs(square) ** 0.5
    assert heads.loc[(1, 3), "amplitude"] == pytest.approx(amplitude, rel=1e-4)


def test_the_manifest_records_every_files_checksum_and_the_settings(done: Path):
    manifest = json.loads((done / "manifest.json").read_text())
    assert set(manifest["checksums"]) == {p.name for p in done.iterdir()} - {"manifest.json"}
    assert manifest["settings"]["per_head"] is True
    assert manifest["skip_keys"] == 1  # the tokenizer forces BOS
    assert manifest["model"]["parity"]["logits"] < 1e-4


@pytest.mark.parametrize("batch_size", [7, 10, 29])
@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gemma2", "hooked:smollm3-nope"])
def test_heads_average_to_the_map_for_every_batch_size(
    spec: str, batch_size: int, model_of: ModelOf
):
    model, _ = model_of(spec)
    windows = tokens(N_SEQS, seed=3)
    maps = capture_scores(model, windows, batch_size=batch_size, n_folds=5, per_head=True)
    assert maps.per_head is not None
    torch.testing.assert_close(
        maps.per_head.double().mean(2), maps.folds, rtol=1e-5, atol=1e-5, equal_nan=True
    )


def test_a_finished_run_is_shown_again_and_not_recomputed(
    done: Path,
    tiny: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
):
    before = (done / "manifest.json").read_bytes()
    model = ["--model", str(tiny("llama").folder), "--layers", "2", "--data", "random"]
    run_command(scores, *SMALL, *model, "--per-head", "--out", str(done))
    shown = " ".join(capsys.readouterr().out.split())
    assert "the positional pattern in the mean scores" in shown
    assert (done / "manifest.json").read_bytes() == before


def test_a_run_without_heads_holds_no_head(tmp_path: Path):
    run_command(scores, *SMALL, "--layers", "1", "--out", str(tmp_path / "run"))
    assert set(load_file(tmp_path / "run" / "maps.safetensors")) == {"score", "se", "normalised"}
    assert not (tmp_path / "run" / "heads.csv").exists()


@pytest.mark.parametrize(("command", "more"), [(scores, ()), (ablate, ("--players", "sources"))])
def test_a_run_on_long_sequences_states_of_which_queries_locality_is(
    command: Any, more: Sequence[str], tmp_path: Path
):
    model = ["--model", "parameter-free", "--layers", "1", "--data", "gaussian"]
    data = ["--seq-len", "521", "--n-seqs", "4", "--folds", "4"]
    run_command(command, *model, *data, *more, "--out", str(tmp_path / "run"))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["query_stride"], manifest["skip_keys"]) == (3, 0)
    assert "use 1 query in 3" in (tmp_path / "run" / "report.html").read_text()
    maps = load_file(tmp_path / "run" / "maps.safetensors")
    [score] = maps["score" if command is scores else f"score/{manifest['conditions'][0]}"]
    rows = [spearmanr(score[query, :query], range(query)) for query in range(9, 521, 3)]
    table = pd.read_csv(tmp_path / "run" / "pattern.csv")
    assert table["locality"][0] == pytest.approx(np.mean([each.statistic for each in rows]))


def test_a_run_on_short_sequences_orders_every_query(done: Path):
    assert json.loads((done / "manifest.json").read_text())["query_stride"] == 1
    assert "use 1 query in" not in (done / "report.html").read_text()


def test_the_rule_for_windows_and_the_bos_policy_reach_a_data_set(
    tiny: Callable[[str], Any], tmp_path: Path
):
    texts = [f"{i} the quick brown fox jumps over it" * (i % 3) for i in range(59)]
    (tmp_path / "data").mkdir()
    pd.DataFrame({"text": texts}).to_parquet(tmp_path / "data" / "train.parquet")
    chosen = ["--data", str(tmp_path / "data"), "--windows", "start", "--bos", "never"]
    model = ["--model", str(tiny("llama").folder), "--layers", "1"]
    run_command(scores, *SMALL, *model, *chosen, "--out", str(tmp_path / "run"))
    seen = load_file(tmp_path / "run" / "tokens.safetensors")["tokens"]
    ids = tokenizer()([text for text in texts if text])["input_ids"]
    assert sorted(seen.tolist()) == sorted(document[:N_POS] for document in ids[:N_SEQS])
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["data"]["bos"], manifest["skip_keys"]) == (False, 0)


def test_the_report_is_offline_and_has_a_heat_map_of_the_heads(done: Path):
    page = (done / "report.html").read_text()
    assert "Diagonal-normalised scores" in page
    assert re.search(r'<details class="fold"><summary><h2[^>]*>Heads: amplitude', page)
    assert 'src="http' not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "MISTRAL"],
            r"L0 sees 5 keys of 13 \(a sliding window\): lower --seq-len to 5",
        ),
        (["--model", "llama-3.1-8b"], "meta-llama/Llama-3.1-8B .*offline"),
        (["--layers", "9"], "has 4 layers, 9 were asked for"),
        (["--folds", "3"], "--folds 3: expected 4 <= folds"),
        (["--skip-keys", "12"], "--skip-keys 12 leaves no keys of 13"),
        (["--seq-len", "5000"], "--seq-len 5000 is beyond the model's context"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tiny: Callable[[str], Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    given = [str(tiny("mistral").folder) if a == "MISTRAL" else a for a in arguments]
    layers = ["--layers", "2"] if "MISTRAL" in arguments else []
    line = refused(capfd, tmp_path, scores, *SMALL, "--data", "random", *layers, *given)
    assert re.search(message, line)


def test_the_page_leads_with_the_pattern_and_its_colours_leave_skipped_keys_out() -> None:
    random = np.random.default_rng(0)
    pattern = np.where(np.tri(11, k=-1, dtype=bool), random.normal(size=(2, 11, 11)), np.nan)
    pattern[:, :, 0] *= 100
    maps = {"score": pattern, "normalised": pattern, "se": 0 * pattern}
    measures = pd.DataFrame({"layer": [0, 1], "amplitude": [0.7, 1.3], "amplitude_low": [0.6, 1.2]})
    measures[["locality_low", "locality_high", "relative_r2"]] = (-0.1, 0.1, 0.8)
    for skip_keys, largest in ((0, 50), (1, 5)):
        run = Run(
            manifest={"skip_keys": skip_keys}, arrays={"maps": maps}, tables={"pattern": measures}
        )
        sections = [*_map_sections(run)]
        assert sections[0].title.startswith("The positional pattern is strongest in L1, 1.3 nats")
        figures = [section.drawn() for section in sections]
        for section, figure in zip(sections, figures, strict=True):
            assert figure is not None
            [_low, high] = figure.layout.meta["scales"][0]
            assert (high > 50) == (largest == 50)
            assert ("leave out the first key" in section.caption) == bool(skip_keys)
        for figure in (figures[0], figures[2]):
            assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax
