"""Attribution on player sets small enough to work out by hand."""

import math

import pytest
import torch
from torch import Tensor

from nope_probe.analyses.attribution import CONJUNCTION_TOLERANCE, attribute
from nope_probe.analyses.contrasts import ContrastGram, contrast_map
from nope_probe.analyses.jackknife import cross_products
from nope_probe.analyses.shapley import (
    INTACT,
    Condition,
    alone,
    base,
    coalitions,
    lost,
    moebius,
    player,
    player_set,
    position_term,
    positional,
    positional_whole,
    source_terms,
)
from nope_probe.components import kept_name
from nope_probe.maps.centred import kept_cells, row_centred

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


def test_weights_alone_have_no_positional_part_and_no_moebius_term():
    ours = player_set(["mask", "w_q", "w_k", "mlp"])
    for kept in coalitions(ours.players[1:]):
        assert positional(ours, kept) == {}
        assert moebius(ours, kept) == {}
    assert alone(ours, ours.players[2]) == {}
    assert base(ours) == {}


def test_what_is_lost_without_rope_is_rope_and_its_interaction_of_the_sources():
    for names in (["mask", "rope", "w_q", "w_k"], ["rope", "mask", "qk", "ov"]):
        ours = player_set(names)
        values = random_values(ours, seed=3)
        terms = {name: contrast_map(term, values) for name, term in source_terms("rope").items()}
        rope = next(each for each in ours.players if each.name == "rope")
        error = contrast_map(lost(ours, rope), values) - terms["rope"] - terms["mask_x_rope"]
        assert float(error.abs().max() / values[INTACT].abs().max()) < 1e-9


def test_what_all_players_share_is_the_sum_of_the_sources_without_content():
    ours = player_set(["mask", "pos_embed", "w_q"])
    values = random_values(ours, seed=4)
    terms = {name: contrast_map(term, values) for name, term in source_terms("pos_embed").items()}
    del terms["content"]
    for whole in (position_term("pos_embed"), positional_whole(ours)):
        torch.testing.assert_close(contrast_map(whole, values), sum(terms.values()))
    assert position_term(None) == source_terms(None)["mask"]


def test_a_source_that_does_not_play_is_kept():
    ours = player_set(["rope", "w_q"])
    assert positional_whole(ours) == {INTACT: 1, frozenset({"rope"}): -1}


def test_what_replaced_weights_bring_of_their_own_is_no_part_of_what_they_share():
    """Replaced weights have a content pattern fourteen times what is to be explained."""
    ours = player_set(["rope", "qk"])
    key = torch.arange(N).double().repeat(N, 1)
    pattern, content = key, 14 * (key - 5).abs()
    qk = frozenset({"w_q", "w_k"})
    values = {INTACT: pattern, frozenset({"rope"}): 0 * key, qk: content, qk | {"rope"}: content}
    [layer] = attribute(
        as_folds({**values, frozenset({"mask"}): pattern, frozenset({"mask", "rope"}): 0 * key}),
        [ours],
    )
    rope, weights = layer.players
    assert (rope.lost.value, rope.alone.value) == pytest.approx((1, 0))
    assert (weights.lost.value, weights.share.value) == pytest.approx((1, 0.5))
    assert math.isnan(weights.alone.value)


def test_a_player_that_changes_nothing_has_no_share_and_equal_players_have_equal_shares():
    """The dummy and symmetry axioms, where w_o multiplies nothing and w_q, w_k do the same."""
    ours = player_set(["mask", "w_q", "w_k", "w_o"])
    key = torch.arange(N).double().repeat(N, 1)
    values = {}
    for kept in coalitions(ours.players):
        names = {each.name for each in kept}
        strength = ("mask" in names) * (1 + len(names & {"w_q", "w_k"}))
        values[ours.condition(kept)] = strength * key
    [layer] = attribute(as_folds(values), [ours], position=None)
    mask, w_q, w_k, w_o = layer.players
    assert w_o.share.value == pytest.approx(0)
    assert w_o.amplification.value == pytest.approx(1)
    assert w_q.share.value == pytest.approx(w_k.share.value) == pytest.approx(1 / 6)
    assert mask.share.value == pytest.approx(2 / 3)
    assert mask.alone.value == pytest.approx(1 / 3)
    assert w_q.amplification.value == pytest.approx(3 / 2)


