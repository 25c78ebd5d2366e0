"""Measures of heads on attention that is written down by hand."""

import pytest
import torch
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention, AttentionMask
from nope_probe.hooks.reading.batch_readings import attended, induction_scores

# Rows add to 1: half to the first key, a quarter to the key before, the rest to the query's own.
BY_HAND = torch.tensor(
    [
        [1.00, 0.00, 0.00, 0.00],
        [0.75, 0.25, 0.00, 0.00],
        [0.50, 0.25, 0.25, 0.00],
        [0.40, 0.00, 0.15, 0.45],
    ]
)


def attention_of(pattern: Tensor) -> Attention:
    """Return the attention of a head that has this pattern [query, key] in one sequence."""
    n = len(pattern)
    q, mask = torch.zeros(1, n, 1, 2), AttentionMask.full(n, n, torch.device("cpu"))
    hooked = pattern[None, None]
    return Attention(q=q, k=q, v=q, mask=mask, scale=1.0, hooked=hooked, hooked_pattern=hooked)


def test_the_first_key_is_read_from_the_second_query_on_and_the_previous_token_from_the_third():
    measures = attended(attention_of(BY_HAND))
    assert measures["first_key"].item() == pytest.approx((0.75 + 0.5 + 0.4) / 3)
    assert measures["previous_token"].item() == pytest.approx((0.25 + 0.15) / 2)


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
