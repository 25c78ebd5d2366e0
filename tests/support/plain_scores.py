"""The input of softmax in each block of plain transformers: scale, soft cap and mask included.

Eager attention of every architecture ends in one call of softmax, whose input is recorded. No hook
point of TransformerLens and no line of nope_probe is used.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel


def plain_scores(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the attention scores [layer, seq, head, query, key] in float64, NaN where masked."""
    inputs: list[Tensor] = []
    softmax = torch.nn.functional.softmax

    def recording(scores: Tensor, *arguments: Any, **options: Any) -> Tensor:
        inputs.append(scores.double())
        return softmax(scores, *arguments, **options)

    with pytest.MonkeyPatch.context() as monkeypatch, torch.inference_mode():
        monkeypatch.setattr(torch.nn.functional, "softmax", recording)
        hf(tokens)
    assert len(inputs) == hf.config.num_hidden_layers
    scores = torch.stack(inputs)
    return scores.masked_fill(scores < -1e30, torch.nan)
