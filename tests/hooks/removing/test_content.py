"""Heads without content: plain transformers with the mean weights written in, and what it means."""

from typing import Any

import pytest
import torch
from support.edited_model import plain_run
from support.plain_attention import Recorder, recording
from support.rounding import NETWORK, assert_same
from support.tiny_models import ByName, ModelOf, tokens
from torch import Tensor

from nope_probe import (
    Ablation,
    Calibration,
    ablated,
    calibrate,
    load,
    run_attention,
    run_behaviour,
    sequences,
)

HEADS = {0: [1, 3], 1: [4]}  # of six query heads, of which three share a key head


def plain_logits(hf: Any, inputs: Tensor, means: Tensor) -> Tensor:
    """Return the logits of plain transformers with mean weights written into `HEADS`."""
    n_pos = inputs.shape[1]

    def write(layer: int, weights: Tensor) -> Tensor:
        if layer not in HEADS:
            return weights
        written = weights.clone()
        written[:, HEADS[layer]] = means[layer][HEADS[layer], :n_pos, :n_pos]
        return written

    with recording(hf, Recorder(rewrite=write)), torch.no_grad():
        return hf(inputs).logits


def plain_means(hf: Any, inputs: Tensor) -> Tensor:
    return plain_run(hf, inputs).patterns.mean(1)


def without_content(model: Any, inputs: Tensor, calibration: Calibration | None) -> Tensor:
    with ablated(model, Ablation(remove="content", heads=HEADS), calibration):
        return model(inputs)


SPECS = [
    "bridge:llama",
    "bridge:gemma2",
    "bridge:gpt2",
    "bridge:smollm3",
    "hooked:smollm3-rope",
    "decoder:gpt_oss",
]


@pytest.mark.parametrize("spec", SPECS)
def test_content_removed_equals_plain_transformers_with_the_mean_weights_written_in(
    spec: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    hf, inputs = tiny.hf, tiny.tokens
    calibration = calibrate(model, inputs, heads=HEADS)
    means = plain_means(hf, inputs)
    assert (float(means.sum(-1).max()) < 1) == (spec == "decoder:gpt_oss")  # a sink has a share
    for layer, heads in HEADS.items():
        pattern = calibration.patterns[layer].rows(slice(None))
        assert_same(pattern, means[layer][heads])
    expected = plain_logits(hf, inputs, means)
    assert_same(without_content(model, inputs, calibration), expected, NETWORK)
    assert not torch.allclose(model(inputs), expected, rtol=1e-3)


def test_shorter_sequences_take_the_first_rows_and_longer_ones_are_refused(
    bridge: ByName, tiny: ByName
) -> None:
    model, hf, inputs = bridge("llama"), tiny("llama").hf, tiny("llama").tokens
    calibration = calibrate(model, inputs, heads=HEADS)
    expected = plain_logits(hf, inputs[:, :7], plain_means(hf, inputs))
    assert_same(without_content(model, inputs[:, :7], calibration), expected, NETWORK)
    with pytest.raises(ValueError, match=r"expected sequences of 11 tokens, got 13"):
        without_content(model, tokens(n_pos=13), calibration)


def test_a_head_that_is_not_calibrated_and_padding_are_refused(
    bridge: ByName, tiny: ByName
) -> None:
    model, inputs = bridge("llama"), tiny("llama").tokens
    calibration = calibrate(model, inputs, heads={0: [1]})
    for of_heads in (calibration, None):
        with pytest.raises(ValueError, match=r"of L0 has to be .*first: .*heads=\{0: \[1, 3\]"):
            without_content(model, inputs, of_heads)
    real = torch.ones_like(inputs)
    real[0, 0] = 0
    padded = pytest.raises(ValueError, match="content depends on the length")
    with ablated(model, Ablation(remove="content", heads={0: [1]}), calibration), padded:
        model(inputs, attention_mask=real)


SMALL = {"n_seqs": 20, "seq_len": 20, "folds": 5, "in_heads": ["L1H3"]}


def test_the_commands_remove_content_in_named_heads() -> None:
    run = run_attention("rope-tiny", remove="content", layers=2, **SMALL)
    heads = run.tables["attention"].set_index(["layer", "head"])
    content = heads["first_content"] + heads["others_content"]
    assert abs(content[1, 3]) < 1e-5
    assert content[1, 2] > 0.02
    assert "in_heads=('L1H3',)" in run.manifest.command
    changed = run_behaviour("rope-tiny", remove=["content"], measures=["loss", "copy"], **SMALL)
    table = changed.tables["behaviour"].set_index(["measure", "removed"])["difference"]
    loaded = load("rope-tiny")
    data = sequences("shipped", tokenizer=loaded.tokenizer, n_seqs=20, seq_len=20)
    with ablated(loaded.model, Ablation(remove="content", heads={1: [3]}), tokens=data.inputs):
        ablated_loss = loaded.model(data.inputs, return_type="loss")
    assert table["loss", "content@L1H3"] == pytest.approx(
        float(ablated_loss - loaded.model(data.inputs, return_type="loss")), abs=1e-5
    )
