"""Attribution on player sets small enough to work out by hand."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from nope_probe.analyses.attribution import CONJUNCTION_TOLERANCE, attribute, sources_of
from nope_probe.analyses.pattern import measure
from nope_probe.analyses.pattern_rows import contrast_map
from nope_probe.analyses.shapley import (
    alone,
    base,
    coalitions,
    lost,
    moebius,
    player_set,
    position_term,
    positional,
    positional_whole,
    source_terms,
)
from nope_probe.conditions import INTACT, MASK, Condition, kept_name
from nope_probe.maps.centred import kept_cells, row_centred
from nope_probe.maps.maps import ScoreMaps

N, FOLDS = 13, 5


def random_values(players, seed: int = 0) -> dict[Condition, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        players.condition(kept): torch.randn(N, N, generator=generator, dtype=torch.float64)
        for kept in coalitions(players.players)
    }


def as_folds(values: dict[Condition, Tensor]) -> dict[Condition, Tensor]:
    """Noiseless folds of one layer."""
    return {removed: value.repeat(FOLDS, 1, 1, 1) for removed, value in values.items()}


def test_weights_alone_bring_nothing_and_what_is_lost_without_a_source_is_its_terms():
    players = player_set(["mask", "rope", "w_q", "mlp"])
    for kept in coalitions(players.players[2:]):
        assert positional(players, kept) == moebius(players, kept) == {}
    assert base(players) == alone(players, players.players[2]) == {}
    values = random_values(players)
    terms = {
        name: contrast_map(term, values) for name, term in source_terms(["mask", "rope"]).items()
    }
    without_rope = contrast_map(lost(players, players.players[1]), values)
    torch.testing.assert_close(without_rope, terms["rope"] + terms["mask_x_rope"])
    for whole in (position_term(["mask", "rope"]), positional_whole(players)):
        torch.testing.assert_close(contrast_map(whole, values) + terms["content"], values[INTACT])
    only_rope = player_set(["rope", "w_q"])
    assert positional_whole(only_rope) == {INTACT: 1, Condition({"rope"}): -1}
    with pytest.raises(ValueError, match="unknown player 'w_x'; there are mask, rope"):
        player_set(["w_q+w_x"])


def test_what_replaced_weights_bring_of_their_own_is_no_part_of_what_they_share():
    """Replaced weights have a content pattern fourteen times what is to be explained."""
    players = player_set(["rope", "qk"])
    key = torch.arange(N).double().repeat(N, 1)
    pattern, content = key, 14 * (key - 5).abs()
    qk = Condition({"w_q", "w_k"})
    values = {INTACT: pattern, Condition({"rope"}): 0 * key, qk: content, qk | {"rope"}: content}
    [layer] = attribute(
        as_folds({**values, Condition({"mask"}): pattern, Condition({"mask", "rope"}): 0 * key}),
        [players],
    )
    rope, weights = layer.players
    assert (rope.lost.value, rope.alone.value) == pytest.approx((1, 0))
    assert (weights.lost.value, weights.share.value) == pytest.approx((1, 0.5))
    assert math.isnan(weights.alone.value)


def test_a_player_that_changes_nothing_has_no_share_and_equal_players_have_equal_shares():
    """The dummy and symmetry axioms, where w_o multiplies nothing and w_q, w_k do the same."""
    players = player_set(["mask", "w_q", "w_k", "w_o"])
    key = torch.arange(N).double().repeat(N, 1)
    values = {}
    for kept in coalitions(players.players):
        names = {player.name for player in kept}
        strength = ("mask" in names) * (1 + len(names & {"w_q", "w_k"}))
        values[players.condition(kept)] = strength * key
    [layer] = attribute(as_folds(values), [players], sources=["mask"])
    mask, w_q, w_k, w_o = layer.players
    assert w_o.share.value == pytest.approx(0)
    assert w_o.amplification.value == pytest.approx(1)
    assert w_q.share.value == pytest.approx(w_k.share.value) == pytest.approx(1 / 6)
    assert mask.share.value == pytest.approx(2 / 3)
    assert mask.alone.value == pytest.approx(1 / 3)
    assert w_q.amplification.value == pytest.approx(3 / 2)
    shares = {interaction.players: interaction.share.value for interaction in layer.interactions}
    assert shares["mask", "w_q"] == pytest.approx(1 / 3)
    assert shares["mask", "w_q", "w_k"] == pytest.approx(0)
    assert ("w_q", "w_k") not in shares, "weights alone share nothing"


def test_without_a_source_the_base_and_the_shares_add_to_one():
    players = player_set(["w_q", "w_k"])
    values = random_values(players, seed=5)
    [layer] = attribute(as_folds({**values, Condition({"mask"}): values[INTACT]}), [players])
    by_name = {player.player: player for player in layer.players}
    assert list(by_name) == ["w_q", "w_k", "base"]
    assert sum(player.share.value for player in layer.players) == pytest.approx(1)
    cells = kept_cells(N)
    left, whole = (row_centred(values[c])[cells] for c in (Condition({"w_q", "w_k"}), INTACT))
    truth = float((left * whole).sum() / whole.square().sum())
    assert by_name["base"].share.value == pytest.approx(truth)
    for part in ("lost", "alone", "amplification"):
        assert math.isnan(getattr(by_name["base"], part).value)


def powerset_values(names: list[str]) -> dict[Condition, Tensor]:
    subsets = (members for size in range(len(names) + 1) for members in combinations(names, size))
    return {Condition(subset): torch.randn(N, N, dtype=torch.float64) for subset in subsets}


def _without_rope(values: dict[Condition, Tensor]) -> dict[Condition, Tensor]:
    return {Condition(removed - {"rope"}): value for removed, value in values.items()}


def test_the_sources_are_what_each_adds_alone_and_add_up_to_the_intact_pattern():
    both = Condition({"mask", "rope"})
    conditions = [INTACT, Condition({"mask"}), Condition({"rope"}), both]
    values = {c: torch.randn(N, N, dtype=torch.float64) for c in conditions}
    terms = {
        name: contrast_map(term, values) for name, term in source_terms(["mask", "rope"]).items()
    }
    assert list(terms) == ["content", "mask", "rope", "mask_x_rope"]
    torch.testing.assert_close(sum(terms.values()), values[INTACT])
    torch.testing.assert_close(terms["content"], values[both])
    torch.testing.assert_close(terms["mask"], values[Condition({"rope"})] - values[both])
    torch.testing.assert_close(terms["rope"], values[Condition({"mask"})] - values[both])
    three = powerset_values(["mask", "rope", "window"])
    terms = source_terms(["mask", "rope", "window"])
    torch.testing.assert_close(
        sum(contrast_map(term, three) for term in terms.values()), three[INTACT], rtol=0, atol=1e-9
    )
    of_window = {c: value for c, value in three.items() if "rope" in c}
    torch.testing.assert_close(
        contrast_map(terms["mask_x_window"], three),
        contrast_map(source_terms(["mask", "window"])["mask_x_window"], _without_rope(of_window)),
    )
    content, mask = {Condition({"mask"}): 1}, {INTACT: 1, Condition({"mask"}): -1}
    assert source_terms(["mask"]) == {"content": content, "mask": mask}
    assert position_term(["mask"]) == mask


@pytest.mark.parametrize(
    ("off", "conjunction"),
    [(0, True), (CONJUNCTION_TOLERANCE - 0.01, True), (CONJUNCTION_TOLERANCE + 0.01, False)],
)
def test_a_conjunction_of_two_gives_each_a_half_and_is_named_within_its_tolerance(
    off: float, conjunction: bool
):
    players = player_set(["mask", "w_q"])
    pattern = torch.arange(N).double().repeat(N, 1)
    # The mask's share is (1 + x) / 2 where it brings x of the pattern alone, and w_q nothing.
    x = 2 * off
    values = {INTACT: pattern, Condition({"w_q"}): x * pattern}
    values |= {Condition({"mask"}): 0 * pattern, Condition({"mask", "w_q"}): 0 * pattern}
    [layer] = attribute(as_folds(values), [players], sources=["mask"])
    mask, w_q = layer.players
    assert (mask.share.value, mask.alone.value) == pytest.approx(((1 + x) / 2, x))
    assert (mask.lost.value, w_q.lost.value) == pytest.approx((1, 1 - x))
    assert layer.interactions[0].share.value == pytest.approx(1 - x)
    assert layer.is_conjunction("players") == conjunction
    assert not layer.is_conjunction("circuits")


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
    values = as_folds({INTACT: with_mask, Condition({"mask"}): without})
    [layer] = attribute(values, sources=["mask"], skip_keys=skip_keys)
    effect = layer.non_relative
    assert effect.with_mask.value == pytest.approx(expected[0])
    assert effect.without_mask.value == pytest.approx(expected[1])
    assert effect.difference.value == pytest.approx(expected[0] - expected[1])


MAPS = {
    removed: ScoreMaps(
        folds=torch.randn(5, 2, 11, 11, generator=torch.Generator().manual_seed(seed)).double(),
        visible=torch.ones(2, 11, 11, dtype=torch.bool),
        counts=torch.full((5,), 3),
        layers=(0, 1),
    )
    for seed, removed in enumerate(map(Condition, ((), ("mask",), ("rope",), ("mask", "rope"))))
}
BOTH = Condition({"mask", "rope"})


@pytest.mark.parametrize(
    ("removed", "components"),
    [
        ((), ""),
        ("mask", "mask"),
        (["rope", "mask"], "mask rope"),
        (("mask+rope",), "mask rope"),
        ("qk", "w_k w_q"),
        (frozenset({"ov", "mlp"}), "mlp w_o w_v"),
        ((name for name in ("w_q",)), "w_q"),
        ("rope_low", "rope_low"),
        (("rope_high", "rope_low", "mask"), "mask rope"),
        ("rope_low+rope_high", "rope"),
    ],
)
def test_a_condition_is_named_by_what_is_removed(removed, components: str) -> None:
    assert Condition.parse(removed) == frozenset(components.split())
    assert kept_name({"w_v", "rope", "w_o", "mask"}) == "mask+rope+w_o+w_v", "as in tables"


def test_captures_are_measured_and_attributed_like_their_folds_whatever_the_names() -> None:
    names = ((), "mask", ("rope",), "rope+mask")
    named = dict(zip(names, MAPS.values(), strict=True))
    folds = {removed: maps.folds for removed, maps in MAPS.items()}
    players = [player_set(["mask", "rope"])]
    assert attribute(named, players) == attribute(folds, players, sources=["mask", "rope"])
    assert repr(measure(MAPS[MASK], 1)) == repr(measure(folds[MASK], 1))


@pytest.mark.parametrize(
    ("conditions", "sources"),
    [
        ([INTACT, MASK], "mask"),
        (list(MAPS), "mask rope"),
        ([INTACT, BOTH], "mask rope"),
        ([INTACT, MASK, Condition({"pos_embed", "mask"})], "mask pos_embed"),
        ([INTACT, MASK, Condition({"rope", "w_q"})], "mask"),
        ([INTACT, Condition({"rope"}), Condition({"window"})], "mask rope window"),
    ],
)
def test_the_sources_are_those_that_are_removed(conditions, sources: str) -> None:
    assert sources_of(conditions) == tuple(sources.split())


@pytest.mark.parametrize(
    ("conditions", "error", "message"),
    [
        ([(), "maks"], ValueError, "unknown player 'maks'; there are mask, rope, w_q"),
        (["mask", "rope", "rope+mask"], KeyError, "no maps of the model with nothing removed"),
        ([(), "rope", "rope+mask"], KeyError, "no maps of the model with mask removed"),
        ([(), "mask", "rope"], KeyError, r"no maps of the model with mask \+ rope removed"),
        ([(), "mask+rope", "rope+mask"], ValueError, "expected one entry per condition"),
    ],
)
def test_a_condition_that_is_unknown_missing_or_given_twice_is_named(
    conditions: list, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attribute(dict.fromkeys(conditions, MAPS[BOTH]), sources=["mask", "rope"])
