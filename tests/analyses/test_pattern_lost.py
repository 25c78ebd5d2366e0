"""What a removal takes from the positional part of a layer's scores."""

import math

import pytest
import torch

from nope_probe.analyses.jackknife import cross_products, jackknife
from nope_probe.analyses.pattern_lost import pattern_lost, positional_part

N, N_FOLDS = 13, 5


def draws() -> list[torch.Tensor]:
    """Return a positional part, and the contents of two models: [query_pos, key_pos]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(N, N, generator=generator).double() for _ in range(3)]


def folds(scores: torch.Tensor) -> torch.Tensor:
    return scores.expand(N_FOLDS, N, N).clone()


def rms_of_the_part(p: torch.Tensor, skip: int = 0) -> float:
    """Return the RMS over the cells skip <= j < i, each row centred, by a loop."""
    rows = [p[i, skip:i] for i in range(skip + 1, N)]
    cells = torch.cat([row - row.mean() for row in rows])
    return float(cells.square().mean().sqrt())


@pytest.mark.parametrize("kept", [1.0, 0.25, 0.0, -0.5])
@pytest.mark.parametrize("skip", [0, 1])
def test_it_is_the_share_that_is_gone_in_nats_whatever_the_contents(kept: float, skip: int) -> None:
    p, one, other = draws()
    whole = positional_part(folds(p + one), folds(one), skip)
    left = positional_part(folds(kept * p + other), folds(other), skip)
    lost = pattern_lost(whole, left)
    assert lost.value == pytest.approx((1 - kept) * rms_of_the_part(p, skip), abs=1e-9)


def test_it_is_undefined_where_there_is_no_positional_part() -> None:
    _, one, other = draws()
    nothing = positional_part(folds(one), folds(one))
    assert math.isnan(pattern_lost(nothing, positional_part(folds(one), folds(other))).value)


def test_the_interval_covers_the_noise_between_folds() -> None:
    p, one, _ = draws()
    noise = 0.1 * torch.randn(N_FOLDS, N, N, generator=torch.Generator().manual_seed(1)).double()
    whole = positional_part(folds(p + one) + noise, folds(one))
    lost = pattern_lost(whole, torch.zeros_like(whole))
    assert lost.low < rms_of_the_part(p) < lost.high
    assert lost.low > 0


def test_unequal_folds_have_the_weight_of_their_sequences() -> None:
    counts = [2, 3, 5, 7, 11]
    generator = torch.Generator().manual_seed(2)
    slope = torch.arange(31.0).double() / 7
    whole = slope + torch.randn(N_FOLDS, 31, generator=generator).double()
    left = slope / 3 + torch.randn(N_FOLDS, 31, generator=generator).double()

    def estimate(dropped: int | None) -> float:
        kept = [fold for fold in range(N_FOLDS) if fold != dropped]
        square = product = weight = 0.0
        for a in kept:
            for b in kept:
                if a != b:
                    square += counts[a] * counts[b] * float((whole[a] * whole[b]).mean())
                    product += counts[a] * counts[b] * float((left[a] * whole[b]).mean())
                    weight += counts[a] * counts[b]
        return (square - product) / weight / (square / weight) ** 0.5

    estimates = torch.tensor([estimate(each) for each in (None, *range(N_FOLDS))]).double()
    sizes = torch.tensor(counts)
    expected, lost = jackknife(estimates, sizes), pattern_lost(whole, left, sizes)
    assert lost.value == pytest.approx(expected.value, rel=1e-5)
    assert (lost.low, lost.high) == pytest.approx((expected.low, expected.high), rel=1e-5)


def test_it_is_undefined_where_the_positional_part_differs_as_much_between_folds() -> None:
    p, _, _ = draws()
    sizes = torch.tensor([1.0, 1.0, 1.0, 1.0, 19.0])  # every product of two folds is positive
    whole = sizes.double()[:, None] * p[1:].flatten()
    assert jackknife(cross_products(whole[None], whole[None])[:, 0, 0]).low < 0
    assert math.isnan(pattern_lost(whole, whole / 2).value)
