"""Maps of decoders that differ in kind are plain transformers' own; tests/ci has every decoder."""

from pathlib import Path

import pytest
import torch
from support.decoder_errors import map_error, removals_of
from support.decoders import write_decoder
from support.plain_attention import blocks_of
from support.rounding import NETWORK
from support.tiny_models import distance

from nope_probe import calibrate, load
from nope_probe.errors import UserError
from nope_probe.hooks.removing.replacements import Calibration

# ALiBi, soft cap and window, sinks, fused, learned positions, norms of q and k, hybrid, NoPE.
KINDS = ("bloom", "gemma2", "gpt_oss", "phi3", "opt", "qwen3", "qwen3_next", "smollm3")


@pytest.mark.parametrize("name", KINDS)
def test_maps_are_plain_transformers_own_intact_and_without_each_component(
    name: str, tmp_path: Path
) -> None:
    decoder = write_decoder(name, tmp_path)
    model = load(str(decoder.folder)).model
    errors = {removal: map_error(model, decoder, removal) for removal in removals_of(decoder)}
    assert max(errors.values()) <= NETWORK, errors


def test_keys_that_are_selected_for_each_query_are_refused(tmp_path: Path) -> None:
    tiny = write_decoder("glm_moe_dsa", tmp_path, index_topk=7)
    with pytest.raises(UserError, match="beyond 7 tokens"):
        load(str(tiny.folder))


@pytest.mark.parametrize(
    ("model_type", "layer", "weight", "end"),
    [
        ("qwen3_next", 3, "w_k", "k_proj"),  # of L3, the second layer that attends
        ("deepseek_v3", 1, "w_o", "o_proj"),  # the only projection that is one matrix
        ("gemma4_text", 1, "w_q", "q_proj"),  # wider than in L0
        ("nemotron_h", 2, "w_v", "v_proj"),
    ],
)
def test_means_are_of_plain_transformers_own_projections(
    model_type: str, layer: int, weight: str, end: str, tmp_path: Path
) -> None:
    tiny = write_decoder(model_type, tmp_path)
    outputs = []
    named = blocks_of(tiny.hf)[layer].named_modules()
    projection = next(module for name, module in named if name.endswith(end))
    handle = projection.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    with torch.inference_mode():
        tiny.hf(tiny.tokens)
    handle.remove()
    calibration = calibrate(load(str(tiny.folder)).model, tiny.tokens)
    stored = Calibration.from_tensors(calibration.to_tensors(), calibration.checksum)
    assert distance(stored.mean(weight, layer), outputs[0].mean((0, 1))) <= NETWORK
