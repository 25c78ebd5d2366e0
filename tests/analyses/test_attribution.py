"""Attribution by the rules of the design, against plain arithmetic on maps."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from nope_probe.analyses.attribution import (
    attribute,
    attribute_heads,
    conditions_of,
    removals_in,
    sources_of,
)
from nope_probe.analyses.contrasts import contrast_map, lost, positional, source_terms
from nope_probe.analyses.pattern import measure
from nope_probe.analyses.pattern_changes import mask_effect
from nope_probe.errors import UserError
from nope_probe.maps.layers import LayerMaps, shared_patterns
from nope_probe.maps.maps import ScoreMaps
from nope_probe.removal import INTACT, MASK, Condition

N, FOLDS = 13, 5
SOURCES = ("mask", "rope")
REMOVED = [Condition.parse(name) for name in ("w_q", "qk", "mask+w_o", "rope[0:5]")]


def random_values(conditions: list[Condition], seed: int = 0) -> dict[Condition, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        condition: torch.randn(N, N, generator=generator, dtype=torch.float64)
        for condition in conditions
    }


def as_folds(values: dict[Condition, Tensor]) -> dict[Condition, Tensor]:
    """Noiseless folds of one layer."""
    return {removed: value.repeat(FOLDS, 1, 1, 1) for removed, value in values.items()}


def leads(maps: Tensor, skip_keys: int) -> Tensor:
    """Return the lead of each query, by a loop over rows."""
    queries = range(skip_keys + 8, N)
    return torch.stack([maps[i, :skip_keys].mean() - maps[i, skip_keys:i].mean() for i in queries])


def pattern(maps: Tensor, skip_keys: int) -> Tensor:
    """Return the cells of the pattern, by a loop over rows."""
    rows = [maps[i, skip_keys:i] for i in range(skip_keys + 1, N)]
    return torch.cat([row - row.mean() for row in rows])


def test_the_terms_of_the_sources_add_up_to_positions_part() -> None:
    both = Condition(SOURCES)
    conditions = [INTACT, Condition({"mask"}), Condition({"rope"}), both]
    values = random_values(conditions)
    terms = {name: contrast_map(term, values) for name, term in source_terms(SOURCES).items()}
    assert list(terms) == ["mask", "rope", "mask_x_rope"]
    torch.testing.assert_close(
        sum(terms.values()), values[INTACT] - values[both], rtol=0, atol=1e-9
    )
    torch.testing.assert_close(terms["mask"], values[Condition({"rope"})] - values[both])
    torch.testing.assert_close(terms["rope"], values[Condition({"mask"})] - values[both])
    names = ["mask", "rope", "window"]
    subsets = [Condition(s) for size in range(4) for s in combinations(names, size)]
    three = random_values(subsets, seed=3)
    position = contrast_map(positional(INTACT, names), three)
    terms = {name: contrast_map(term, three) for name, term in source_terms(names).items()}
    torch.testing.assert_close(sum(terms.values()), position, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        terms["mask_x_window"],
        three[Condition({"rope"})]
        - three[Condition({"mask", "rope"})]
        - three[Condition({"rope", "window"})]
        + three[Condition(names)],
    )


def test_the_loss_without_a_source_is_the_change_of_the_map() -> None:
    assert lost(MASK, SOURCES) == {INTACT: 1, MASK: -1}
    band = Condition({"rope[0:5]"})
    assert lost(band, SOURCES) == {INTACT: 1, band: -1}
    w_q, without = Condition({"w_q"}), Condition({"w_q", *SOURCES})
    expected = {INTACT: 1, Condition(SOURCES): -1, w_q: -1, without: 1}
    assert lost(w_q, SOURCES) == expected
    assert positional(Condition(SOURCES), SOURCES) == {}


@pytest.mark.parametrize("skip_keys", [1, 3])
def test_sizes_shares_and_losses_are_those_of_loops_over_rows(skip_keys: int) -> None:
    values = random_values(conditions_of(SOURCES, REMOVED), seed=11)
    for value in values.values():
        value[:, 0] += 5 * value[0, 0]  # a sink in each condition
    [layer] = attribute(as_folds(values), skip_keys=skip_keys, sources=SOURCES)
    assert layer.lead is not None
    for attribution, part, size in (
        (layer.lead, leads, lambda x: x.mean()),
        (layer.pattern, pattern, lambda x: x.square().mean().sqrt()),
    ):
        v = {condition: part(value, skip_keys) for condition, value in values.items()}
        nothing = v[Condition(SOURCES)]
        p = v[INTACT] - nothing
        assert attribution.size.value == pytest.approx(float(size(v[INTACT])))
        assert attribution.without_sources.value == pytest.approx(float(size(nothing)))
        share = (p @ v[INTACT]) / (v[INTACT] @ v[INTACT])
        assert attribution.from_sources.value == pytest.approx(float(share))
        mask = v[Condition({"rope"})] - nothing
        assert attribution.terms["mask"].share.value == pytest.approx(float(mask @ p / (p @ p)))
        assert attribution.terms["mask"].size.value == pytest.approx(float(size(mask)))
        assert sum(term.share.value for term in attribution.terms.values()) == pytest.approx(1)
        assert [*attribution.losses] == ["mask", "rope", *(one.name for one in REMOVED)]
        for name, loss in attribution.losses.items():
            removed = Condition.parse(name)
            left = v[removed] - v[Condition({*removed, *SOURCES})]
            assert loss.lost.value == pytest.approx(float((p - left) @ p / (p @ p)))
            ratio = (p @ p / (left @ left)).sqrt()
            assert loss.amplification.value == pytest.approx(float(ratio))
            made = left @ v[removed] / (v[removed] @ v[removed])
            assert loss.from_sources.value == pytest.approx(float(made))


def test_maps_of_vectors_have_no_lead_and_a_single_source_loses_all() -> None:
    values = random_values([INTACT, MASK])
    [layer] = attribute(as_folds(values))
    assert layer.lead is None
    assert [*layer.by_question] == ["pattern"]
    assert layer.pattern.losses["mask"].lost.value == pytest.approx(1)
    assert layer.pattern.terms["mask"].share.value == pytest.approx(1)
    assert math.isnan(layer.pattern.losses["mask"].amplification.value), "nothing is left"


def test_what_replaced_weights_make_without_sources_is_no_part_of_what_is_lost() -> None:
    """Replaced weights have a map fourteen times what is to be explained."""
    key = torch.arange(N).double().repeat(N, 1)
    rest, qk = 14 * (key - 5).abs(), Condition({"w_q", "w_k"})
    values = {INTACT: key, Condition({"rope"}): 0 * key, qk: rest, qk | {"rope"}: rest}
    values |= {MASK: key, Condition(SOURCES): 0 * key, qk | {*SOURCES}: rest}
    [layer] = attribute(as_folds({Condition(name): value for name, value in values.items()}))
    losses = layer.pattern.losses
    assert losses["w_q+w_k"].lost.value == pytest.approx(1)
    assert losses["rope"].lost.value == pytest.approx(1)
    assert losses["mask"].lost.value == pytest.approx(0)
    assert math.isnan(losses["w_q+w_k"].amplification.value)


def test_what_has_a_loss_is_run_with_and_without_the_sources() -> None:
    conditions = conditions_of(SOURCES, REMOVED)
    names = ["intact", "mask", "rope", "mask+rope", "w_q", "mask+rope+w_q", "w_q+w_k"]
    names += ["mask+rope+w_q+w_k", "mask+w_o", "mask+rope+w_o", "rope[0:5]"]
    assert [condition.name for condition in conditions] == names
    assert removals_in(conditions, SOURCES) == [MASK, Condition({"rope"}), *REMOVED]
    assert len(conditions_of(("mask", "rope", "window"))) == 8
    assert conditions_of(("mask",)) == [INTACT, MASK]


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
    folds = [LayerMaps.of(x.repeat(FOLDS, 1, 1), skip_keys=skip_keys) for x in (with_mask, without)]
    effect = mask_effect(*shared_patterns(folds))
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


def test_a_head_is_attributed_like_a_layer_of_its_maps() -> None:
    generator = torch.Generator().manual_seed(1)
    heads = {
        removed: torch.randn(5, 2, 3, 11, 11, generator=generator).double() for removed in MAPS
    }
    captured = {removed: replace(MAPS[removed], per_head=heads[removed]) for removed in MAPS}
    for options in ({}, {"sources": ["mask", "rope"]}):
        attributed = attribute_heads(captured, **options)
        assert [*attributed] == [(layer, head) for layer in (0, 1) for head in range(3)]
        for (layer, head), of_head in attributed.items():
            alone = {
                removed: replace(MAPS[removed], folds=heads[removed][:, :, head])
                for removed in MAPS
            }
            expected = replace(attribute(alone, **options)[layer], head=head)
            assert repr(of_head) == repr(expected)
    with pytest.raises(UserError, match=r"no heads: capture_scores\(..., per_head=True\)"):
        attribute_heads(MAPS)
    with pytest.raises(KeyError, match="no maps of the model with mask removed"):
        attribute_heads({(): captured[INTACT]})


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


def test_captures_are_measured_and_attributed_like_their_folds_whatever_the_names() -> None:
    names = ((), "mask", ("rope",), "rope+mask")
    named = dict(zip(names, MAPS.values(), strict=True))
    folds = {removed: maps.folds for removed, maps in MAPS.items()}
    assert attribute(named) == attribute(folds, sources=["mask", "rope"])
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
        ([(), "maks"], ValueError, "unknown component 'maks'; there are mask, rope, w_q"),
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
