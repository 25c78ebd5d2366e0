"""Measures of heads on attention that is written down by hand."""

import pytest
import torch

from nope_probe.analyses.head_measures import (
    first_key_attention,
    induction_attention,
    previous_token_attention,
)

# Rows add to 1: half to the first key, a quarter to the key before, the rest to the query's own.
BY_HAND = torch.tensor(
    [
        [1.00, 0.00, 0.00, 0.00],
        [0.75, 0.25, 0.00, 0.00],
        [0.50, 0.25, 0.25, 0.00],
        [0.40, 0.00, 0.15, 0.45],
    ]
)


def test_the_first_key_gets_its_mean_over_all_queries_but_the_first():
    assert float(first_key_attention(BY_HAND[:, 0])) == pytest.approx((0.75 + 0.5 + 0.4) / 3)


def test_the_previous_token_gets_its_mean_from_the_third_query_on():
    to_previous = BY_HAND[range(4), [0, 0, 1, 2]]
    assert float(previous_token_attention(to_previous)) == pytest.approx((0.25 + 0.15) / 2)


@pytest.mark.parametrize("n_bos", [0, 1])
def test_a_perfect_induction_head_scores_1_and_its_neighbours_0(n_bos: int):
    n, size = 5, 10 + n_bos
    for shift, expected in ((0, 1.0), (1, 0.0), (-1, 0.0)):
        attention = torch.zeros(3, size, size)
        for i in range(n + n_bos, size):
            attention[:, i, i - (n - 1) + shift] = 1.0
        to_next = attention[:, range(size), [max(0, i - (n - 1)) for i in range(size)]]
        assert induction_attention(to_next, n).tolist() == [expected] * 3


def test_induction_needs_two_copies():
    with pytest.raises(ValueError, match="expected two copies of 5 tokens, got 9 positions"):
        induction_attention(torch.zeros(9), 5)
