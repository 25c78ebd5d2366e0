"""Ridge regression from sums, against least squares on the data themselves."""

import pytest
import torch

from nope_probe.analyses.ridge import ridge

N, D, TARGETS = 97, 7, 3


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
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
def test_it_is_least_squares_with_a_row_per_penalised_weight(penalty: float) -> None:
    x, y = data()
    spread = x.std(0, correction=0)
    standard = (x - x.mean(0)) / spread
    rows = torch.cat([standard, (penalty * N) ** 0.5 * torch.eye(D, dtype=torch.float64)])
    targets = torch.cat([y - y.mean(0), torch.zeros(D, TARGETS, dtype=torch.float64)])
    w = torch.linalg.lstsq(rows, targets).solution / spread[:, None]
    expected = torch.cat([w, (y.mean(0) - x.mean(0) @ w)[None]])
    torch.testing.assert_close(ridge(*moments(x, y), penalty), expected, rtol=1e-6, atol=1e-8)


def test_it_is_scikit_learns_on_standardised_columns() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = data(1)
    spread = x.std(0, correction=0)
    theirs = linear_model.Ridge(alpha=0.2 * N).fit(((x - x.mean(0)) / spread).numpy(), y.numpy())
    ours = ridge(*moments(x, y), 0.2)
    w = torch.from_numpy(theirs.coef_).T / spread[:, None]
    torch.testing.assert_close(ours[:-1], w, rtol=1e-8, atol=1e-8)


def test_the_units_of_the_columns_do_not_matter() -> None:
    x, y = data(2)
    ours, other = ridge(*moments(x, y), 0.1), ridge(*moments(1000 * x, y), 0.1)
    torch.testing.assert_close(other[:-1] * 1000, ours[:-1], rtol=1e-6, atol=1e-9)


def test_a_constant_column_has_weight_zero() -> None:
    x, y = data(3)
    x[:, 4] = 2.0
    weights = ridge(*moments(x, y))
    assert weights.isfinite().all()
    assert float(weights[4].abs().max()) < 1e-6


def test_layers_are_solved_one_by_one() -> None:
    pairs = [moments(*data(seed)) for seed in range(3)]
    together = ridge(*(torch.stack(each) for each in zip(*pairs, strict=True)))
    for layer, pair in enumerate(pairs):
        torch.testing.assert_close(together[layer], ridge(*pair))
