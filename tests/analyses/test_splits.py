"""Bands of RoPE's pairs, mean and covariance terms, on data whose parts are known."""

import pytest
import torch

from nope_probe.analyses.jackknife import UNDEFINED
from nope_probe.analyses.recover import Rotation
from nope_probe.analyses.splits import (
    make_bands,
    participation_ratio,
    split_bands,
    split_covariance,
    split_mean_covariance,
)

N, FOLDS = 17, 8


def test_terms_of_a_pattern_that_is_all_mean_are_one_and_zero():
    ramp = torch.arange(N).double().repeat(FOLDS, N, 1)
    terms = split_mean_covariance(0, ramp, ramp, torch.randn(FOLDS, N, 5))
    assert terms.mean.value == pytest.approx(1)
    assert terms.covariance.value == pytest.approx(0)
    assert terms.covariance_rms.value == pytest.approx(0)


def test_shares_of_terms_are_projections_on_the_whole_pattern_and_add_to_one():
    torch.manual_seed(0)
    ramp = torch.arange(N).double().repeat(FOLDS, N, 1)
    noisy = ramp + 0.1 * torch.randn(ramp.shape).double()
    terms = split_mean_covariance(0, noisy, 0.25 * ramp, torch.randn(FOLDS, N, 5))
    assert terms.mean.value == pytest.approx(0.25, abs=0.01)
    assert terms.mean.value + terms.covariance.value == pytest.approx(1)
    assert terms.mean_rms.value == pytest.approx(terms.covariance_rms.value / 3, rel=0.05)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_means_spread_evenly_over_k_dimensions_have_ratio_k(dimensions: int):
    basis = torch.linalg.qr(torch.randn(7, dimensions, dtype=torch.float64)).Q
    weights = torch.linalg.qr(torch.randn(N, dimensions + 1, dtype=torch.float64))
    centred = weights.Q - weights.Q.mean(0)
    coordinates = torch.linalg.qr(centred).Q[:, :dimensions]
    means = (coordinates @ basis.T).repeat(FOLDS, 1, 1)
    ratio = participation_ratio(means)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((dimensions,) * 3)


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_the_ratio_and_whether_it_is_defined_do_not_depend_on_the_unit(unit: float):
    torch.manual_seed(3)
    means = torch.randn(N, 5).double() + 0.1 * torch.randn(FOLDS, N, 5).double()
    ratio, scaled = participation_ratio(means), participation_ratio(unit * means)
    assert 1 < ratio.low < ratio.value < ratio.high < 5
    assert (scaled.value, scaled.low, scaled.high) == pytest.approx(
        (ratio.value, ratio.low, ratio.high)
    )


def test_the_ratio_is_taken_between_different_folds():
    torch.manual_seed(1)
    line = torch.arange(N).double()[:, None] * torch.randn(1, 31).double()
    noisy = line + 12 * torch.randn(FOLDS, N, 31).double()
    within = noisy.mean(0) - noisy.mean((0, 1))
    naive = within @ within.T
    biased = float(naive.trace() ** 2 / naive.square().sum())
    ratio = participation_ratio(noisy).value
    assert abs(ratio - 1) < abs(biased - 1) / 2


def test_the_ratio_of_positions_with_one_mean_is_undefined():
    torch.manual_seed(2)
    assert participation_ratio(torch.randn(FOLDS, N, 31)) is UNDEFINED


def song_and_zhong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean_t, ctx_c and the residual of vectors [sequence, position, width]."""
    overall = x.mean((0, 1), keepdim=True)
    position = x.mean(0, keepdim=True)
    context = x.mean(1, keepdim=True) - overall
    return tuple(part.expand_as(x) for part in (position, context, x - position - context))


def mean_score(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("siw,sjw->ij", q, k) / len(q)


def queries_and_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k whose means, contexts and residuals all differ, and are correlated."""
    generator = torch.Generator().manual_seed(0)
    base, context = (torch.randn(29, n, 5, generator=generator).double() for n in (11, 1))
    drift = torch.linspace(0, 2, 11)[:, None] * torch.randn(5, generator=generator).double()
    shared = base + drift + context + context.abs() * torch.linspace(-1, 1, 11)[:, None]
    return shared, 1.3 * shared.flip(-1) + 0.4 * base


