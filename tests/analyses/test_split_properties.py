"""Every split of a map adds up to the map, for any maps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nope_probe.analyses.attribution import attribute
from nope_probe.analyses.head_measures import position_and_content
from nope_probe.analyses.pattern_rows import offset_means
from nope_probe.analyses.splits import (
    Band,
    participation_ratio,
    split_bands,
    split_covariance,
    split_mean_covariance,
)
from nope_probe.maps.centred import kept_cells

SEEDS = st.integers(0, 2**32 - 1)
SKIPS = st.integers(0, 3)
N, FOLDS, LAYERS = 11, 5, 2


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def fold_maps(seed: int, *some: int) -> Tensor:
    """Return fold maps of layers that exceed their noise."""
    shape = (LAYERS, *some, N, N)
    return randn(seed, *shape) + 0.1 * randn(seed + 1, FOLDS, *shape)


@given(SEEDS, SKIPS)
def test_shares_of_the_sources_add_to_one_and_maps_to_the_pattern(seed: int, skip: int):
    names = ((), "mask", "rope", ("mask", "rope"))
    maps = {name: fold_maps(seed + 10 * i) for i, name in enumerate(names)}
    for layer in attribute(maps, skip_keys=skip):
        content = layer.sources[0].share.value
        assert sum(each.share.value for each in layer.sources) == pytest.approx(1)
        assert content + layer.position.share.value == pytest.approx(1)


@given(SEEDS, SKIPS)
def test_shares_of_mean_and_covariance_add_to_one(seed: int, skip: int):
    scores, mean_term = fold_maps(seed)[:, 0], fold_maps(seed + 5)[:, 0]
    found = split_mean_covariance(3, scores, mean_term, randn(seed, FOLDS, N, 3), skip)
    assert found.layer == 3
    assert found.mean.value + found.covariance.value == pytest.approx(1)


@given(SEEDS, SKIPS, st.integers(1, 4))
def test_shares_of_bands_add_to_one(seed: int, skip: int, n_bands: int):
    maps = fold_maps(seed, n_bands)
    bands = [
        [
            Band(layer=layer, name=str(b), pairs=(b,), wavelengths=(9.0,), coordinates=(b, b + 9))
            for b in range(n_bands)
        ]
        for layer in range(LAYERS)
    ]
    found = split_bands(maps.sum(2), maps, bands, skip)
    for layer in range(LAYERS):
        shares = [each.share.value for each in found if each.band.layer == layer]
        assert len(shares) == n_bands
        assert sum(shares) == pytest.approx(1)


@given(SEEDS, st.integers(2, 9))
def test_the_parts_of_a_covariance_term_add_up_and_have_no_means(seed: int, n: int):
    term = randn(seed, n, n)
    parts = split_covariance(term)
    of_query, of_key = parts.query_residual[:, None], parts.key_residual[None]
    torch.testing.assert_close(parts.context + of_query + of_key + parts.residual, term)
    for part in (parts.query_residual, parts.key_residual):
        assert abs(float(part.mean())) < 1e-12
    assert parts.residual.mean(0).abs().max() < 1e-12
    assert parts.residual.mean(1).abs().max() < 1e-12


@given(SEEDS, SKIPS)
def test_offset_means_weighted_by_their_cells_are_the_mean_of_the_map(seed: int, skip: int):
    maps, cells = randn(seed, 3, N, N), kept_cells(N, skip)
    n_cells = torch.arange(N - 1 - skip, 0, -1).double()
    mean = (offset_means(maps, skip) * n_cells).sum(-1) / n_cells.sum()
    torch.testing.assert_close(mean, maps[:, cells].mean(-1))


@given(SEEDS, SKIPS)
def test_offset_means_of_a_function_of_the_distance_are_that_function(seed: int, skip: int):
    f = randn(seed, N)
    position = torch.arange(N)
    maps = f[(position[:, None] - position[None]).abs()]
    torch.testing.assert_close(offset_means(maps, skip), f[1 : N - skip])


@given(SEEDS)
def test_place_key_and_rest_have_variances_that_add_up(seed: int):
    place, key, rest = randn(seed, 7, 1), randn(seed + 1, 1, 7), randn(seed + 2, 7, 7)
    rest = rest - rest.mean(0) - rest.mean(1, keepdim=True) + rest.mean()
    positional, symbolic, whole = position_and_content(place + key + rest + 3.0)
    variance = {"unbiased": False}
    torch.testing.assert_close(positional, place.var(**variance))
    torch.testing.assert_close(symbolic, key.var(**variance))
    torch.testing.assert_close(whole, positional + symbolic + rest.square().mean())


@given(SEEDS, st.integers(1, 6), st.floats(-5, 5))
def test_means_in_k_equal_orthogonal_directions_span_k_dimensions(seed: int, k: int, shift: float):
    """One position at each end of each axis, and a mean of all positions that is far from 0."""
    basis = torch.linalg.qr(randn(seed, 7, 7)).Q[:k]
    points = torch.cat([basis, -basis]) + shift * randn(seed + 1, 7)
    folds = points.repeat(FOLDS, 1, 1) + 1e-9 * randn(seed + 2, FOLDS, 2 * k, 7)
    assert participation_ratio(folds).value == pytest.approx(k, rel=1e-4)