def test_without_a_source_the_base_and_the_shares_add_to_one():
    ours = player_set(["w_q", "w_k"])
    values = random_values(ours, seed=5)
    [layer] = attribute(as_folds({**values, frozenset({"mask"}): values[INTACT]}), [ours])
    by_name = {each.player: each for each in layer.players}
    assert list(by_name) == ["w_q", "w_k", "base"]
    assert sum(each.share.value for each in layer.players) == pytest.approx(1)
    cells = kept_cells(N)
    left, whole = (row_centred(values[c])[cells] for c in (frozenset({"w_q", "w_k"}), INTACT))
    truth = float((left * whole).sum() / whole.square().sum())
    assert by_name["base"].share.value == pytest.approx(truth)
    for part in ("lost", "alone", "amplification"):
        assert math.isnan(getattr(by_name["base"], part).value)


def test_where_the_sources_bring_nothing_players_have_no_numbers():
    ours = player_set(["mask", "w_q"])
    torch.manual_seed(8)
    content = torch.arange(N).double()
    maps = {c: content + torch.randn(8, 1, N, N).double() for c in ours.conditions}
    [layer] = attribute(maps, [ours], position=None)
    assert layer.sources[0].share.value == pytest.approx(1, abs=0.1)
    for each in layer.players:
        for part in ("share", "lost", "alone", "amplification"):
            assert math.isnan(getattr(each, part).value)


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
    assert layer.players[0].alone.value == pytest.approx(0)
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


def test_independent_sources_bring_alone_what_is_lost_without_them_and_are_no_conjunction():
    ours = player_set(["mask", "rope", "w_q"])
    key = torch.arange(N).repeat(N, 1)
    near, first = row_centred(key.double()), row_centred((key == 0).double())
    content = row_centred((key % 3).double())  # which is w_q's, and no position
    values = {}
    for kept in coalitions(ours.players):
        names = {each.name for each in kept}
        value = ("mask" in names) * near + ("rope" in names) * first + ("w_q" in names) * content
        values[ours.condition(kept)] = value.nan_to_num()
    [layer] = attribute(as_folds(values), [ours])
    cells = kept_cells(N)
    whole = (near + first)[cells]
    truth = float((near[cells] * whole).sum() / whole.square().sum())
    mask, rope, w_q = layer.players
    for value in (mask.share.value, mask.alone.value, mask.lost.value, 1 - rope.share.value):
        assert value == pytest.approx(truth)
    assert (w_q.share.value, w_q.amplification.value) == pytest.approx((0, 1))
    assert not layer.is_conjunction("players")
    shares = {each.players: each.share.value for each in layer.interactions}
    assert list(shares) == [
        ("mask", "rope"),
        ("mask", "w_q"),
        ("rope", "w_q"),
        ("mask", "rope", "w_q"),
    ]
    assert list(shares.values()) == pytest.approx([0, 0, 0, 0], abs=1e-9)


def test_where_there_is_no_pattern_there_are_no_shares():
    torch.manual_seed(5)
    maps = {c: torch.randn(8, 1, N, N) for c in (INTACT, frozenset({"mask"}))}
    [layer] = attribute(maps, position=None)
    assert all(source.share.value != source.share.value for source in layer.sources)


@pytest.mark.parametrize("skip_keys", [0, 3])
def test_the_mask_effect_leaves_the_skipped_keys_out(skip_keys: int):
    generator = torch.Generator().manual_seed(7)
    with_mask, without = torch.randn(2, N, N, generator=generator).double()
    with_mask[:, 0] += 9.0  # a sink
    cells = [(i, j) for i in range(N) for j in range(skip_keys, i)]
    # a(i) + f(i - j) by least squares, over the kept cells alone
    design = torch.zeros(len(cells), 2 * N, dtype=torch.float64)
    for row, (i, j) in enumerate(cells):
        design[row, i] = design[row, N + i - j] = 1
    expected = []
    for scores in (with_mask, without):
        kept = torch.stack([scores[cell] for cell in cells])
        rest = kept - design @ torch.linalg.pinv(design) @ kept
        expected.append(float(rest.square().mean().sqrt()))
    values = as_folds({INTACT: with_mask, frozenset({"mask"}): without})
    [layer] = attribute(values, position=None, skip_keys=skip_keys)
    effect = layer.non_relative
    assert effect.with_mask.value == pytest.approx(expected[0])
    assert effect.without_mask.value == pytest.approx(expected[1])
    assert effect.difference.value == pytest.approx(expected[0] - expected[1])


def test_the_product_of_contrasts_is_that_of_their_maps():
    torch.manual_seed(6)
    conditions = [INTACT, frozenset({"mask"})]
    cells = torch.randn(2, 1, 31).double().expand(2, 4, 31)  # four folds without noise
    gram = ContrastGram(conditions, cross_products(cells, cells))
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
