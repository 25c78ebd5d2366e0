"""Intervals and tests hold as often as they say, over hundreds of simulated studies."""

import numpy as np
import pandas as pd
import pytest
import torch
from support.compared_numbers import compare
from support.dense_patterns import estimates as estimates_of
from support.dense_patterns import fold_products
from support.manifests import manifest_of
from torch import Tensor

from nope_probe import Run, difference
from nope_probe.analyses.differences import LEVEL, holm
from nope_probe.analyses.jackknife import jackknife, rms, share
from nope_probe.analyses.reader import Reader
from nope_probe.analyses.verdicts import strongest_row
from nope_probe.maps.estimates import Estimates, fold_weights
from nope_probe.maps.positions import ReaderSums
from nope_probe.studies.compare import PARTS
from nope_probe.studies.tables import interval_columns

N_FOLDS, N_POS, D_HEAD = 7, 13, 6
CAUSAL = torch.ones(N_POS, N_POS).tril().bool()
EQUAL = torch.full((N_FOLDS,), 5)


@pytest.mark.parametrize("counts", [[1] * 8, [9, 3, 3, 3, 3, 2, 2, 1]], ids=["even", "uneven"])
def test_the_interval_of_an_amplitude_covers_the_truth_19_times_of_20(counts: list[int]):
    torch.manual_seed(9)
    signal, n, covered = torch.sin(torch.arange(61)).double(), 400, 0
    square, estimates = float(signal.square().mean()), []
    sizes = torch.tensor(counts)
    noise = sizes.double().rsqrt()[:, None]
    for _ in range(n):
        folds = signal + noise * torch.randn(8, 61).double()
        products = fold_products(folds[None], folds[None], fold_weights(8, sizes))[:, 0, 0]
        interval = rms(estimates_of(products, sizes))
        covered += interval.low <= square**0.5 <= interval.high
        estimates.append(float(products[0]))
    assert 0.91 <= covered / n <= 0.985
    error = torch.tensor(estimates).std() / n**0.5
    assert abs(sum(estimates) / n - square) < 4 * error, "noise does not count as pattern"


def test_intervals_cover_the_truth_in_95_of_100_studies_and_noise_writes_nothing() -> None:
    """The truth: keys that carry a clock; a second writer brings nothing but noise."""
    clock_vectors = torch.zeros(1, N_POS, 1, D_HEAD, dtype=torch.float64)
    clock_vectors[..., 0] = torch.linspace(-1, 1, N_POS, dtype=torch.float64)[None, :, None]
    generator = torch.Generator().manual_seed(17)
    n_studies, covered, null_covered = 300, 0, 0
    for _ in range(n_studies):
        noise = torch.randn(4, N_FOLDS, N_POS, 1, D_HEAD, generator=generator, dtype=torch.float64)
        q = 0.2 * noise[0]
        q[..., 0] += 2
        keys = {"L0H0": clock_vectors + 0.2 * noise[1], "MLP0": 0.2 * noise[2]}
        k = sum(keys.values())
        scores = torch.einsum("fihd,fjhd->fij", q, k) * 0.5
        cells = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
        sums = ReaderSums(
            q=q,
            k=k,
            queries={"embed": q},
            keys=keys,
            scores=(scores + 0.2 * cells).masked_fill(~CAUSAL, torch.nan),
            scale=0.5,
        )
        reader = Reader(sums=sums, counts=EQUAL)
        readings = reader.readings("key")
        for writer, truth in (("L0H0", 1.0), ("MLP0", 0.0)):
            ratio = share(reader.written_products(readings, keys[writer]), reader.square)
            inside = ratio.low <= truth <= ratio.high
            covered += inside * (writer == "L0H0")
            null_covered += inside * (writer == "MLP0")
    assert 0.92 <= covered / n_studies <= 0.98
    assert 0.92 <= null_covered / n_studies <= 0.98


def noise(seed: int) -> Tensor:
    return torch.randn(17, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("paired", [True, False])
def test_without_a_difference_a_number_is_named_in_at_most_one_family_of_twenty(
    paired: bool,
) -> None:
    named = 0
    for family in range(100):
        seeds = range(1000 * family, 1000 * family + 70, 2)
        means = [[jackknife(Estimates.of_means(noise(n))) for n in (at, at + 1)] for at in seeds]
        p = [compare(*pair, paired=paired).p for pair in means]
        named += holm(pd.Series(p)).min() <= LEVEL
    # 5 of 100 expected at most; 12 or more have a probability below 0.005.
    assert named < 12


def half(seed: int, shift: float = 0.0) -> Run:
    """Return a run of `attention` on one half of a corpus: 24 heads whose numbers are means."""
    draws = np.random.default_rng(seed).normal(size=(24, len(PARTS), 16))
    draws[5, 3] += shift
    rows = [
        {"layer": 0, "head": head}
        | interval_columns(
            **{part: jackknife(Estimates.of_means(torch.from_numpy(x))) for part, x in numbers}
        )
        for head, of_head in enumerate(draws)
        for numbers in [zip(PARTS, of_head, strict=True)]
    ]
    data = {"sha256": str(seed)}
    manifest = manifest_of(kind="attention", data=data, settings={"folds": 16})
    return Run(manifest=manifest, tables={"attention": pd.DataFrame(rows)})


def test_two_halves_of_a_corpus_name_a_head_in_at_most_one_table_of_twenty() -> None:
    named = 0
    for seed in range(0, 80, 2):
        table = difference(half(seed), half(seed + 1))
        assert {*table["method"]} == {"unpaired"}
        named += table["differs"].any()
    # 2 of 40 expected at most; 7 or more have a probability below 0.005.
    assert named < 7
    moved = difference(half(0), half(1, shift=2.5))
    found = moved[moved["differs"]]
    assert found[["head", "number"]].to_numpy().tolist() == [[5, PARTS[3]]]


def noise_layers(n_runs: int, n_layers: int) -> list[pd.DataFrame]:
    """Amplitudes of layers of pure noise, from 8 folds of 23 cells."""
    generator = torch.Generator().manual_seed(3)
    runs = []
    for _ in range(n_runs):
        folds = torch.randn(n_layers, 8, 23, generator=generator, dtype=torch.float64)
        found = [rms(estimates_of(fold_products(of[None], of[None])[:, 0, 0])) for of in folds]
        numbers = [(one.value, one.low, one.high) for one in found]
        columns = ["amplitude", "amplitude_low", "amplitude_high"]
        runs.append(pd.DataFrame(numbers, columns=columns).assign(layer=range(n_layers)))
    return runs


def test_of_24_layers_of_noise_none_is_called_strongest_though_single_bounds_exceed_zero() -> None:
    runs = noise_layers(60, 24)
    assert sum((run["amplitude_low"] > 0).any() for run in runs) >= 3
    assert not any(strongest_row(run) is not None for run in runs)
    strong = runs[0].copy()
    strong.loc[17, ["amplitude", "amplitude_low", "amplitude_high"]] = 2.6, 2.4, 2.8
    best = strongest_row(strong)
    assert best is not None
    assert best["layer"] == 17
