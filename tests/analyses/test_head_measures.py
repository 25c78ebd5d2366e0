"""Measures of heads on attention that is written down by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nope_probe.analyses.head_measures import (
    first_key_attention,
    induction_attention,
    moved_scores,
    position_and_content,
    previous_token_attention,
    sink_share,
)
from nope_probe.maps.rotation import Rotation

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


def test_the_sink_score_is_the_share_of_heads_above_0_3():
    first_key = torch.tensor([[0.9, 0.31, 0.3, 0.0, 0.1], [0.0, 0.0, 0.0, 0.0, 0.5]])
    torch.testing.assert_close(sink_share(first_key), torch.tensor([0.4, 0.2]))


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


@given(st.integers(0, 2**32 - 1))
def test_place_key_and_rest_have_variances_that_add_up(seed: int):
    generator = torch.Generator().manual_seed(seed)
    place, key, rest = (
        torch.randn(shape, generator=generator).double() for shape in ((7, 1), (1, 7), (7, 7))
    )
    rest = rest - rest.mean(0) - rest.mean(1, keepdim=True) + rest.mean()
    positional, symbolic, whole = position_and_content(place + key + rest + 3.0)
    torch.testing.assert_close(positional, place.var(correction=0))
    torch.testing.assert_close(symbolic, key.var(correction=0))
    torch.testing.assert_close(whole, positional + symbolic + rest.square().mean())


def test_moved_keys_are_turned_as_at_their_new_place():
    generator = torch.Generator().manual_seed(0)
    angle = 0.7 * torch.arange(5.0).double()
    c, s = angle.cos(), angle.sin()
    rotation = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    q, k = torch.randn(3, 2, 2, generator=generator), torch.randn(3, 5, 2, 2, generator=generator)
    q, k = q.double(), k.double()
    rotated = torch.einsum("pde,bphe->bphd", rotation, k)
    pairs = torch.tensor([[0, 1]])
    moved = moved_scores(q, rotated, Rotation(pairs=pairs, cos=c[:, None], sin=s[:, None]))
    for place in range(5):
        for key in range(5):
            true = torch.einsum("bhd,de,bhe->bh", q, rotation[place], k[:, key])
            torch.testing.assert_close(moved[:, :, place, key], true)
