"""Shapley shares, Moebius terms and the positional part for any values, against brute force."""

import math
from itertools import combinations, permutations

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
def test_shapley_maps_of_a_sum_of_values_are_the_sums_of_theirs(names: list[str], seed: int):
    ours = player_set(names)
    one, other = random_values(ours, seed), random_values(ours, seed + 1)
    both = {condition: 2 * one[condition] - 3 * other[condition] for condition in one}
    for each in ours.players:
        phi = shapley(ours, each)
        parts = 2 * contrast_map(phi, one) - 3 * contrast_map(phi, other)
        assert_equal(contrast_map(phi, both), parts)


@given(PLAYERS, SEEDS, st.data())
def test_a_player_that_changes_nothing_gets_nothing(names: list[str], seed: int, data):
    ours = player_set(names)
    dummy = data.draw(st.sampled_from(ours.players))
    values = random_values(ours, seed)
    for kept in coalitions([each for each in ours.players if each != dummy]):
        values[ours.condition((*kept, dummy))] = values[ours.condition(kept)]
    assert_equal(contrast_map(shapley(ours, dummy), values), torch.zeros(2, 3).double())
    assert_equal(contrast_map(lost(ours, dummy), values), torch.zeros(2, 3).double())
    for size in range(len(ours.players)):
        for others in combinations([each for each in ours.players if each != dummy], size):
            term = contrast_map(moebius(ours, (dummy, *others)), values)
            assert_equal(term, torch.zeros(2, 3).double())


@given(st.permutations(["mask", "qk", "w_o", "mlp"]), SEEDS)
def test_players_of_one_kind_that_do_the_same_get_the_same(names: list[str], seed: int):
    ours = player_set(names)
    one, other = [each for each in ours.players if each.name in ("qk", "mlp")]
    values = random_values(ours, seed)
    rest = [each for each in ours.players if each not in (one, other)]
    for kept in coalitions(rest):
        values[ours.condition((*kept, other))] = values[ours.condition((*kept, one))]
    shares = [contrast_map(shapley(ours, each), values) for each in (one, other)]
    assert_equal(*shares)
    assert float(shares[0].abs().max()) > 1e-6


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


@given(PLAYERS)
def test_shapley_weights_of_the_conditions_cancel(names: list[str]):
    ours = player_set(names)
    for one in ours.players:
        assert math.isclose(sum(shapley(ours, one).values()), 0, abs_tol=1e-12)
