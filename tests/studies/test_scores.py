"""The maps that `ablate --remove none` makes are those of plain transformers."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from support.command_line import run_command
from support.edited_model import plain_run
from support.plain_attention import plain_scores
from support.rounding import MEASURE, NETWORK, assert_same
from support.tiny_models import ByName, tokens

from nope_probe import Run, ablate, run_ablations, run_attention
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading import streaming
from nope_probe.reports.page import run_notes
from nope_probe.studies.engine import Engine
from nope_probe.studies.readings import captured_induction
from nope_probe.studies.study import PASSES_SAVED

N_POS, N_HEADS = 13, 6
BELOW = np.tril(np.ones((N_POS, N_POS), bool))


@pytest.fixture(scope="module")
def done(tiny: ByName) -> Run:
    """A per-head run on the folder of a Llama with grouped keys."""
    flags = {"n_seqs": 29, "seq_len": N_POS, "folds": 5, "batch_size": 11, "data": "random"}
    return run_ablations(str(tiny("llama").folder), remove="none", per_head=True, layers=2, **flags)


def test_maps_are_the_mean_of_plain_transformers_scores(done: Run, tiny: ByName):
    maps, tokens = done.maps, torch.from_numpy(done.arrays["tokens"]["tokens"])
    truth = plain_scores(tiny("llama").hf, tokens)  # [layer, seq, head, query, key]
    assert set(maps) == {f"{name}/intact" for name in ("score", "se", "pattern", "score_per_head")}
    assert maps["score/intact"].shape == (2, N_POS, N_POS)
    assert maps["score_per_head/intact"].shape == (2, N_HEADS, N_POS, N_POS)
    assert_same(maps["score/intact"], truth.mean((1, 2)))
    assert_same(maps["score_per_head/intact"], truth.mean(1))
    for name, values in maps.items():
        assert values.dtype == np.float32
        assert np.isnan(values[..., ~BELOW]).all()
        known = np.isfinite(values[..., BELOW])
        assert known.all() or (name == "pattern/intact" and known.sum() == 2 * (11 + 66))


def test_offsets_are_the_means_of_the_maps_diagonals(done: Run):
    maps, table = done.maps, done.tables["offsets"]
    rows = table[(table["term"] == "score") & (table["layer"] == 1)]
    gap = NETWORK * float(np.nanmax(np.abs(maps["score/intact"])))
    assert rows["offset"].tolist() == list(range(1, N_POS - 1))
    for row in rows.to_dict("records"):
        other_keys = np.diagonal(maps["score/intact"][1], -row["offset"])[1:]
        assert row["mean_low"] <= row["mean"] <= row["mean_high"]
        assert row["mean"] == pytest.approx(other_keys.mean(), abs=gap)


@pytest.mark.usefixtures("undrawn")
def test_heads_are_measured_in_the_pass_of_their_maps_and_an_interrupted_analysis_keeps_both(
    tiny: ByName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    flags = ["--model", str(tiny("llama").folder), "--data", "random", "--per-head"]
    flags += ["--layers", "2", "--n-seqs", "59", "--seq-len", "13", "--folds", "5"]
    forward, lengths = streaming.run_forward, list[int]()

    def count(model: Any, batch: torch.Tensor) -> None:
        lengths.append(len(batch))
        forward(model, batch)

    monkeypatch.setattr(streaming, "run_forward", count)
    run_command(ablate, "--remove", "none", *flags, "--out", str(tmp_path / "whole"))
    assert sum(lengths) == 1 + 59 + 20, "one is tried, and 4 a fold are random tokens twice"
    with monkeypatch.context() as patch:
        patch.setattr("nope_probe.studies.ablate_run.offsets_table", interrupted)
        with pytest.raises(SystemExit, match="143"):
            run_command(ablate, "--remove", "none", *flags, "--out", str(tmp_path / "run"))
    assert capfd.readouterr().err.splitlines()[-1] == f"interrupted: {PASSES_SAVED}"
    lengths.clear()
    run_command(ablate, "--remove", "none", *flags, "--out", str(tmp_path / "run"))
    assert sum(lengths) == 0
    files = [(tmp_path / name / "head_pattern.csv").read_bytes() for name in ("whole", "run")]
    assert files[0] == files[1]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("rope-tiny", {"bos": "never", "query_rows": 11, "skip_keys": 3}),
        ("grouped", {"bos": "always", "data": "random"}),
    ],
)
def test_position_and_content_of_heads_are_those_of_the_attention_command(
    model: str, more: dict[str, Any], tiny: ByName
):
    folder = str(tiny("llama").folder) if model == "grouped" else model  # 6 heads, 2 key heads
    flags = {"layers": 2, "n_seqs": 23, "seq_len": 19, "folds": 5, **more}
    run = run_ablations(folder, remove="none", per_head=True, batch_size=7, **flags)
    heads = run.tables["head_pattern"]
    expected = run_attention(folder, **flags).tables["attention"]
    of_attention_alone = ("pattern_missed", "need_")
    expected = expected[[n for n in expected if not n.startswith(of_attention_alone)]]
    assert len(expected.columns) == 2 + 3 * 8 + 2, "layer, head, estimates, gaps"
    pd.testing.assert_frame_equal(heads[[*expected]], expected, rtol=MEASURE, atol=MEASURE)


def interrupted(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("n_bos", [0, 1])
def test_induction_is_read_on_the_repeated_tokens(n_bos: int, bridge: ByName, tiny: ByName):
    repeated = torch.nn.functional.pad(tokens(10, 5, seed=2).repeat(1, 2), (n_bos, 0))
    engine = Engine(model=bridge("llama"), inputs=repeated, n_folds=5)
    layers = range(len(layers_of(engine.model)))
    measured = captured_induction(engine, None, layers=layers, n_tokens=5)["induction"].mean(0)
    attended = plain_run(tiny("llama").hf, repeated).patterns.numpy()
    true = np.mean([attended[..., i, i - 4] for i in range(n_bos + 5, n_bos + 10)], 0).mean(1)
    assert_same(measured, true, MEASURE)


def test_a_run_on_long_sequences_states_of_which_queries_locality_is():
    sizes = {"layers": 1, "seq_len": 521, "n_seqs": 4, "folds": 4}
    run = run_ablations("parameter-free", remove="none", **sizes)
    assert (run.manifest.query_stride, run.manifest.skip_keys) == (3, 0)
    assert "use 1 query in 3" in run_notes(run.manifest)[0]
    assert "head_pattern" not in run.tables
    [score] = run.maps["score/intact"]
    rows = [spearmanr(score[query, :query], range(query)) for query in range(9, 521, 3)]
    table = run.tables["pattern"]
    # Maps are stored in float32, which can swap neighbours in the order of a row. A swap moves the
    # correlation of a row of n keys by 12 / (n^3 - n); the bound allows a hundred swaps.
    expected = np.mean([row.statistic for row in rows])
    assert table["locality"][0] == pytest.approx(expected, abs=100 * 12 / 260**3 / len(rows))
