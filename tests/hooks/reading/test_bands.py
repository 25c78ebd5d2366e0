"""Maps of RoPE bands add up to the score map, and each is the sum over its own coordinates."""

from typing import Any

import pytest
import torch
from support.plain_states import plain_states
from support.rounding import NETWORK, assert_same
from support.tiny_models import ByName, tokens

from nope_probe.analyses.splits import make_bands
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands, capture_scores

N_SEQS, N_POS, N_FOLDS = 23, 13, 5


def bands_of(model: Any, choice: Any) -> list[list[Any]]:
    inputs = tokens(1, N_POS)
    rotations = read_rotations(model, inputs, len(layers_of(model)))
    return make_bands(rotations, layers_of(model)[0].d_head, choice)


def groups_of(bands: list[list[Any]]) -> list[list[tuple[int, ...]]]:
    return [[band.coordinates for band in of_layer] for of_layer in bands]


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:phi3", "bridge:smollm3", "hooked:llama"])
@pytest.mark.parametrize(("batch_size", "query_rows"), [(7, 5), (11, None)])
def test_bands_add_up_to_the_map(
    spec: str, batch_size: int, query_rows: int | None, model_of: ByName
):
    model, _ = model_of(spec)
    inputs = tokens(N_SEQS, N_POS, seed=3)
    settings = {"batch_size": batch_size, "n_folds": N_FOLDS, "query_rows": query_rows}
    maps = capture_bands(model, inputs, groups_of(bands_of(model, 3)), **settings)
    whole = capture_scores(model, inputs, **settings).folds
    added = maps.sum(2)
    assert torch.equal(added.isnan(), whole.isnan())
    assert (added - whole).nan_to_num().abs().max() <= NETWORK * whole.nan_to_num().abs().max()


def test_by_default_the_folds_are_those_of_captured_scores(bridge: ByName):
    inputs = tokens(N_SEQS, N_POS, seed=3)
    whole = capture_scores(bridge("llama"), inputs).folds[:, :1]
    maps = capture_bands(bridge("llama"), inputs, [[tuple(range(10))]])
    assert_same(maps[:, :, 0], whole)


def test_bands_add_up_to_the_map_to_1e_9_in_float64(tiny: ByName):
    from nope_probe.models.load import load

    model = load(str(tiny("phi3").folder), dtype=torch.float64).model
    inputs = tokens(N_SEQS, N_POS, seed=3)
    maps = capture_bands(model, inputs, groups_of(bands_of(model, 3)), n_folds=N_FOLDS)
    whole = capture_scores(model, inputs, n_folds=N_FOLDS).folds
    error = (maps.sum(2) - whole).nan_to_num().abs().max()
    assert error <= 1e-9 * whole.nan_to_num().abs().max()


def test_each_band_is_the_sum_over_its_coordinates_in_plain_transformers(
    tiny: ByName, bridge: ByName
):
    inputs = tokens(N_SEQS, N_POS, seed=3)
    bands = bands_of(bridge("llama"), 2)
    maps = capture_bands(bridge("llama"), inputs, groups_of(bands), n_folds=1)[0]
    states = plain_states(tiny("llama").hf, inputs)
    for layer, state in enumerate(states):
        for index, band in enumerate(bands[layer]):
            some = list(band.coordinates)
            q, k = state.q[..., some].double(), state.k[..., some].double()
            k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
            true = torch.einsum("bqhd,bkhd->bhqk", q, k).mean((0, 1)) / 10**0.5
            error = (maps[layer, index] - true).nan_to_num().abs().max()
            assert error <= NETWORK * true.abs().max()


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:phi3", "hooked:llama"])
def test_a_band_of_captured_scores_is_that_band_and_the_two_halves_of_each_head_add_up(
    spec: str, model_of: ByName
):
    model, _ = model_of(spec)
    inputs, options = tokens(N_SEQS, N_POS, seed=3), {"n_folds": N_FOLDS, "per_head": True}
    n_pairs = len(read_rotations(model, inputs, 1)[0].frequencies)
    names = (f"rope[0:{n_pairs // 2}]", f"rope[{n_pairs // 2}:{n_pairs}]")
    fast, slow = (capture_scores(model, inputs, band=name, **options) for name in names)
    groups = [of_layer[:1] for of_layer in groups_of(bands_of(model, 2))]
    if n_pairs % 2 == 0:
        assert_same(fast.folds, capture_bands(model, inputs, groups, n_folds=N_FOLDS)[:, :, 0])
    whole = capture_scores(model, inputs, band="rope", **options).per_head
    added = fast.per_head + slow.per_head
    assert (added - whole).nan_to_num().abs().max() <= NETWORK * whole.nan_to_num().abs().max()
    assert torch.allclose(fast.per_head.mean(2).double(), fast.folds, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("spec", "band", "error", "message"),
    [
        ("bridge:llama", "mask", ValueError, "expected pairs of RoPE"),
        ("bridge:llama", "rope[0:99]", ValueError, r"no band rope\[0:99\]"),
        ("bridge:gemma2", "rope", NotImplementedError, "soft-capped"),
        ("bridge:smollm3", "rope", ValueError, "has no RoPE"),
    ],
)
def test_a_band_that_scores_do_not_have_is_refused(
    spec: str, band: str, error: type[Exception], message: str, model_of: ByName
):
    with pytest.raises(error, match=message):
        capture_scores(model_of(spec)[0], tokens(5, 5), band=band, n_folds=5)
