"""What plain transformers feeds to softmax in each block, scale, soft cap and mask included.

Eager attention of every architecture ends in one call of softmax, which is watched. No hook point
of TransformerLens and no line of nope_probe takes part.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel


def plain_scores(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Give the attention scores [layer, seq, head, query, key] in float64, NaN where masked."""
    seen: list[Tensor] = []
    softmax = torch.nn.functional.softmax

    def watched(scores: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.append(scores.double())
        return softmax(scores, *arguments, **options)

    with pytest.MonkeyPatch.context() as monkeypatch, torch.inference_mode():
        monkeypatch.setattr(torch.nn.functional, "softmax", watched)
        hf(tokens)
    assert len(seen) == hf.config.num_hidden_layers
    scores = torch.stack(seen)
    return scores.masked_fill(scores < -1e30, torch.nan)
