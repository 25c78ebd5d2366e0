"""Changes of heads between two models: t tests by scipy, Holm's rule by hand, the gap of bounds."""

from math import isnan

import pytest
import torch
from scipy.stats import ttest_ind, ttest_rel
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit
from nope_probe.analyses.head_changes import QUANTITIES, HeadChange, head_changes, holm
from nope_probe.maps.estimates import Estimates

N_FOLDS = 17


def head(folds: Tensor, *, first_gap: float = 0.0, others_gap: float = 0.0) -> AttentionSplit:
    """Return a head whose every quantity is a mean over sequences, from [quantity, fold]."""
    parts = {
        name: Estimates.of_means(values) for name, values in zip(QUANTITIES, folds, strict=True)
    }
    rest = dict.fromkeys(("first_weight", "unexplained"), parts["information"])
    return AttentionSplit(**parts, **rest, first_gap=first_gap, others_gap=others_gap)


def noise(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(QUANTITIES), N_FOLDS, generator=generator, dtype=torch.float64)


def by_quantity(base: AttentionSplit, other: AttentionSplit, *, paired: bool) -> list[HeadChange]:
    changes = head_changes({(2, 3): base}, {(2, 3): other}, paired=paired)
    assert [(c.layer, c.head, c.quantity) for c in changes] == [(2, 3, q) for q in QUANTITIES]
    return changes


@pytest.mark.parametrize("paired", [True, False])
def test_the_change_of_a_mean_is_tested_as_scipy_tests_it(paired: bool) -> None:
    x, y = noise(0), noise(0) * 0.3 + noise(1) + 0.7
    expected = []
    for before, after in zip(x.numpy(), y.numpy(), strict=True):
        test = ttest_rel(after, before) if paired else ttest_ind(after, before, equal_var=False)
        expected.append((test.pvalue, *test.confidence_interval(0.95)))
    changes = by_quantity(head(x), head(y), paired=paired)
    for change, mean, (_, low, high) in zip(changes, (y - x).mean(-1), expected, strict=True):
        assert change.change.value == pytest.approx(float(mean))
        assert (change.change.low, change.change.high) == pytest.approx((low, high))
    assert [c.p_holm for c in changes] == pytest.approx(holm([p for p, *_ in expected]))


def test_equal_heads_have_no_change_and_no_doubt() -> None:
    for change in by_quantity(head(noise(0)), head(noise(0)), paired=True):
        assert (change.change.value, change.change.low, change.change.high) == (0, 0, 0)
        assert (change.p_holm, change.changed) == (1, False)


def test_a_change_in_every_fold_alike_is_certain() -> None:
    moved = noise(0)
    moved[3] += 0.5
    changes = by_quantity(head(noise(0)), head(moved), paired=True)
    assert [change.quantity for change in changes if change.changed] == ["others_position"]


def test_differences_of_rounding_are_no_changes() -> None:
    changes = by_quantity(head(noise(0)), head(noise(0) + 5e-7), paired=True)
    assert not any(change.changed for change in changes)


def test_unlike_gaps_of_bounds_widen_the_change_of_their_parts_toward_more_content() -> None:
    base, wide = head(noise(0), others_gap=0.1), head(noise(0), others_gap=0.9)
    gap = (0.9 - 0.1) / 8
    changes = {c.quantity: c.change for c in by_quantity(base, wide, paired=True)}
    assert (changes["others_position"].low, changes["others_position"].high) == (
        pytest.approx(-gap),
        0,
    )
    assert (changes["others_content"].low, changes["others_content"].high) == (
        0,
        pytest.approx(gap),
    )
    assert changes["first_position"].low == changes["information"].low == 0


def test_a_change_within_the_gaps_is_none() -> None:
    moved = noise(0)
    moved[3] -= 0.05  # position among the other keys: less, by less than an eighth of the gap
    base = head(noise(0), others_gap=0.0)
    for gap, changed in ((0.0, True), (0.8, True)):  # a wider gap means position may be even less
        changes = by_quantity(base, head(moved, others_gap=gap), paired=True)
        assert any(c.changed for c in changes) is changed
    changes = by_quantity(head(noise(0), others_gap=0.8), head(moved), paired=True)
    assert not any(c.changed for c in changes)


def test_holms_rule_multiplies_by_the_tests_left_and_never_falls() -> None:
    adjusted = holm([0.04, 0.001, float("nan"), 0.02, 0.03])
    # Ordered: 0.001 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1, none below an earlier product.
    assert adjusted[:2] == pytest.approx([0.06, 0.004])
    assert isnan(adjusted[2])
    assert adjusted[3:] == pytest.approx([0.06, 0.06])


def test_without_a_change_heads_are_named_in_at_most_one_family_of_twenty() -> None:
    named = 0
    for family in range(100):
        base = {(0, i): head(noise(1000 * family + i)) for i in range(7)}
        other = {(0, i): head(noise(1000 * family + 500 + i)) for i in range(7)}
        named += any(change.changed for change in head_changes(base, other, paired=False))
    # 5 of 100 expected at most; 12 or more have a probability below 0.005.
    assert named < 12


def test_models_without_a_common_head_are_refused() -> None:
    with pytest.raises(ValueError, match="no head in common"):
        head_changes({(0, 0): head(noise(0))}, {(1, 0): head(noise(0))}, paired=True)
