"""Shapley shares, Moebius terms and the positional part for any values, against brute force."""

from itertools import permutations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nope_probe.analyses.pattern_rows import contrast_map
from nope_probe.analyses.shapley import (
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
from nope_probe.conditions import Condition

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
        gone = set().union(*(player.components for player in players.players if player not in some))
        return values[Condition(gone)]

    if not any(player.components & SOURCES for player in players.players):
        return value(kept)
    return value(kept) - value(tuple(player for player in kept if not player.components & SOURCES))


def assert_equal(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@given(PLAYERS, SEEDS)
def test_every_quantity_is_that_of_the_positional_part(names: list[str], seed: int):
    players = player_set(names)
    values = random_values(players, seed)
    everyone = players.players
    for kept in coalitions(everyone):
        assert_equal(contrast_map(positional(players, kept), values), worth(players, values, kept))
    for one in everyone:
        others = tuple(player for player in everyone if player != one)
        assert_equal(contrast_map(alone(players, one), values), worth(players, values, (one,)))
        assert_equal(contrast_map(without(players, one), values), worth(players, values, others))
        difference = worth(players, values, everyone) - worth(players, values, others)
        assert_equal(contrast_map(lost(players, one), values), difference)


@given(PLAYERS, SEEDS)
def test_shapley_maps_are_means_over_all_orders_and_add_up(names: list[str], seed: int):
    players = player_set(names)
    values = random_values(players, seed)
    total = contrast_map(base(players), values)
    for one in players.players:
        added = [
            worth(players, values, order[: order.index(one) + 1])
            - worth(players, values, order[: order.index(one)])
            for order in permutations(players.players)
        ]
        phi = contrast_map(shapley(players, one), values)
        assert_equal(phi, torch.stack(added).mean(0))
        total = total + phi
    assert_equal(total, worth(players, values, players.players))


@given(PLAYERS, SEEDS)
def test_moebius_terms_add_up_in_every_coalition_and_are_shared_equally(
    names: list[str], seed: int
):
    players = player_set(names)
    values = random_values(players, seed)
    terms = {t: contrast_map(moebius(players, t), values) for t in coalitions(players.players)}
    for kept in terms:
        inside = [term for members, term in terms.items() if set(members) <= set(kept)]
        assert_equal(torch.stack(inside).sum(0), worth(players, values, kept))
    for one in players.players:
        parts = [term / len(t) for t, term in terms.items() if one in t]
        assert_equal(torch.stack(parts).sum(0), contrast_map(shapley(players, one), values))
