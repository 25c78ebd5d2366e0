"""The measures of heads in a run, against the attention of plain transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.command_line import run_command
from support.plain_scores import plain_scores
from support.tiny_models import tokenizer, tokens

from nope_probe import scores
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.scores.heads import HeadInputs, head_columns, measure_heads

N_POS, N_HEADS = 13, 6
FOLD_OF = torch.arange(10) % 5


@pytest.fixture(scope="module")
def done(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A per-head run on a Llama whose tokenizer forces BOS."""
    out = tmp_path_factory.mktemp("runs") / "llama"
    small = ["--n-seqs", 25, "--seq-len", N_POS, "--folds", 5, "--data", "random", "--layers", 2]
    run_command(scores, *small, "--model", tiny("llama").folder, "--per-head", "--out", out)
    return out


def attention(hf: Any, inputs: torch.Tensor) -> np.ndarray:
    """Return plain transformers' attention, [layer, seq, head, query, key]."""
    return plain_scores(hf, inputs).nan_to_num(nan=-torch.inf).softmax(-1).numpy()


def inputs_with(repeated: torch.Tensor) -> HeadInputs:
    return HeadInputs(
        inputs=tokens(10, N_POS), repeated=repeated, n_tokens=5, skip_keys=0, fold_of=FOLD_OF
    )


def first_key(found: np.ndarray) -> np.ndarray:
    return found[..., 1:, 0].mean((1, -1)).ravel()


def test_first_key_and_previous_token_are_those_of_plain_transformers(
    done: Path, tiny: Callable[[str], Any]
):
    windows = load_file(done / "tokens.safetensors")["tokens"]
    heads = pd.read_csv(done / "heads.csv")
    found = attention(tiny("llama").hf, windows)
    np.testing.assert_allclose(heads["first_key"], first_key(found), rtol=1e-4)
    previous = np.mean([found[..., i, i - 1] for i in range(2, N_POS)], 0).mean(1).ravel()
    np.testing.assert_allclose(heads["previous_token"], previous, rtol=1e-4)
    without = attention(tiny("llama").hf, windows[:, 1:])
    np.testing.assert_allclose(heads["first_key_without_bos"], first_key(without), rtol=1e-4)
    for name in ("first_key", "induction", "positional", "symbolic_without_bos"):
        assert (heads[f"{name}_low"] <= heads[name]).all()
        assert heads[name].between(0, 1).all()


def test_the_sink_score_is_the_share_of_heads_above_0_3(done: Path):
    heads, sinks = pd.read_csv(done / "heads.csv"), pd.read_csv(done / "sinks.csv")
    assert sinks[["bos", "layer"]].to_numpy().tolist() == [
        ["with", 0],
        ["with", 1],
        ["without", 0],
        ["without", 1],
    ]
    for row in sinks.to_dict("records"):
        column = "first_key" if row["bos"] == "with" else "first_key_without_bos"
        true = (heads[heads["layer"] == row["layer"]][column] > 0.3).mean()
        assert row["sink_score"] == pytest.approx(true)


def test_a_head_of_a_layer_without_rope_is_symbolic_and_one_with_rope_is_not(
    bridge: Callable[[str], Any],
):
    repeated = tokens(10, 5, seed=2).repeat(1, 2)
    given = HeadInputs(
        inputs=tokens(10, N_POS), repeated=repeated, n_tokens=5, skip_keys=0, fold_of=FOLD_OF
    )
    measured = measure_heads(bridge("smollm3"), given, n_layers=3)
    total = measured["total"].mean(0)
    symbolic, positional = (measured[name].mean(0) / total for name in ("symbolic", "positional"))
    torch.testing.assert_close(symbolic[1], torch.ones(N_HEADS).double())
    assert positional[1].abs().max() < 1e-9
    assert symbolic[[0, 2]].max() < 0.9
    assert positional[[0, 2]].min() > 1e-4


def test_induction_is_read_on_the_repeated_tokens(
    bridge: Callable[[str], Any], tiny: Callable[[str], Any]
):
    repeated = tokens(10, 5, seed=2).repeat(1, 2)
    given = HeadInputs(
        inputs=tokens(10, N_POS), repeated=repeated, n_tokens=5, skip_keys=0, fold_of=FOLD_OF
    )
    measured = measure_heads(bridge("llama"), given, n_layers=2)["induction"].mean(0)
    found = attention(tiny("llama").hf, repeated)
    true = np.mean([found[..., i, i - 4] for i in range(5, 10)], 0).mean(1)
    np.testing.assert_allclose(measured.numpy(), true, rtol=1e-4)


def test_sequences_without_bos_are_measured_with_one_beside(
    bridge: Callable[[str], Any], tiny: Callable[[str], Any]
):
    inputs = Sequences(inputs=tokens(8, N_POS), name="tokens")
    heads, sinks = head_columns(bridge("mistral"), inputs, tokenizer(), 1, 4)
    assert {"first_key", "first_key_with_bos"} <= set(heads)
    assert sinks["bos"].tolist() == ["without", "with"]
    longer = torch.nn.functional.pad(inputs.inputs[:, :-1], (1, 0), value=0)
    found = attention(tiny("mistral").hf, longer)[:1]
    np.testing.assert_allclose(heads["first_key_with_bos"], first_key(found), rtol=1e-4)
    alone, _ = head_columns(bridge("mistral"), inputs, None, 1, 4)
    assert "first_key_with_bos" not in alone
