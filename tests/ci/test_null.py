"""Where nothing knows of position, nothing is found more often than intervals allow.

A bidirectional transformer without position encoding on i.i.d. vectors treats all positions alike.
One capture holds many independent studies: each is the folds of its own sequences.
"""

from collections import Counter
from math import isnan

import pytest
from scipy.stats import binom
from torch import Tensor

from nope_probe import (
    attribute,
    build,
    capture_scores,
    gaussian,
    measure,
    parameter_free,
    run_behaviour,
)

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
