"""Values under interventions, against plain arithmetic on maps."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from support.dense_patterns import leads, other_keys, patterns
from torch import Tensor

from nope_probe import (
    ScoreMaps,
    UserError,
    ablated,
    attribute,
    attribute_heads,
    capture_scores,
    load,
    measure,
    sequences,
)
from nope_probe.analyses.attribution import (
    conditions_of,
    contrast_grams,
    contrast_map,
    mean_over_layers,
    source_terms,
    sources_of,
)
from nope_probe.analyses.jackknife import jackknife
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import LayerMaps
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


def test_the_terms_of_the_sources_and_what_is_left_without_them_add_up_to_the_map() -> None:
    both = Condition(SOURCES)
    conditions = [INTACT, Condition({"mask"}), Condition({"rope"}), both]
    values = random_values(conditions)
    terms = {name: contrast_map(term, values) for name, term in source_terms(SOURCES).items()}
    assert list(terms) == ["mask", "rope", "mask_x_rope", "without_sources"]
    torch.testing.assert_close(sum(terms.values()), values[INTACT], rtol=0, atol=1e-9)
    torch.testing.assert_close(terms["without_sources"], values[both])
    torch.testing.assert_close(terms["mask"], values[Condition({"rope"})] - values[both])
    torch.testing.assert_close(terms["rope"], values[Condition({"mask"})] - values[both])
    names = ["mask", "rope", "window"]
    subsets = [Condition(s) for size in range(4) for s in combinations(names, size)]
    three = random_values(subsets, seed=3)
    terms = {name: contrast_map(term, three) for name, term in source_terms(names).items()}
    torch.testing.assert_close(sum(terms.values()), three[INTACT], rtol=0, atol=1e-9)
    torch.testing.assert_close(
        terms["mask_x_window"],
        three[Condition({"rope"})]
        - three[Condition({"mask", "rope"})]
        - three[Condition({"rope", "window"})]
        + three[Condition(names)],
    )


@pytest.mark.parametrize("skip_keys", [1, 3])
def test_values_and_terms_are_those_of_loops_over_rows(skip_keys: int) -> None:
    values = random_values([*conditions_of(SOURCES), *REMOVED], seed=11)
    for value in values.values():
        value[:, 0] += 5 * value[0, 0]  # a sink in each condition
    layer = attribute(as_folds(values), skip_keys=skip_keys)[0]
    assert [*layer.conditions] == [condition.name for condition in values]
    kept_cells = other_keys(torch.arange(N), N, skip_keys)
    intact = patterns(values[INTACT], kept_cells)

    def lead_of(maps: Tensor) -> float:
        return float(torch.stack([*leads(maps, kept_cells, skip_keys).values()]).mean())

    for condition, of_condition in values.items():
        seen, cells = layer.conditions[condition.name], patterns(of_condition, kept_cells)
        assert seen.lead.value == pytest.approx(lead_of(of_condition))
        assert seen.amplitude.value == pytest.approx(float(cells.square().mean().sqrt()))
        kept = (cells * intact).mean() / intact.square().mean().sqrt()
        assert seen.order.value == pytest.approx(float(kept))
    whole = layer.conditions["intact"]
    assert whole.order.value == pytest.approx(whole.amplitude.value)
    mask = values[Condition({"rope"})] - values[Condition(SOURCES)]
    size = patterns(mask, kept_cells).square().mean().sqrt()
    assert layer.terms["pattern"]["mask"].value == pytest.approx(float(size))
    assert layer.terms["lead"]["mask"].value == pytest.approx(lead_of(mask))
    left = lead_of(values[Condition(SOURCES)])
    assert layer.terms["lead"]["without_sources"].value == pytest.approx(left)
    total = sum(term.value for term in layer.terms["lead"].values())
    assert total == pytest.approx(whole.lead.value)


def test_a_reversed_pattern_is_kept_with_a_sign_and_another_one_is_not() -> None:
    key = torch.arange(N).double().repeat(N, 1)
    other = torch.where(torch.arange(N) % 2 == 0, 1.0, -1.0).double().repeat(N, 1)
    rows = [key[i, :i] - key[i, :i].mean() for i in range(1, N)]
    amplitude = float(torch.cat(rows).square().mean().sqrt())
    for row in range(1, N):  # without anything of the intact pattern
        centred = key[row, :row] - key[row, :row].mean()
        part = other[row, :row] - other[row, :row].mean()
        square = (centred @ centred).clamp_min(1e-9)
        other[row, :row] = part - (part @ centred) / square * centred
    layer = attribute(as_folds({INTACT: key, MASK: -0.5 * key, Condition({"rope"}): other}))[0]
    assert layer.conditions["mask"].order.value == pytest.approx(-amplitude / 2)
    assert layer.conditions["rope"].order.value == pytest.approx(0, abs=1e-9)
    assert layer.conditions["rope"].amplitude.value > 0.1
    assert layer.terms["pattern"] == {}, "the model without both was not run"
    assert math.isnan(layer.conditions["intact"].lead.value), "vectors have no first key"
    assert [*layer.terms] == ["pattern"]


def test_nothing_is_kept_of_a_pattern_within_its_noise() -> None:
    noise = torch.randn(FOLDS, 1, N, N, generator=torch.Generator().manual_seed(2)).double()
    layer = attribute({INTACT: noise - noise.mean(0), MASK: noise})[0]
    assert all(math.isnan(x.order.value) for x in layer.conditions.values())
    assert layer.conditions["mask"].amplitude.value > 0


def test_a_contrast_with_what_was_estimated_on_halves_is_of_pairs_across_them() -> None:
    """The folds of a half share an error, which the mean square without it leaves out."""
    generator = torch.Generator().manual_seed(7)
    signal, *errors = torch.randn(3, N, N, generator=generator).double()
    folds = torch.stack([signal + errors[fold % 2] for fold in range(6)])
    halves = LayerMaps.of(folds, across_halves=True).pattern
    whole = LayerMaps.of(signal.repeat(6, 1, 1)).pattern
    gram = contrast_grams({"halves": halves, "whole": whole})["pattern"]
    cells = other_keys(torch.arange(N), N, 0)
    even, odd, both = (patterns(maps, cells) for maps in (folds[0], folds[1], signal))
    for contrast, square in (
        ({"halves": 1.0}, (even * odd).mean()),
        ({"halves": 1.0, "whole": -1.0}, ((even - both) * (odd - both)).mean()),
        ({"whole": 1.0}, both.square().mean()),
    ):
        assert float(gram.product(contrast, contrast).values[0]) == pytest.approx(float(square))


def test_the_mean_over_layers_is_of_their_replicates() -> None:
    weights = torch.full((FOLDS,), 1 / FOLDS).double()
    folds = torch.randn(3, FOLDS, generator=torch.Generator().manual_seed(5)).double() + 4
    mean = mean_over_layers([Estimates.of_means(x, weights) for x in folds])
    expected = jackknife(Estimates.of_means(folds.mean(0), weights))
    assert mean.ends == pytest.approx(expected.ends)


def test_the_sources_are_removed_in_all_combinations() -> None:
    conditions = conditions_of(SOURCES)
    assert [condition.name for condition in conditions] == ["intact", "mask", "rope", "mask+rope"]
    assert len(conditions_of(("mask", "rope", "window"))) == 8
    assert conditions_of(("mask",)) == [INTACT, MASK]


MAPS = {
    removed: ScoreMaps(
        folds=torch.randn(5, 2, 11, 11, generator=torch.Generator().manual_seed(seed)).double(),
        visible=torch.ones(2, 11, 11, dtype=torch.bool),
        counts=torch.full((5,), 3),
        layers=(0, 1),
        query_positions=torch.arange(11),
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
    attributed = attribute_heads(captured)
    assert [*attributed] == [(layer, head) for layer in (0, 1) for head in range(3)]
    for (layer, head), of_head in attributed.items():
        alone = {
            removed: replace(MAPS[removed], folds=heads[removed][:, :, head]) for removed in MAPS
        }
        assert repr(of_head) == repr(replace(attribute(alone)[layer], head=head))
    with pytest.raises(UserError, match=r"no heads: capture_scores\(..., per_head=True\)"):
        attribute_heads(MAPS)
    with pytest.raises(UserError, match="no maps of the model with nothing removed"):
        attribute_heads({"mask": captured[MASK]})


def test_captures_are_measured_and_attributed_like_their_folds_whatever_the_names() -> None:
    names = ((), "mask", ("rope",), "rope+mask")
    named = dict(zip(names, MAPS.values(), strict=True))
    folds = {removed: maps.folds for removed, maps in MAPS.items()}
    assert repr(attribute(named, skip_keys=0)) == repr(attribute(folds))
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
    ("conditions", "message"),
    [
        ([(), "maks"], "unknown component 'maks'; there are mask, rope, w_q"),
        (["mask", "rope", "rope+mask"], "no maps of the model with nothing removed"),
        ([(), "mask+rope", "rope+mask"], "expected one entry per condition"),
    ],
)
def test_a_condition_that_is_unknown_missing_or_given_twice_is_named(
    conditions: list, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        attribute(dict.fromkeys(conditions, MAPS[BOTH]))


def test_maps_of_other_sequences_or_of_another_model_are_refused() -> None:
    loaded = load("nope-tiny", n_layers=2)
    tokens = sequences("random", tokenizer=loaded.tokenizer, n_seqs=8, seq_len=11).inputs
    with ablated(loaded, ("mask", "w_k"), tokens=tokens):
        without = capture_scores(loaded, tokens)
    intact = capture_scores(load("nope-tiny", n_layers=3), tokens)  # whose first layers are these
    removed = ("mask", "w_k")
    with pytest.raises(UserError, match="different layers: capture the same layers in every con"):
        attribute({(): intact, removed: without})
    first = capture_scores(load("nope-tiny"), tokens, layers=[0, 1], per_head=True)
    assert set(attribute({(): first, removed: without})) == {0, 1}
    assert set(attribute({(): first.head(1, 2), removed: first.head(1, 3)})) == {1}
    for given, tokens_of, what in (
        ("nope-tiny", tokens.flip(0), "on other sequences"),
        ("rope-tiny", tokens, "of another model"),
    ):
        other = capture_scores(load(given, n_layers=2), tokens_of)
        with pytest.raises(UserError, match=rf"\('mask', 'w_k'\) were captured {what} than thos"):
            attribute({(): other, removed: without})
