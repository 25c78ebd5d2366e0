"""Shapley shares, Moebius terms and the positional part for any values, against brute force."""

from itertools import permutations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nope_probe.analyses.contrasts import contrast_map
from nope_probe.analyses.shapley import (
    Condition,
    Player,
    PlayerSet,
    alone,
    base,
    coalitions,
    lost,
    moebius,
    player_set,
    positional,
    shapley,
    without,
)

SEEDS = st.integers(0, 2**32 - 1)
SOURCES = {"mask", "rope", "pos_embed"}
PLAYERS = st.lists(
    st.sampled_from(["mask", "rope", "pos_embed", "qk", "w_v", "w_o", "mlp"]),
    min_size=1,
    max_size=4,
    unique=True,
)
Values = dict[Condition, Tensor]


def random_values(players: PlayerSet, seed: int) -> Values:
    """Return one random map for every coalition that is kept."""
    generator = torch.Generator().manual_seed(seed)
    return {
        players.condition(kept): torch.randn(2, 3, generator=generator, dtype=torch.float64)
        for kept in coalitions(players.players)
    }


def worth(players: PlayerSet, values: Values, kept: tuple[Player, ...]) -> Tensor:
    """Return p(T) as the words have it: v(T) less v(T without its sources), if a source plays."""

    def value(some: tuple[Player, ...]) -> Tensor:
        gone = set().union(*(each.components for each in players.players if each not in some))
        return values[frozenset(gone)]

    if not any(each.components & SOURCES for each in players.players):
        return value(kept)
    return value(kept) - value(tuple(each for each in kept if not each.components & SOURCES))


def assert_equal(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@given(PLAYERS, SEEDS)
def test_every_quantity_is_that_of_the_positional_part(names: list[str], seed: int):
    ours = player_set(names)
    values = random_values(ours, seed)
    everyone = ours.players
    for kept in coalitions(everyone):
        assert_equal(contrast_map(positional(ours, kept), values), worth(ours, values, kept))
    for one in everyone:
        others = tuple(each for each in everyone if each != one)
        assert_equal(contrast_map(alone(ours, one), values), worth(ours, values, (one,)))
        assert_equal(contrast_map(without(ours, one), values), worth(ours, values, others))
        difference = worth(ours, values, everyone) - worth(ours, values, others)
        assert_equal(contrast_map(lost(ours, one), values), difference)


@given(PLAYERS, SEEDS)
def test_shapley_maps_are_means_over_all_orders_and_add_up(names: list[str], seed: int):
    ours = player_set(names)
    values = random_values(ours, seed)
    total = contrast_map(base(ours), values)
    for one in ours.players:
        added = [
            worth(ours, values, order[: order.index(one) + 1])
            - worth(ours, values, order[: order.index(one)])
            for order in permutations(ours.players)
        ]
        phi = contrast_map(shapley(ours, one), values)
        assert_equal(phi, torch.stack(added).mean(0))
        total = total + phi
    assert_equal(total, worth(ours, values, ours.players))


@given(PLAYERS, SEEDS)
def test_moebius_terms_add_up_in_every_coalition_and_are_shared_equally(
    names: list[str], seed: int
):
    ours = player_set(names)
    values = random_values(ours, seed)
    terms = {t: contrast_map(moebius(ours, t), values) for t in coalitions(ours.players)}
    for kept in terms:
        inside = [term for members, term in terms.items() if set(members) <= set(kept)]
        assert_equal(torch.stack(inside).sum(0), worth(ours, values, kept))
    for one in ours.players:
        parts = [term / len(t) for t, term in terms.items() if one in t]
        assert_equal(torch.stack(parts).sum(0), contrast_map(shapley(ours, one), values))