def test_mean_context_cross_terms_are_0_by_construction_and_the_other_blocks_are_not():
    q, k = queries_and_keys()
    (q_mean, q_context, q_rest), (k_mean, k_context, k_rest) = map(song_and_zhong, (q, k))
    largest = mean_score(q, k).abs().max()
    for part in (k_context, k_rest):
        assert mean_score(q_mean, part).abs().max() < 1e-12 * largest
    for part in (q_context, q_rest):
        assert mean_score(part, k_mean).abs().max() < 1e-12 * largest
    covariance = mean_score(q_context + q_rest, k_context + k_rest)
    torch.testing.assert_close(mean_score(q_mean, k_mean) + covariance, mean_score(q, k))
    for left in (q_context, q_rest):
        for right in (k_context, k_rest):
            assert mean_score(left, right).abs().max() > 1e-2 * largest


def test_the_parts_of_the_covariance_term_are_those_of_context_and_residual():
    q, k = queries_and_keys()
    (_, q_context, q_rest), (_, k_context, k_rest) = map(song_and_zhong, (q, k))
    parts = split_covariance(mean_score(q_context + q_rest, k_context + k_rest))
    blank = torch.zeros(11, 11).double()
    for found, true in (
        (parts.context + blank, mean_score(q_context, k_context)),
        (parts.query_residual[:, None] + blank, mean_score(q_rest, k_context)),
        (parts.key_residual[None] + blank, mean_score(q_context, k_rest)),
        (parts.residual, mean_score(q_rest, k_rest)),
    ):
        torch.testing.assert_close(found, true)


def test_a_masked_covariance_term_has_no_context():
    with pytest.raises(ValueError, match="expected no masked cell"):
        split_covariance(torch.full((3, 3), torch.nan))


def turning(*frequencies: float) -> Rotation:
    """Return a rotation in halves."""
    n = len(frequencies)
    pairs = torch.tensor([[f, f + n] for f in range(n)], dtype=torch.long).reshape(n, 2)
    return Rotation(pairs=pairs, frequencies=torch.tensor(frequencies), size=1.0)


def test_octaves_hold_the_pairs_of_their_wavelengths():
    # Wavelengths 2 pi / frequency: 6.28, 7.0, 31.4, 125.7.
    [bands] = make_bands([turning(1.0, 0.9, 0.2, 0.05)], 11, "octaves")
    found = {band.name: (band.pairs, band.coordinates) for band in bands}
    assert found == {
        "4-8": ((0, 1), (0, 4, 1, 5)),
        "16-32": ((2,), (2, 6)),
        "64-128": ((3,), (3, 7)),
        "unrotated": ((), (8, 9, 10)),
    }
    assert bands[0].wavelengths == pytest.approx((6.2832, 6.9813), rel=1e-4)


def test_so_many_bands_have_consecutive_pairs_and_all_of_them():
    [bands] = make_bands([turning(*(0.5**f for f in range(7)))], 14, 3)
    assert [band.pairs for band in bands] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [band.name for band in bands] == ["0", "1", "2"]


def test_a_layer_without_rope_has_all_of_its_coordinates_in_the_rest():
    with_rope, without = make_bands([turning(1.0, 0.1), turning()], 5, 2)
    assert [band.name for band in with_rope] == [band.name for band in without]
    assert [band.coordinates for band in with_rope] == [(0, 2), (1, 3), (4,)]
    assert [band.coordinates for band in without] == [(), (), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("choice", ["octaves", 2])
def test_a_model_without_rope_has_no_bands(choice):
    with pytest.raises(ValueError, match="no layer has RoPE"):
        make_bands([turning(), turning()], 6, choice)


def test_more_bands_than_pairs_are_refused():
    with pytest.raises(ValueError, match="expected from 1 to 2 bands"):
        make_bands([turning(1.0, 0.1)], 4, 3)


def test_shares_of_bands_are_projections_and_add_to_1():
    n, position = 7, torch.arange(7.0, dtype=torch.float64)
    near = -(position[:, None] - position[None, :]).expand(n, n)
    # Two bands whose patterns are 3/4 and 1/4 of the whole, in all of five folds.
    maps = torch.stack([0.75 * near, 0.25 * near]).expand(5, 1, 2, n, n)
    bands = make_bands([turning(1.0, 0.1)], 4, 2)
    found = split_bands(maps.sum(2), maps, bands)
    assert [each.share.value for each in found] == pytest.approx([0.75, 0.25])
    rows = [near[i, :i] - near[i, :i].mean() for i in range(1, n)]
    whole = float(torch.cat(rows).square().mean().sqrt())
    assert found[0].amplitude.value == pytest.approx(0.75 * whole)
    assert found[1].amplitude.value == pytest.approx(0.25 * whole)
