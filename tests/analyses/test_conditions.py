"""`measure` and `attribute` take what captures return, under the names of what is removed."""

from dataclasses import astuple

import pytest
import torch

from nope_probe import attribute, measure, player_set
from nope_probe.analyses.attribution import position_of
from nope_probe.analyses.shapley import condition
from nope_probe.maps.maps import ScoreMaps

INTACT, MASK, ROPE, BOTH = (
    frozenset(each) for each in ((), ("mask",), ("rope",), ("mask", "rope"))
)


def captured(seed: int) -> ScoreMaps:
    folds = torch.randn(5, 2, 11, 11, generator=torch.Generator().manual_seed(seed)).double()
    return ScoreMaps(
        folds=folds,
        visible=torch.ones(2, 11, 11, dtype=torch.bool),
        counts=torch.full((5,), 3),
    )


MAPS = {removed: captured(seed) for seed, removed in enumerate((INTACT, MASK, ROPE, BOTH))}
FOLDS = {removed: each.folds for removed, each in MAPS.items()}


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
    assert condition(removed) == frozenset(components.split())


def test_a_component_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(ValueError, match="unknown player 'maks'; there are mask, rope, w_q"):
        attribute({(): MAPS[INTACT], "maks": MAPS[MASK]})


def test_captures_are_measured_like_their_folds() -> None:
    maps = captured(7)
    for ours, theirs in zip(measure(maps, 1), measure(maps.folds, 1), strict=True):
        assert str(astuple(ours)) == str(astuple(theirs))


def test_captures_are_attributed_like_their_folds_whatever_the_names() -> None:
    named = {(): MAPS[INTACT], "mask": MAPS[MASK], ("rope",): MAPS[ROPE], "rope+mask": MAPS[BOTH]}
    players = [player_set(["mask", "rope"])]
    assert attribute(named, players) == attribute(FOLDS, players, position="rope")


@pytest.mark.parametrize(
    ("conditions", "position"),
    [
        ([INTACT, MASK], None),
        ([INTACT, MASK, ROPE, BOTH], "rope"),
        ([INTACT, BOTH], "rope"),
        ([INTACT, MASK, frozenset({"pos_embed", "mask"})], "pos_embed"),
        ([INTACT, MASK, frozenset({"rope", "w_q"})], None),
    ],
)
def test_the_position_encoding_is_the_one_that_is_removed(conditions, position) -> None:
    assert position_of(conditions) == position


def test_without_a_position_encoding_mask_and_content_make_the_pattern() -> None:
    (first, _) = attribute({(): MAPS[INTACT], "mask": MAPS[MASK]})
    assert [source.term for source in first.sources] == ["content", "mask"]


@pytest.mark.parametrize(
    ("missing", "named"), [(INTACT, "nothing"), (MASK, "mask"), (BOTH, r"mask \+ rope")]
)
def test_a_missing_condition_is_named(missing: frozenset, named: str) -> None:
    some = {removed: each for removed, each in MAPS.items() if removed != missing}
    with pytest.raises(KeyError, match=f"no maps of the model with {named} removed"):
        attribute(some)


def test_a_condition_that_is_given_twice_is_an_error() -> None:
    twice = {(): MAPS[INTACT], ("mask", "rope"): MAPS[BOTH], ("rope", "mask"): MAPS[BOTH]}
    with pytest.raises(ValueError, match="expected one entry per condition"):
        attribute(twice)
