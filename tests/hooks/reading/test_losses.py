"""Losses equal those of plain transformers, intact and edited; no batch changes them."""

import pytest
import torch
from support.tiny_models import ByName, ModelOf, tokens

from nope_probe.hooks.reading.capture import capture_losses, token_losses

SPECS = ["llama", "phi3", "qwen3", "smollm3", "gemma2", "gpt2", "neox"]


def plain_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return -log softmax of each next token, by indexing."""
    log_p = logits.double().log_softmax(-1)[:, :-1]
    return -log_p.gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("spec", [*(f"bridge:{name}" for name in SPECS), "hooked:smollm3-rope"])
def test_the_mean_loss_is_that_of_transformers_with_labels(
    spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    hf, ids = tiny(name).hf, tiny(name).tokens
    losses = capture_losses(model, ids, batch_size=2)
    with torch.inference_mode():
        expected = [float(hf(each[None], labels=each[None]).loss) for each in ids]
    assert losses.shape == (len(ids), ids.shape[1] - 1)
    torch.testing.assert_close(losses.mean(1).tolist(), expected, rtol=1e-5, atol=1e-5)


def test_the_batch_size_changes_no_loss(bridge: ByName) -> None:
    ids = tokens(11, seed=3)
    whole = capture_losses(bridge("llama"), ids, batch_size=11)
    for size in (1, 4, 7):
        losses = capture_losses(bridge("llama"), ids, batch_size=size)
        torch.testing.assert_close(losses, whole, rtol=1e-5, atol=1e-5)


def test_a_loss_by_hand() -> None:
    logits = torch.tensor([[[0.0, 3.0], [1.0, 1.0], [9.0, 0.0]]])
    losses = token_losses(logits, torch.tensor([[0, 1, 0]]))
    expected = torch.tensor([[torch.tensor(1 + torch.e**-3).log(), torch.tensor(2.0).log()]])
    torch.testing.assert_close(losses, expected)


def test_losses_of_bfloat16_logits_are_float32() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])
    losses = token_losses(logits, ids)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, plain_losses(logits, ids).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("unenforced")
def test_every_sequence_of_tokens_needs_logits() -> None:
    with pytest.raises(ValueError, match="zip"):
        token_losses(torch.zeros(2, 5, 7), torch.zeros(3, 5, dtype=torch.int64))
