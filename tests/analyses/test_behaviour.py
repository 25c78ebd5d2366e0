"""Parts of behaviour by hand; ridge regression against least squares.

tests/studies/test_behaviour.py has spans, intervals and targets, from plain transformers.
"""

import pytest
import torch

from nope_probe.analyses.behaviour import (
    binned_means,
    by_document,
    position_means,
    ridge,
    span_loss,
)


def losses_of(n: int, n_documents: int = 1) -> torch.Tensor:
    """Return windows of n tokens whose target t costs t nats, and 100 more per document."""
    targets = torch.arange(1, n, dtype=torch.float64)
    return targets + 100 * torch.arange(n_documents)[:, None]


def test_positions_are_averaged_in_bins_that_begin_with_the_first_one_scored() -> None:
    for first, expected in ((1, {1: 2.0, 4: 5.5, 8: 9.5}), (6, {6: 6.5, 8: 9.5})):
        starts, means = binned_means(losses_of(12, 5), first, width=4)
        assert dict(zip(starts, means.value - 200, strict=True)) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no targets from 7 to None in 7 tokens"):
        span_loss(losses_of(7), 7)


@pytest.mark.filterwarnings("error")
def test_a_single_document_has_a_loss_at_every_position_and_no_interval() -> None:
    means = position_means(losses_of(7))
    assert means.value.tolist() == [*range(1, 7)]
    assert (means.low.isnan() & means.high.isnan()).all()


def test_sequences_of_a_document_count_as_one() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
    assert by_document(values, torch.tensor([4, 1, 4])).tolist() == [[3.0, 4.0], [3.0, 5.5]]


N, D, TARGETS = 97, 7, 3


def regression_data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns of very different size and mean, and targets that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(-3, 3, D) + torch.linspace(-5, 50, D)
    mix = torch.randn(D, TARGETS, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, TARGETS, generator=generator, dtype=torch.float64)
    return x, (x - x.mean(0)) / x.std(0) @ mix + 0.3 * noise + 11


def moments(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    return x.T @ x, x.T @ y


@pytest.mark.parametrize("penalty", [1e-3, 0.5, 20.0])
def test_a_ridge_is_least_squares_with_a_row_per_penalised_weight(penalty: float) -> None:
    x, y = regression_data()
    spread = x.std(0, correction=0)
    standard = (x - x.mean(0)) / spread
    rows = torch.cat([standard, (penalty * N) ** 0.5 * torch.eye(D, dtype=torch.float64)])
    targets = torch.cat([y - y.mean(0), torch.zeros(D, TARGETS, dtype=torch.float64)])
    w = torch.linalg.lstsq(rows, targets).solution / spread[:, None]
    expected = torch.cat([w, (y.mean(0) - x.mean(0) @ w)[None]])
    torch.testing.assert_close(ridge(*moments(x, y), penalty), expected, rtol=1e-6, atol=1e-8)
    x[:, 4] = 2.0
    weights = ridge(*moments(x, y), penalty)
    assert weights.isfinite().all()
    assert float(weights[4].abs().max()) < 1e-6, "a constant column has weight zero"
