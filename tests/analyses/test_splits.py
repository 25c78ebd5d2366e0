"""Bands of RoPE's pairs, mean and covariance terms: on data whose parts are known, and any."""

from math import pi

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nope_probe.analyses.splits import (
    Band,
    make_bands,
    split_bands,
)
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.rotation import Rotation

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


def turning(*frequencies: float) -> Rotation:
    """Return a rotation in halves."""
    n = len(frequencies)
    pairs = torch.tensor([[f, f + n] for f in range(n)], dtype=torch.long).reshape(n, 2)
    angles = torch.arange(2.0)[:, None] * torch.tensor(frequencies)
    return Rotation(pairs=pairs, cos=angles.cos(), sin=angles.sin())


def test_so_many_bands_have_consecutive_pairs_and_all_of_them():
    [bands] = make_bands([turning(*(0.5**f for f in range(7)))], 14, 3)
    assert [band.wavelengths for band in bands[1:]] == [
        pytest.approx([2 * pi * 2.0**pair for pair in pairs]) for pairs in ((3, 4), (5, 6))
    ]
    assert [band.pairs for band in bands] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [band.name for band in bands] == ["0", "1", "2"]


def test_a_layer_without_rope_has_all_of_its_coordinates_in_the_rest():
    with_rope, without = make_bands([turning(1.0, 0.1), turning()], 5, 2)
    assert [band.name for band in with_rope] == [band.name for band in without]
    assert [band.coordinates for band in with_rope] == [(0, 2), (1, 3), (4,)]
    assert [band.coordinates for band in without] == [(), (), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("frequencies", "choice", "message"),
    [((), 2, "no layer has RoPE"), ((1.0, 0.1), 3, "expected from 1 to 2 bands")],
)
def test_bands_of_no_rope_or_of_too_few_pairs_are_refused(frequencies, choice, message):
    with pytest.raises(ValueError, match=message):
        make_bands([turning(*frequencies)] * 2, 6, choice)


def test_the_amplitude_of_a_band_is_its_share_of_an_undivided_pattern():
    near = torch.arange(7.0).double().expand(5, 7, 7)
    maps = torch.stack([0.75 * near, 0.25 * near], 1)
    [bands] = make_bands([turning(1.0, 0.1)], 4, 2)
    patterns = split_bands(LayerMaps.of(near).pattern, maps, bands)
    assert [pattern.share.value for pattern in patterns] == pytest.approx([0.75, 0.25])
    rows = [near[0, i, :i] - near[0, i, :i].mean() for i in range(1, 7)]
    whole = float(torch.cat(rows).square().mean().sqrt())
    amplitudes = [pattern.amplitude.value for pattern in patterns]
    assert amplitudes == pytest.approx([0.75 * whole, 0.25 * whole])


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
    for layer in range(LAYERS):
        pattern = LayerMaps.of(maps[:, layer].sum(1), skip_keys=skip).pattern
        patterns = split_bands(pattern, maps[:, layer], bands[layer])
        shares = [pattern.share.value for pattern in patterns]
        assert len(shares) == n_bands
        assert sum(shares) == pytest.approx(1)
