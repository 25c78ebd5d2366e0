"""What is captured, of an ablated model too, is what plain models have, whatever the batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ablations import ablations, calibration_of, edited_as
from support.hooked_runs import hooks_left, out_of_memory_above
from support.plain_attention import assert_attention, close, per_fold, plain_attention
from support.plain_states import BlockStates, block_outputs, plain_losses, plain_states
from support.rounding import NETWORK, assert_same, rounding
from support.tiny_models import N_POS, ByName, ModelOf, tokens
from torch import Tensor
from torch.nn.functional import cross_entropy

from nope_probe import (
    Ablation,
    UserError,
    ablated,
    capture_attention,
    capture_losses,
    capture_scores,
    capture_stages,
)
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import traits_of
from nope_probe.hooks.reading.capture import (
    LossAccumulator,
    capture_distances,
    capture_moments,
)
from nope_probe.maps.rows import choose_rows

N_SEQS, N_FOLDS = 37, 5
CAUSAL = torch.ones(N_POS, N_POS).tril().bool()
TEXT = tokens(N_SEQS, seed=7)


def cached_scores(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return all scores of a model: [layer, batch, head, query_pos, key_pos]."""
    _, cache = model.run_with_cache(inputs, names_filter=lambda name: name.endswith("attn_scores"))
    return torch.stack([*cache.values()])


def fold_means(scores: torch.Tensor) -> torch.Tensor:
    means = torch.stack([per_fold(layer.double().mean(1), N_FOLDS) for layer in scores], 1)
    return means.masked_fill(~CAUSAL, torch.nan)


READ = ("attn.hook_attn_scores", "attn.hook_q", "attn.hook_k", "attn.hook_rot_q")
REWRITTEN = [("hooked:smollm3-nope", READ[0]), *[("bridge:llama", point) for point in READ]]


@pytest.mark.parametrize(("spec", "point"), REWRITTEN)
def test_scores_queries_and_keys_that_a_user_rewrites_are_read_as_rewritten(
    spec: str, point: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)

    def shift_later_sequences(tensor: torch.Tensor, hook: object) -> torch.Tensor:
        # Not the first sequence, which the capture inspects.
        return tensor + 3.0 * (torch.arange(len(tensor)) > 0)[:, None, None, None]

    for layer in layers_of(model):
        with hooks_attached([(layer.point(point), shift_later_sequences)]):
            maps = capture_scores(model, TEXT, n_folds=N_FOLDS, batch_size=N_SEQS)
            scores = cached_scores(model, TEXT)
        assert_same(maps.folds, fold_means(scores))


def test_some_layers_are_the_same_rows_in_the_order_asked_and_unknown_ones_an_error(
    bridge: ByName,
) -> None:
    model = bridge("smollm3")
    every, some = (capture_scores(model, TEXT, layers=layers).folds for layers in (None, [2, 0]))
    assert torch.equal(some.nan_to_num(), every[:, [2, 0]].nan_to_num())
    for unknown in ([], [3], [-1]):
        with pytest.raises(UserError, match="from 0 to 2"):
            capture_scores(model, TEXT, layers=unknown)


def test_no_block_after_the_last_one_asked_for_is_run(bridge: ByName) -> None:
    model, ran = bridge("smollm3"), []
    points = [layer.point("attn.hook_in") for layer in layers_of(model)]
    with hooks_attached((point, lambda _, hook: ran.append(hook.name)) for point in points):
        capture_scores(model, TEXT, layers=[0])
    assert {*ran} == {"blocks.0.attn.hook_in"}


def test_a_capture_leaves_the_model_as_it_was_also_when_it_fails(bridge: ByName) -> None:
    model = bridge("llama")
    before = cached_scores(model, TEXT)
    with out_of_memory_above(0, model, 0), pytest.raises(torch.OutOfMemoryError):
        capture_scores(model, TEXT, batch_size=7)
    assert not hooks_left(model)
    assert torch.equal(cached_scores(model, TEXT), before)


def test_losses_of_bfloat16_logits_are_float32() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, sums = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]]), LossAccumulator(2)
    sums.start_batch(torch.arange(2), 2)
    sums.read_logits(logits, ids)
    expected = cross_entropy(logits.double()[:, :-1].mT, ids[:, 1:], reduction="none")
    assert_same(sums.totals["losses"], expected, rounding(logits.shape[-1]))


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-nope"])
def test_moments_are_products_of_plain_residuals(spec: str, model_of: ModelOf) -> None:
    model, tiny = model_of(spec)
    ids = tiny.tokens
    y = torch.randn(*ids.shape, 2, generator=torch.Generator().manual_seed(0))
    xx, xy = capture_moments(model, ids, y, skip=2, batch_size=2)
    x = block_outputs(tiny.hf, input_ids=ids).double()[:, :, 2:].flatten(1, 2)
    x = torch.cat([x, torch.ones(*x.shape[:2], 1)], -1)
    assert_same(xx, x.mT @ x)
    assert_same(xy, x.mT @ y[:, 2:].flatten(0, 1).double())
    assert xx.dtype == torch.float64


