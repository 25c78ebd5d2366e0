"""How far two computations of the same numbers may differ by rounding: the tolerance of all tests.

Processors, batch sizes and numbers of threads add up the same terms in different orders. A sum (or
inner product) of n terms then differs from the exact sum by at most `rounding(n)` times the sum of
its absolute terms. What goes through a whole network has the contract `NETWORK` instead, since
weights decide how far a rounding grows.

Both are relative to the largest value of a tensor, never to a single cell: a score near 0 is a sum
of terms that cancel, and is as inexact as any other score.
"""

from math import sqrt

import numpy as np
import pandas as pd
import torch
from torch import Tensor

LIKELY = 5

# The documented contract for all that a network computes in float32: 1e-5 of the largest value. A
# chain of 1,100 roundings stays below it (`rounding(1100)`); the three blocks of a tiny model have
# some 350 each, in norms, projections, scores, values and the MLP.
NETWORK = 1e-5

# The same for the parameter-free transformer, whose vectors are normed and weights are 1: there
# roundings do not grow.
PARAMETER_FREE = 1e-6

# Of what is computed from maps and losses. A pattern is a tenth of its scores or more; a softmax
# makes the absolute error of a score of 10 nats a relative one.
MEASURE = 10 * NETWORK


def rounding(n_terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the relative error of a sum of n terms, of the sum of their absolute values.

    This is the bound LIKELY sqrt(n) u of Higham and Mary (2019, A new approach to probabilistic
    rounding error analysis), u = 2^-24 in float32: roundings of either sign cancel. A sum exceeds
    the bound with a probability below 2 exp(-LIKELY^2 / 2) = 8e-6, if its partial sums are as large
    as all terms together, which they are not. The certain bound n u would be 30 times wider at
    n = 1,000 and hide small mistakes. Sums of two computations differ by less than twice the bound.

    Example:
        >>> rounding(100) == 50 * 2**-24
        True
    """
    return LIKELY * sqrt(n_terms) * torch.finfo(dtype).eps / 2


def assert_same(
    values: Tensor | np.ndarray | pd.Series,
    expected: Tensor | np.ndarray | pd.Series,
    bound: float = NETWORK,
    *,
    size: float | None = None,
) -> None:
    """Check that values are NaN where they should be, and differ by no more than rounding.

    Args:
        values: what is tested.
        expected: what it should be, of the same shape.
        bound: the largest difference, relative to `size`.
        size: the largest sum of absolute terms; by default the largest expected value, for sums
            whose terms do not cancel everywhere.
    """
    values, expected = _float64(values), _float64(expected)
    assert values.shape == expected.shape
    assert torch.equal(values.isnan(), expected.isnan()), "NaN in other cells"
    numbers = ~expected.isnan()
    allowed = bound * (float(expected[numbers].abs().max()) if size is None else size)
    error = float((values - expected)[numbers].abs().max())
    assert error <= allowed, f"differs by {error:.3g}, {error / allowed:.3g} times what is allowed"


def _float64(values: Tensor | np.ndarray | pd.Series) -> Tensor:
    tensor = values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    return tensor.double()


def assert_same_table(table: pd.DataFrame, expected: pd.DataFrame, bound: float = NETWORK) -> None:
    """Check that tables have the same texts, and numbers that `assert_same` takes, by columns."""
    assert [*table.columns] == [*expected.columns]
    assert table.index.equals(expected.index)
    for name, column in expected.items():
        if pd.api.types.is_float_dtype(column) and column.notna().any():
            assert_same(table[name], column, bound)
        else:
            pd.testing.assert_series_equal(table[name], column, check_dtype=False)
