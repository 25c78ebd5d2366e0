"""Names of what can be removed: components, conditions and writers."""

from contextlib import nullcontext
from itertools import pairwise

import pytest

from nope_probe import Ablation
from nope_probe.hooks.removing.components import REMOVALS
from nope_probe.removal import (
    INTACT,
    MASK,
    POSITION_ENCODINGS,
    REMOVABLE,
    SOURCES,
    Component,
    Condition,
    Writer,
    validate_disjoint,
    writer_of,
)


@pytest.mark.parametrize(
    ("name", "kind", "block", "head"),
    [
        ("L2H11", "HEAD", 2, 11),
        ("ATTN3", "ATTN", 3, None),
        ("MLP10", "MLP", 10, None),
        ("BLOCK0", "BLOCK", 0, None),
        ("embed", "embed", 0, None),
        ("pos_embed", "pos_embed", 0, None),
    ],
)
def test_a_writer_knows_its_place_and_its_removal_names_it(
    name: str, kind: str, block: int, head: int | None
) -> None:
    writer = Writer(name)
    assert writer == name
    assert (writer.kind, writer.block, writer.head) == (kind, block, head)
    assert writer.removal == f"position[{name}]"
    removed = Component(f"position[{name}]").writer
    assert removed is not None
    assert (removed, removed.kind) == (writer, kind)


@pytest.mark.parametrize("name", ["W_Q", "RoPE", "Pos_Embed", "QK", "ROPE[0:4]", "Norms"])
def test_components_are_spelled_in_any_case(name: str) -> None:
    assert Condition.parse([name]) == Condition.parse([name.lower()])
    assert Ablation(remove=name).remove == [name.lower()]
    assert Condition.parse(f"{name}+MLP") == Condition.parse([name.lower(), "mlp"])
    with pytest.raises(ValueError, match=r"share|named twice"):
        Ablation(remove=[name, name.lower()])


@pytest.mark.parametrize("name", ["L2", "H1", "L1H", "MLP", "MLP١", "MLP1 ", "W_O", ""])
def test_other_names_are_no_writers(name: str) -> None:
    assert Writer.parse(name) is None
    assert writer_of(f"position[{name}]") is None
    with pytest.raises(ValueError, match="expected a writer, such as L1H0"):
        Writer(name)


def test_constants_are_writers_whose_position_is_never_removed() -> None:
    assert Writer("bias").kind == "bias"
    assert writer_of("position[bias]") is None
    assert writer_of("MLP1") is None


def test_writers_run_embeddings_first_and_heads_of_a_block_side_by_side() -> None:
    stages = [["embed", "pos_embed"], ["BLOCK0"], ["L1H0", "L1H7"], ["MLP1"], ["ATTN2"], ["MLP2"]]
    for before, after in pairwise(stages):
        for one in map(Writer, before):
            assert all(one.runs_before(Writer(other)) for other in after)
            assert not any(Writer(other).runs_before(one) for other in (*before, *after))


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["position[L1H0]", "w_o"], True),
        (["position[ATTN1]", "w_o"], True),
        (["position[ATTN1]", "position[L1H0]"], True),
        (["position[ATTN1]", "position[L2H1]"], False),
        (["position[MLP1]", "mlp"], True),
        (["position[MLP1]", "w_o"], False),
        (["position[pos_embed]", "pos_embed"], True),
        (["position[embed]", "pos_embed"], False),
        (["position[BLOCK1]", "position[L1H0]"], False),
    ],
)
def test_two_removals_of_one_output_are_refused(names: list[str], shared: bool) -> None:
    for ordered in (names, names[::-1]):
        refused = pytest.raises(ValueError, match="share the output of a component")
        with refused if shared else nullcontext():
            validate_disjoint(ordered)


def test_every_component_has_a_row_and_a_class_that_removes_it() -> None:
    assert {*REMOVALS} | {"written", "position"} == {*REMOVABLE}
    assert {*SOURCES} - {*POSITION_ENCODINGS} == {"mask", "window"}


def test_a_condition_is_named_by_its_removals_in_the_order_of_components() -> None:
    names = ["norms", "mlp", "rope[8:16]", "position[L1H0]", "rope[0:8]", "w_q", "mask"]
    assert Condition(names).ordered == [
        *("mask", "rope[0:8]", "rope[8:16]", "w_q", "mlp", "norms", "position[L1H0]")
    ]
    assert Condition({"w_q", "mask"}).name == "mask+w_q"
    assert INTACT == Condition.parse(()) == frozenset()
    assert INTACT.name == "intact"


def test_all_ways_to_name_a_condition_give_the_same() -> None:
    whole = Condition({"mask", "rope", "w_q", "w_k"})
    ways = (["mask+rope", "qk"], ["w_k", "rope_low", "rope_high", "w_q", "mask"], "qk+rope+mask")
    assert {Condition.parse(way) for way in ways} == {whole}
    assert Condition.parse("mask") == MASK
    assert Condition(["pos_embed", "position[pos_embed]"]).name == "pos_embed"
    assert all(Condition.parse(one.name) == one for one in (whole, INTACT, MASK))
    assert Ablation(remove=whole.name).condition == whole