def test_distances_are_between_predictions_and_the_index(bridge: ByName, tiny: ByName) -> None:
    ids = tiny("llama").tokens
    x = block_outputs(tiny("llama").hf, input_ids=ids).double()[:1, :, 3:]
    weights = torch.randn(1, x.shape[-1] + 1, 2, generator=torch.Generator().manual_seed(1))
    seen = capture_distances(bridge("llama"), ids, weights, skip=3, batch_size=2)
    predicted = x[0] @ weights[0, :-1].double() + weights[0, -1]
    index = torch.arange(3, ids.shape[1])[None, :, None]
    expected = (predicted - index).abs().mean(1)
    assert seen.shape == (len(ids), 1, 2)
    assert_same(seen[:, 0], expected)


FAST, SLOW = "rope[0:2]", "rope[2:5]"  # of the five pairs of a head of ten coordinates


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
@pytest.mark.parametrize("query_rows", [5, None])
@pytest.mark.parametrize(("band", "pairs"), [(FAST, [0, 1]), (SLOW, [2, 3, 4])])
def test_a_band_is_the_sum_over_its_coordinates_in_plain_transformers(
    spec: str, band: str, pairs: list[int], query_rows: int | None, model_of: ByName
):
    inputs, some = tokens(23, 13, seed=3), [*pairs, *(pair + 5 for pair in pairs)]
    options = {"band": band, "n_folds": 1, "batch_size": 7, "query_rows": query_rows}
    model, tiny = model_of(spec)
    maps = capture_scores(model, inputs, **options)
    for layer, state in enumerate(plain_states(tiny.hf, inputs)):
        q, k = state.q[..., some].double(), state.k[..., some].double()
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        true = torch.einsum("bqhd,bkhd->bhqk", q, k).mean((0, 1)) / 10**0.5
        error = (maps.folds[0, layer] - true[maps.query_positions]).nan_to_num().abs().max()
        assert error <= NETWORK * true.abs().max()


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:phi3", "hooked:llama"])
def test_the_two_halves_of_each_heads_pairs_add_up_to_what_rope_turns(spec: str, model_of: ByName):
    model, _ = model_of(spec)
    inputs, options = tokens(23, 13, seed=3), {"n_folds": N_FOLDS, "per_head": True}
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


INPUTS = tokens(13, seed=7)
SPECS = ("bridge:llama", "bridge:smollm3", "bridge:mistral", "bridge:gemma2", "hooked:smollm3-nope")


def grams(states: list[BlockStates], layer: int, n_folds: int) -> dict[str, Tensor]:
    """Return the Gram maps of the paper's Figure 3 from plain states."""
    this, after = states[layer], states[layer + 1 : layer + 2]
    vectors = {"a": this.y, "c": this.z, "d": this.written, "e": this.middle}
    vectors |= {"f": this.normed_middle, "g": this.output}
    vectors |= dict(zip("h", (states.y for states in after), strict=False))
    flat = {letter: x.flatten(2).double() for letter, x in vectors.items()}
    return {letter: per_fold(x @ x.mT, n_folds) for letter, x in flat.items()}


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_captures_of_an_ablated_model_are_those_of_plain_transformers_edited(
    spec: str, model_of: ModelOf, data: st.DataObject
) -> None:
    """Fused or by hooked scores, of all rows or some, of each head and of their mean."""
    model, tiny = model_of(spec)
    intact = st.just(Ablation())
    ablation = data.draw(st.one_of(intact, ablations(model, tiny)))
    n_rows = data.draw(st.none() | st.integers(1, N_POS))
    layer, n_folds = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 5))
    leave = hooks_attached(
        (layer.point("attn.hook_attn_scores"), lambda scores, hook: None)
        for layer in layers_of(model)[data.draw(st.sampled_from((0, 99))) :]
    )
    rows, is_product = choose_rows(N_POS, n_rows), tiny.name != "gemma2"
    options: dict[str, Any] = {"n_folds": n_folds, "query_rows": n_rows}
    hf = edited_as(ablation, model, tiny)
    plain = [*plain_attention(hf, INPUTS).values()]
    calibration = calibration_of(model, tiny, ablation.seed)
    with ablated(model, ablation, calibration), leave:
        maps = capture_scores(model, INPUTS, **options, batch_size=4, per_head=True)
        attention = capture_attention(model, INPUTS, **options, batch_size=5)
        stages = capture_stages(model, INPUTS, layer=layer, **options, batch_size=7)
        losses = capture_losses(model, INPUTS, batch_size=6)
    # Chosen rows have no later keys, also where these are seen.
    later = (torch.arange(N_POS) > rows[:, None]) & (len(rows) < N_POS)
    for place, of_layer in enumerate(plain):
        per_head = per_fold(of_layer.scores[:, :, rows], n_folds)
        hidden = per_head.isnan().any(1) | later
        close(maps.per_head[:, place], per_head.masked_fill(hidden[:, None], torch.nan))
        close(maps.folds[:, place], per_head.mean(1).masked_fill(later, torch.nan))
    if not (ablation.heads and {"mask", "window"} & {*ablation.remove}):  # heads see alike
        assert_attention(attention, plain, n_folds, rows)
    scores = {"b": layer, "i": layer + 1}
    if is_product:  # blocks of a Llama
        for letter, gram in grams(plain_states(hf, INPUTS), layer, n_folds).items():
            close(stages.folds[letter], gram[:, rows].masked_fill(later, torch.nan))
    for letter in {"b", "i"} & {*stages.folds}:
        close(stages.folds[letter], maps.folds[:, scores[letter]])
    close(losses, plain_losses(hf, INPUTS))
