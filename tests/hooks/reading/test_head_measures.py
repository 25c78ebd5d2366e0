"""Measures of heads on attention that is written down by hand."""

import pytest
import torch
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention, AttentionMask
from nope_probe.hooks.reading.batch_readings import induction_scores


def attention_of(pattern: Tensor) -> Attention:
    """Return the attention of a head that has this pattern [query, key] in one sequence."""
    n = len(pattern)
    q, mask = torch.zeros(1, n, 1, 2), AttentionMask.full(n, n, torch.device("cpu"))
    hooked = pattern[None, None]
    return Attention(q=q, k=q, v=q, mask=mask, scale=1.0, hooked=hooked, hooked_pattern=hooked)


@pytest.mark.parametrize("n_bos", [0, 1])
def test_a_perfect_induction_head_scores_1_and_its_neighbours_0(n_bos: int):
    n, size = 5, 10 + n_bos
    for shift, expected in ((0, 1.0), (1, 0.0), (-1, 0.0)):
        pattern = torch.zeros(size, size)
        for i in range(n + n_bos, size):
            pattern[i, i - (n - 1) + shift] = 1.0
        assert induction_scores(attention_of(pattern), n).item() == expected


def test_induction_needs_two_copies():
    with pytest.raises(ValueError, match="expected two copies of 5 tokens, got 9 positions"):
        induction_scores(attention_of(torch.eye(9)), 5)
