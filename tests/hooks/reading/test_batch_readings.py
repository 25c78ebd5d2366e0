"""What one pass reads of every block: attention to chosen keys, rotations."""

from typing import Any
from weakref import ref

import pytest
import torch
from support.plain_attention import plain_scores
from support.rounding import assert_same
from support.tiny_models import ByName, tokens

from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of, read_attention
from nope_probe.hooks.reading.batch_readings import (
    read_rotations,
    weights_on,
)

INPUTS, ROWS = tokens(n_seqs=3, n_pos=13), torch.arange(13)
KEYS = torch.stack((torch.zeros_like(ROWS), (ROWS - 1).clamp_min(0), ROWS // 2))


def leave(tensor: torch.Tensor, hook: Any) -> None:
    """Read scores and leave them: enough to need the hooked path."""


@pytest.mark.parametrize("rows", [5, 128])
@pytest.mark.parametrize("way", ["fused", "hooked"])
@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:phi3", "bridge:qwen3", "hooked:smollm3-rope"]
)
def test_weights_are_those_of_plain_transformers(
    spec: str, way: str, rows: int, model_of: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nope_probe.hooks.reading.batch_readings.ROWS", rows)
    model, name = model_of(spec)
    true = plain_scores(tiny(name).hf, INPUTS).nan_to_num(nan=-torch.inf).softmax(-1)
    users = [(layers_of(model)[0].point("attn.hook_attn_scores"), leave)] * (way == "hooked")
    with hooks_attached(users):
        weights = read_attention(model, INPUTS, lambda _, attention: weights_on(attention, KEYS))
    for layer, actual in enumerate(weights):
        expected = torch.stack([true[layer][..., ROWS, keys] for keys in KEYS], -1).float()
        assert_same(actual, expected)


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:phi3", "bridge:smollm3", "hooked:llama"])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_rotations_are_those_of_the_first_two_positions(
    spec: str, n_layers: int, model_of: ByName, tiny: ByName
) -> None:
    model, name = model_of(spec)
    rotations = read_rotations(model, tokens(1, 11), n_layers)
    assert len(rotations) == n_layers
    turned = torch.outer(torch.arange(2.0), tiny(name).hf.model.rotary_emb.inv_freq).cos()
    for layer, actual in enumerate(rotations):
        expected = turned[:, :0] if (name, layer) == ("smollm3", 1) else turned
        assert torch.allclose(actual.cos.float(), expected)
        assert actual.cos.untyped_storage().nbytes() == actual.cos.nbytes


def test_no_scores_are_kept_when_the_next_block_runs(bridge: ByName) -> None:
    model, before, alive = bridge("llama"), [], []

    def watch(scores: torch.Tensor, hook: object) -> None:
        alive.append(sum(reference() is not None for reference in before))
        before.append(ref(scores))

    points = [layer.point("attn.hook_attn_scores") for layer in layers_of(model)]
    with hooks_attached([(point, watch) for point in points]):
        read_rotations(model, tokens(1, 11), 2)
    assert alive == [0, 0]
