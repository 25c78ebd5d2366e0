"""The part of the scores that a band of RoPE's pairs makes, against plain transformers."""

import pytest
import torch
from support.plain_states import plain_states
from support.rounding import NETWORK
from support.tiny_models import ByName, tokens

from nope_probe import capture_scores
from nope_probe.hooks.layers.passes import traits_of

N_SEQS, N_POS, N_FOLDS = 23, 13, 5
FAST, SLOW = "rope[0:2]", "rope[2:5]"  # of the five pairs of a head of ten coordinates


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
@pytest.mark.parametrize("query_rows", [5, None])
@pytest.mark.parametrize(("band", "pairs"), [(FAST, [0, 1]), (SLOW, [2, 3, 4])])
def test_a_band_is_the_sum_over_its_coordinates_in_plain_transformers(
    spec: str, band: str, pairs: list[int], query_rows: int | None, model_of: ByName, tiny: ByName
):
    inputs, some = tokens(N_SEQS, N_POS, seed=3), [*pairs, *(pair + 5 for pair in pairs)]
    options = {"band": band, "n_folds": 1, "batch_size": 7, "query_rows": query_rows}
    model, name = model_of(spec)
    maps = capture_scores(model, inputs, **options)
    for layer, state in enumerate(plain_states(tiny(name).hf, inputs)):
        q, k = state.q[..., some].double(), state.k[..., some].double()
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        true = torch.einsum("bqhd,bkhd->bhqk", q, k).mean((0, 1)) / 10**0.5
        error = (maps.folds[0, layer] - true[maps.query_positions]).nan_to_num().abs().max()
        assert error <= NETWORK * true.abs().max()


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:phi3", "hooked:llama"])
def test_the_two_halves_of_each_heads_pairs_add_up_to_what_rope_turns(spec: str, model_of: ByName):
    model, _ = model_of(spec)
    inputs, options = tokens(N_SEQS, N_POS, seed=3), {"n_folds": N_FOLDS, "per_head": True}
    rotary = traits_of(model)[0].rotary
    n_pairs = rotary.cos.shape[-1]
    names = (f"rope[0:{n_pairs // 2}]", f"rope[{n_pairs // 2}:{n_pairs}]")
    fast, slow = (capture_scores(model, inputs, band=name, **options) for name in names)
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
