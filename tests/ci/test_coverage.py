"""Intervals and tests hold as often as they say, over hundreds of simulated studies.

Where nothing knows of position, nothing is found more often than intervals allow: a bidirectional
transformer without position encoding on i.i.d. vectors treats all positions alike. One capture
holds many independent studies: each is the folds of its own sequences.
"""

from collections import Counter
from math import isnan

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom
from support.dense_patterns import estimates as estimates_of
from support.dense_patterns import fold_products
from support.manifests import manifest_of
from torch import Tensor

from nope_probe import (
    Run,
    attribute,
    build,
    capture_scores,
    difference,
    gaussian,
    measure,
    parameter_free,
    run_behaviour,
)
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


def half(seed: int, data: str, shift: float = 0.0) -> Run:
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
    settings = {"folds": 16}
    manifest = manifest_of(kind="attention", data={"sha256": data}, settings=settings)
    return Run(manifest=manifest, tables={"attention": pd.DataFrame(rows)})


@pytest.mark.parametrize(("method", "data"), [("paired", "aa"), ("unpaired", "ab")])
def test_two_halves_of_a_corpus_name_a_head_in_at_most_one_table_of_twenty(
    method: str, data: str
) -> None:
    named = 0
    for seed in range(0, 80, 2):
        table = difference(half(seed, data[0]), half(seed + 1, data[1]))
        assert {*table["method"]} == {method}
        named += table["differs"].any()
    # 2 of 40 expected at most; 7 or more have a probability below 0.005.
    assert named < 7
    moved = difference(half(0, data[0]), half(1, data[1], shift=2.5))
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


STUDIES, FOLDS, SEQUENCES = 120, 8, 2  # sequences per fold
CHANCE = 0.999  # that a share of studies lies within its bounds


@pytest.fixture(scope="module")
def studies() -> Tensor:
    """Fold maps of the second block's scores, [study, fold, layer, query, key]."""
    model = build(parameter_free(n_layers=2, d_model=8, causal=False))
    n_folds = STUDIES * FOLDS
    inputs = gaussian(n_seqs=n_folds * SEQUENCES, seq_len=13, d_model=8, alpha=0.3, seed=1).inputs
    maps = capture_scores(model, inputs, layers=[1], n_folds=n_folds, batch_size=n_folds)
    return maps.folds.unflatten(0, (STUDIES, FOLDS))


def bounds(rate: float) -> tuple[float, float]:
    """Return between how many of the studies have what each has at a rate."""
    low, high = binom.interval(CHANCE, STUDIES, rate)
    return float(low), float(high)


def test_five_percent_of_intervals_exclude_what_is_true(studies: Tensor):
    excluding = Counter[str]()
    for folds in studies:
        measures = measure(folds)[0]
        for name in ("locality", "amplitude"):
            interval = getattr(measures, name)
            excluding[name] += not interval.low <= 0 <= interval.high
        excluding["monotonicity"] += (
            not measures.monotonicity.low <= 0.5 <= measures.monotonicity.high
        )
    low, high = bounds(0.05)
    assert low <= excluding["locality"] <= high, excluding
    # Shares of ten pairs and squares are skewed: their intervals exclude the truth less often.
    assert excluding["monotonicity"] <= high
    assert excluding["amplitude"] <= high


def test_nothing_is_claimed_to_be_kept(studies: Tensor):
    claimed = Counter[str]()
    others = studies.roll(1, 0)  # the same model without its mask, which it has none of
    for intact, without in zip(studies, others, strict=True):
        layer = attribute({(): intact, "mask": without})[0]
        claimed["size"] += layer.terms["pattern"]["mask"].low > 0
        claimed["order"] += not isnan(layer.conditions["mask"].order.value)
    _, high = bounds(0.025)  # one side of a 95% interval
    for name in ("size", "order"):
        assert claimed[name] <= high, claimed


def test_without_written_position_no_layer_of_a_nope_model_knows_where_a_token_stands():
    run = run_behaviour(
        "nope-tiny", measures=("position",), remove=("written",), n_seqs=96, seq_len=41
    )
    layers = run.tables["decodability"].set_index(["removed", "layer"])
    # A guess that depends on nothing is as far from the truth as chance at best.
    assert (layers.loc["written", "distance_high"] >= layers.loc["written", "chance"]).all()
    for knowing in ("intact", "written_null"):
        assert (layers.loc[knowing, "distance_high"] < layers.loc[knowing, "chance"]).all()
