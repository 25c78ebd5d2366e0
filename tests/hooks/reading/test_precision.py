"""Maps in float32 and bfloat16 against the same model in float64, with the error told."""

import pytest
import torch
from support.tiny_models import ByName
from torch import Tensor

from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.maps.centred import kept_cells, row_centred
from nope_probe.models.load import load

N_POS = 13
# The largest error of a pattern's cell, relative to the RMS of the scores. Roundings (2^-24 of a
# value in float32, 2^-8 in bfloat16) add up over the blocks before, and grow where vectors cancel.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@pytest.fixture(scope="module")
def maps(tiny: ByName) -> dict[torch.dtype, Tensor]:
    """Fold maps of a model's scores by precision."""
    tokens = torch.randint(1, 263, (24, N_POS), generator=torch.Generator().manual_seed(5))
    folder = str(tiny("smollm3").folder)
    return {
        dtype: capture_scores(load(folder, dtype=dtype).model, tokens, n_folds=4).folds.double()
        for dtype in (torch.float64, *BOUNDS)
    }


def error(found: Tensor, truth: Tensor) -> float:
    """Return the largest error of a pattern relative to the RMS of the scores it is of."""
    cells = kept_cells(N_POS)
    difference = (row_centred(found) - row_centred(truth))[..., cells]
    return float(difference.abs().max() / truth[..., cells].square().mean().sqrt())


@pytest.mark.parametrize("dtype", BOUNDS)
def test_maps_are_those_of_float64_up_to_rounding(
    dtype: torch.dtype, maps: dict[torch.dtype, Tensor]
):
    found = error(maps[dtype], maps[torch.float64])
    assert torch.finfo(dtype).eps / 100 < found < BOUNDS[dtype]


def test_a_mean_over_sequences_is_summed_beyond_the_models_precision(
    maps: dict[torch.dtype, Tensor],
):
    """Roundings of different sequences average out; a bfloat16 sum would add its own, 2^-8."""
    folds = maps[torch.bfloat16]
    whole = error(folds.mean(0), maps[torch.float64].mean(0))
    assert whole < error(folds, maps[torch.float64])
    assert not torch.equal(folds, folds.bfloat16().double())
