"""What an ablation leaves of the intact pattern, against plain arithmetic."""

import numpy as np
import pytest
import torch

from nope_probe.analyses.kept_pattern import kept_patterns
from nope_probe.analyses.pattern import measure, row_centred

N, FOLDS = 13, 5


def folds(seed: int, slope: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = 0.3 * torch.randn(FOLDS, 2, N, N, generator=generator, dtype=torch.float64)
    return noise + slope * torch.arange(N)


def test_a_share_is_the_cross_fold_product_with_the_intact_pattern() -> None:
    one, intact = folds(0, 0.2), folds(1, 0.7)
    for layer, kept in enumerate(kept_patterns(one, intact, skip_keys=2)):
        v, u = (row_centred(each[:, layer], 2).nan_to_num().numpy() for each in (one, intact))
        pairs = [(a, b) for a in range(FOLDS) for b in range(FOLDS) if a != b]
        whole = sum((u[a] * u[b]).sum() for a, b in pairs)
        assert kept.share.value == pytest.approx(sum((v[a] * u[b]).sum() for a, b in pairs) / whole)
        assert kept.share.low < kept.share.value < kept.share.high


def test_amplitude_and_locality_are_those_of_measure() -> None:
    one = folds(0, 0.2)
    for kept, measures in zip(kept_patterns(one, folds(1, 0.7), 1), measure(one, 1), strict=True):
        for name in ("amplitude", "locality"):
            ours, theirs = getattr(kept, name), getattr(measures, name)
            assert ours.value == pytest.approx(theirs.value, rel=1e-12)
            assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_of_long_sequences_it_orders_the_queries_that_measure_orders() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 521  # of which every third query is ordered
    one = torch.randn(4, 1, n, n, generator=generator, dtype=torch.float64)
    one += torch.arange(n) / 100 * (torch.arange(n) % 3 - 1)[:, None]  # falls, is flat, rises
    [kept], [measures] = kept_patterns(one, one, 1), measure(one, 1)
    assert kept.locality.value < -0.5
    assert kept.locality.value == pytest.approx(measures.locality.value, rel=1e-12)
    assert kept.locality.high == pytest.approx(measures.locality.high, rel=1e-9)


def test_of_noise_there_is_no_share() -> None:
    assert all(np.isnan(kept.share.value) for kept in kept_patterns(folds(0, 0.5), folds(1, 0.0)))


def test_a_map_that_hides_keys_before_the_query_has_no_measures() -> None:
    window = folds(0, 0.2)
    window[:, 1, 9, 2] = torch.nan
    first, second = kept_patterns(window, folds(1, 0.7))
    assert first.amplitude.value > 0
    assert np.isnan([second.amplitude.value, second.locality.value, second.share.value]).all()
