"""Attention to chosen keys is plain transformers' own, a block at a time."""

from typing import Any
from weakref import ref

import pytest
import torch
from support.plain_attention import plain_scores
from support.rounding import assert_same
from support.tiny_models import ByName, tokens

from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import read_attention
from nope_probe.hooks.reading.attention import weights_on

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
    monkeypatch.setattr("nope_probe.hooks.reading.attention.ROWS", rows)
    model, name = model_of(spec)
    true = plain_scores(tiny(name).hf, INPUTS).nan_to_num(nan=-torch.inf).softmax(-1)
    users = [(layers_of(model)[0].point("attn.hook_attn_scores"), leave)] * (way == "hooked")
    with hooks_attached(users):
        weights = read_attention(model, INPUTS, lambda _, attention: weights_on(attention, KEYS))
    for layer, actual in enumerate(weights):
        expected = torch.stack([true[layer][..., ROWS, keys] for keys in KEYS], -1).float()
        assert_same(actual, expected)


def test_no_scores_are_kept_when_the_next_block_runs(bridge: ByName) -> None:
    model, before, alive = bridge("llama"), [], []

    def watch(scores: torch.Tensor, hook: object) -> None:
        alive.append(sum(reference() is not None for reference in before))
        before.append(ref(scores))

    points = [layer.point("attn.hook_attn_scores") for layer in layers_of(model)]
    with hooks_attached([(point, watch) for point in points]):
        read_attention(model, INPUTS, lambda _, attention: weights_on(attention, KEYS))
    assert alive == [0, 0]
