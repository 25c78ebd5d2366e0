"""Sums for regressions on the residual stream, against plain transformers and plain arithmetic."""

from typing import Any

import pytest
import torch
from support.edited_model import blocks
from support.tiny_models import ByName, ModelOf

from nope_probe.hooks.reading.residuals import capture_distances, capture_moments


def plain_residuals(hf: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the output of every block of a plain model: [layer, seq, pos, d_model]."""
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(keep) for block in blocks(hf)]
    with torch.inference_mode():
        hf(ids)
    for handle in handles:
        handle.remove()
    return torch.stack(kept).double()


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-nope"])
def test_moments_are_products_of_plain_residuals(
    spec: str, batch_size: int, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    ids = tiny(name).tokens
    y = torch.randn(*ids.shape, 2, generator=torch.Generator().manual_seed(0))
    xx, xy = capture_moments(model, ids, y, skip=2, batch_size=batch_size)
    x = plain_residuals(tiny(name).hf, ids)[:, :, 2:].flatten(1, 2)
    x = torch.cat([x, torch.ones(*x.shape[:2], 1)], -1)
    torch.testing.assert_close(xx, x.mT @ x, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(xy, x.mT @ y[:, 2:].flatten(0, 1).double(), rtol=1e-4, atol=1e-3)
    assert xx.dtype == torch.float64


def test_distances_are_between_predictions_and_the_index(bridge: ByName, tiny: ByName) -> None:
    ids = tiny("llama").tokens
    x = plain_residuals(tiny("llama").hf, ids)[:1, :, 3:]
    weights = torch.randn(1, x.shape[-1] + 1, 2, generator=torch.Generator().manual_seed(1))
    seen = capture_distances(bridge("llama"), ids, weights, skip=3, batch_size=2)
    predicted = x[0] @ weights[0, :-1].double() + weights[0, -1]
    index = torch.arange(3, ids.shape[1])[None, :, None]
    expected = (predicted - index).abs().mean(1)
    assert seen.shape == (len(ids), 1, 2)
    torch.testing.assert_close(seen[:, 0], expected, rtol=1e-4, atol=1e-4)
