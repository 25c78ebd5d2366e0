"""Offset profiles against means of diagonals."""

import numpy as np
import pytest
import torch

from nope_probe.analyses.jackknife import jackknife
from nope_probe.analyses.pattern_rows import offset_means, offset_profile


def test_a_profile_is_the_mean_of_each_diagonal():
    maps = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0)).double()
    found = offset_means(maps)
    for index in range(3):
        true = [np.diagonal(maps[index].numpy(), -tau).mean() for tau in range(1, 7)]
        np.testing.assert_allclose(found[index].numpy(), true)


def test_skipped_keys_are_left_out_of_every_diagonal():
    maps = torch.randn(7, 7, generator=torch.Generator().manual_seed(0)).double()
    true = [np.diagonal(maps[:, 2:][2:].numpy(), -tau).mean() for tau in range(1, 5)]
    np.testing.assert_allclose(offset_means(maps, skip_keys=2).numpy(), true)


def test_alibi_has_a_straight_profile():
    position = torch.arange(11.0)
    profile = offset_means(-0.5 * (position[:, None] - position[None, :]))
    torch.testing.assert_close(profile, -0.5 * torch.arange(1.0, 11.0))


def test_bounds_are_those_of_the_jackknife_at_each_offset():
    folds = torch.randn(5, 2, 7, 7, generator=torch.Generator().manual_seed(1)).double()
    found = offset_profile(folds)
    values = folds[:, 1].diagonal(-3, -2, -1).mean(-1)
    deleted = torch.stack([values[torch.arange(5) != f].mean() for f in range(5)])
    half = 2.7764451 * (4 / 5 * (deleted - deleted.mean()).square().sum()).sqrt()
    assert found.value[1, 2] == pytest.approx(float(values.mean()))
    assert found.high[1, 2] - found.value[1, 2] == pytest.approx(float(half))
    assert found.value[1, 2] - found.low[1, 2] == pytest.approx(float(half))


def test_bounds_of_unequal_folds_are_those_of_the_jackknife_over_all_sequences():
    sizes = [2, 3, 5, 7]
    sequences = torch.randn(17, 7, 7, generator=torch.Generator().manual_seed(2)).double()
    parts = sequences.split(sizes)
    found = offset_profile(
        torch.stack([part.mean(0) for part in parts]), counts=torch.tensor(sizes)
    )
    values = [part.diagonal(-3, -2, -1).mean(-1) for part in parts]
    estimates = [torch.cat(values).mean()]
    estimates += [torch.cat(values[:fold] + values[fold + 1 :]).mean() for fold in range(4)]
    expected = jackknife(torch.stack(estimates), torch.tensor(sizes))
    assert found.value[2] == pytest.approx(expected.value)
    assert (found.low[2], found.high[2]) == pytest.approx((expected.low, expected.high))
