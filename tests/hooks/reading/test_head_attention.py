"""Heads' attention to chosen keys is that of plain transformers, whatever the blocks of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plain_scores import plain_scores
from support.tiny_models import tokens

from nope_probe.hooks.layers.attached_hooks import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.batch_readings import read_heads, read_layers

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
        readings = read_heads(model, INPUTS, KEYS, n_layers=2)
    assert len(readings) == 2
    for layer, reading in enumerate(readings):
        expected = torch.stack([true[layer][..., ROWS, keys] for keys in KEYS], -1).float()
        torch.testing.assert_close(reading.weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["bridge:phi3", "bridge:smollm3", "hooked:smollm3-rope"])
def test_queries_keys_and_rotations_are_those_of_whole_readings(
    spec: str, model_of: Callable[[str], Any]
):
    model, _ = model_of(spec)
    readings = read_heads(model, INPUTS, KEYS, n_layers=2)
    for ours, whole in zip(readings, read_layers(model, INPUTS), strict=False):
        torch.testing.assert_close(ours.q, whole.q[:, -1])
        torch.testing.assert_close(ours.k, whole.k)
        torch.testing.assert_close(ours.rotation, whole.rotation)
