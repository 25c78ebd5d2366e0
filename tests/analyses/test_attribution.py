"""Attribution on player sets small enough to work out by hand."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from nope_probe.analyses.attribution import CONJUNCTION_TOLERANCE, attribute
from nope_probe.analyses.contrasts import ContrastGram, contrast_map
from nope_probe.analyses.pattern import kept_cells, row_centred
from nope_probe.analyses.shapley import (
    INTACT,
    Condition,
    alone,
    coalitions,
    difference,
    lost,
    moebius,
    player,
    player_set,
    shapley,
    source_terms,
)
from nope_probe.hooks.names import kept_name

N, FOLDS = 13, 5


def random_values(players, seed: int = 0) -> dict[Condition, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        players.condition(kept): torch.randn(N, N, generator=generator, dtype=torch.float64)
        for kept in coalitions(players.players)
    }


def as_folds(values: dict[Condition, Tensor]) -> dict[Condition, Tensor]:
    """Noiseless folds of one layer."""
    return {condition: each.repeat(FOLDS, 1, 1, 1) for condition, each in values.items()}


def test_shapley_maps_average_what_a_player_adds_over_all_orders():
    ours = player_set(["mask", "rope", "w_q", "w_k"])
    values = random_values(ours)
    for one in ours.players:
        added = []
        for order in permutations(ours.players):
            before = order[: order.index(one)]
            with_one = values[ours.condition((*before, one))]
            added.append(with_one - values[ours.condition(before)])
        truth = torch.stack(added).mean(0)
        torch.testing.assert_close(contrast_map(shapley(ours, one), values), truth)


def test_shapley_maps_add_up_to_what_all_players_bring():
    ours = player_set(["mask", "rope", "qk", "ov", "mlp"])
    values = random_values(ours, seed=1)
    total = sum(contrast_map(shapley(ours, one), values) for one in ours.players)
    whole = contrast_map(difference(ours), values)
    largest = values[INTACT].abs().max()
    assert float((total - whole).abs().max() / largest) < 1e-9


def test_moebius_terms_of_all_coalitions_add_up_to_v_all():
    ours = player_set(["mask", "w_o", "mlp"])
    values = random_values(ours, seed=2)
    total = sum(
        contrast_map(moebius(ours, members), values) for members in coalitions(ours.players)
    )
    torch.testing.assert_close(total, values[INTACT])


def test_what_is_there_alone_and_lost_without_a_player_by_hand():
    ours = player_set(["mask", "w_q"])
    mask = ours.players[0]
    values = random_values(ours, seed=3)
    none = values[frozenset({"mask", "w_q"})]
    only_mask, no_mask = values[frozenset({"w_q"})], values[frozenset({"mask"})]
    torch.testing.assert_close(contrast_map(alone(ours, mask), values), only_mask - none)
    torch.testing.assert_close(contrast_map(lost(ours, mask), values), values[INTACT] - no_mask)


def test_the_four_sources_add_up_to_the_intact_pattern():
    both = frozenset({"mask", "rope"})
    conditions = [INTACT, frozenset({"mask"}), frozenset({"rope"}), both]
    values = {c: torch.randn(N, N, dtype=torch.float64) for c in conditions}
    terms = {name: contrast_map(term, values) for name, term in source_terms("rope").items()}
    assert list(terms) == ["content", "mask", "rope", "mask_x_rope"]
    torch.testing.assert_close(sum(terms.values()), values[INTACT])
    torch.testing.assert_close(terms["content"], values[both])
    torch.testing.assert_close(terms["mask"], values[frozenset({"rope"})] - values[both])
    torch.testing.assert_close(terms["rope"], values[frozenset({"mask"})] - values[both])


def test_without_position_encoding_content_and_mask_make_the_pattern():
    terms = source_terms(None)
    assert terms == {
        "content": {frozenset({"mask"}): 1},
        "mask": {INTACT: 1, frozenset({"mask"}): -1},
    }


def test_a_conjunction_of_k_players_gives_each_one_kth_and_is_named():
    ours = player_set(["mask", "w_q", "w_k"])
    pattern = torch.randn(N, N, dtype=torch.float64)
    values = {
        ours.condition(kept): pattern if len(kept) == 3 else torch.zeros_like(pattern)
        for kept in coalitions(ours.players)
    }
    [layer] = attribute(as_folds(values), [ours], position=None)
    for each in layer.players:
        assert each.share.value == pytest.approx(1 / 3)
        assert each.lost.value == pytest.approx(1)
        assert each.alone.value == pytest.approx(0)
    assert layer.is_conjunction("players")
    assert not layer.is_conjunction("circuits")
    together = [each for each in layer.interactions if len(each.players) == 3]
    assert together[0].share.value == pytest.approx(1)


@pytest.mark.parametrize(("beyond", "conjunction"), [(-0.01, True), (0.01, False)])
def test_a_conjunction_is_named_within_its_tolerance(beyond: float, conjunction: bool):
    ours = player_set(["mask", "w_q"])
    pattern = torch.arange(N).double().repeat(N, 1)
    # The mask's share is (1 + x) / 2 where it brings x of the pattern alone, and w_q nothing.
    x = 2 * (CONJUNCTION_TOLERANCE + beyond)
    values = {INTACT: pattern, frozenset({"w_q"}): x * pattern}
    values |= {frozenset({"mask"}): 0 * pattern, frozenset({"mask", "w_q"}): 0 * pattern}
    [layer] = attribute(as_folds(values), [ours], position=None)
    assert layer.players[0].share.value == pytest.approx((1 + x) / 2)
    assert layer.is_conjunction("players") == conjunction


def test_independent_players_bring_alone_what_is_lost_without_them_and_are_no_conjunction():
    ours = player_set(["mask", "w_q"])
    key = torch.arange(N).repeat(N, 1)
    near, first = row_centred(key.double()), row_centred((key == 0).double())
    values = {
        INTACT: near + first,
        frozenset({"w_q"}): near,
        frozenset({"mask"}): first,
        frozenset({"mask", "w_q"}): torch.zeros(N, N, dtype=torch.float64),
    }
    [layer] = attribute(
        as_folds({c: v.nan_to_num() for c, v in values.items()}), [ours], position=None
    )
    cells = kept_cells(N)
    whole = (near + first)[cells]
    truth = float((near[cells] * whole).sum() / whole.square().sum())
    mask = layer.players[0]
    assert mask.share.value == pytest.approx(truth)
    assert mask.alone.value == pytest.approx(truth)
    assert mask.lost.value == pytest.approx(truth)
    assert not layer.is_conjunction("players")


def test_shares_of_sources_add_to_one_in_noise():
    torch.manual_seed(4)
    conditions = [INTACT, frozenset({"mask"}), frozenset({"rope"}), frozenset({"mask", "rope"})]
    ramp = torch.arange(N).double()
    maps = {c: k * ramp + torch.randn(8, 1, N, N).double() for k, c in enumerate(conditions, 1)}
    [layer] = attribute(maps, position="rope")
    assert sum(source.share.value for source in layer.sources) == pytest.approx(1)


def test_where_there_is_no_pattern_there_are_no_shares():
    torch.manual_seed(5)
    maps = {c: torch.randn(8, 1, N, N) for c in (INTACT, frozenset({"mask"}))}
    [layer] = attribute(maps, position=None)
    assert all(source.share.value != source.share.value for source in layer.sources)


def test_the_mask_effect_is_the_paired_change_of_the_non_relative_part():
    bump = torch.zeros(N, N, dtype=torch.float64)
    bump[:, 2] = 3.0
    values = {INTACT: 2 * bump, frozenset({"mask"}): bump}
    [layer] = attribute(as_folds(values), position=None)
    effect = layer.non_relative
    assert effect.with_mask.value == pytest.approx(2 * effect.without_mask.value)
    assert effect.difference.value == pytest.approx(effect.without_mask.value)


def test_a_missing_condition_is_an_error():
    with pytest.raises(KeyError):
        attribute({INTACT: torch.zeros(5, 1, N, N)}, position="rope")


def test_the_product_of_contrasts_is_that_of_their_maps():
    torch.manual_seed(6)
    conditions = [INTACT, frozenset({"mask"})]
    cells = torch.randn(2, 1, 31).double().expand(2, 4, 31)  # four folds without noise
    gram = ContrastGram(conditions, cells)
    one, other = {INTACT: 2.0, conditions[1]: -1.0}, {conditions[1]: 3.0}
    truth = ((2 * cells[0, 0] - cells[1, 0]) * 3 * cells[1, 0]).mean()
    assert float(gram.product(one, other)[0]) == pytest.approx(float(truth))


def test_conditions_are_named_by_what_they_keep_in_the_order_of_the_components():
    assert kept_name({"w_v", "rope", "w_o", "mask"}) == "mask+rope+w_o+w_v"
    assert kept_name(["w_o", "mask"]) == "mask+w_o"
    assert kept_name(()) == "none"


def test_players_are_components_circuits_or_unions():
    assert player("qk").components == {"w_q", "w_k"}
    assert player("ov+mlp").components == {"w_o", "w_v", "mlp"}
    with pytest.raises(ValueError, match="unknown player 'w_x'; there are mask, rope"):
        player("w_q+w_x")


def test_players_that_share_a_component_are_refused():
    with pytest.raises(ValueError, match="the players qk and w_q share w_q"):
        player_set(["qk", "w_q"])
