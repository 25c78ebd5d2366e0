"""Maps pooled to blocks of positions."""

import numpy as np
import pytest
from support.maps import N, triangle

from nope_probe.maps.downsample import pool


def test_pooling_averages_blocks_and_leaves_the_masked_triangle_out() -> None:
    n = np.nan
    maps = np.array([[[1, n, n, n, n], [3, 5, n, n, n], [2, 4, 6, n, n], [4, 6, 8, 10, n]]])
    maps = np.concatenate([maps, np.full((1, 1, 5), 7.0)], axis=1).astype(np.float32)
    pooled = pool(maps, 3)
    assert pooled.block == 2
    # (1+3+5)/3 on the diagonal, (2+4+4+6)/4 below it; the last block has one row, then one cell.
    expected = [[[3, n, n], [4, 8, n], [7, 7, 7]]]
    np.testing.assert_allclose(pooled.values, expected)


def test_pooling_leaves_small_maps_as_they_are() -> None:
    maps = triangle()
    pooled = pool(maps, N)
    assert pooled.block == 1
    np.testing.assert_array_equal(pooled.values, maps)


def test_pooling_to_no_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 position, got 0"):
        pool(triangle(), 0)
