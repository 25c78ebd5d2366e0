"""An ablation among hooks of the user, and one that cannot be, which is an error."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.ablations import identities
from support.edited_model import SEVEN, edited, output_sizes, plain_run
from support.hooked_runs import GREEDY, by_whole_passes, hooked_run, hooks_left, largest_error
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf, distance, tokens

from nope_probe import Ablation, UserError, ablated, calibrate
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of, position_point
from nope_probe.hooks.removing.components import components


def test_an_empty_ablation_changes_no_bit(bridge: ByName, tiny: ByName) -> None:
    model, tokens = bridge("llama"), tiny("llama").tokens
    intact = hooked_run(model, tokens).logits
    for spec in (Ablation(), replace(identities(*SEVEN), layers=())):
        with ablated(model, spec):
            assert torch.equal(hooked_run(model, tokens).logits, intact)


def test_a_users_hook_on_learned_positions_counts_before_their_mean(
    bridge: ByName, tiny: ByName
) -> None:
    model, inputs = bridge("gpt2"), tiny("gpt2").tokens
    square, outputs = (position_point(model), lambda tensor, hook: tensor.square()), []
    for outside in (True, False):
        contexts = [hooks_attached([square]), ablated(model, "pos_embed")]
        outer, inner = contexts if outside else reversed(contexts)
        with torch.no_grad(), outer, inner:
            outputs.append(model(inputs).clone())
    with ablated(model, "pos_embed"):
        assert not torch.equal(outputs[0], model(inputs))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_resetting_hooks_inside_an_ablation_changes_nothing(spec: str, model_of: ModelOf) -> None:
    model, tiny = model_of(spec)
    with torch.no_grad():
        intact = model(tiny.tokens)
    for removed in SEVEN:
        with torch.no_grad(), ablated(model, identities(removed)):
            without = model(tiny.tokens)
            model.reset_hooks()
            assert torch.equal(model(tiny.tokens), without), removed
    with torch.no_grad():
        assert torch.equal(model(tiny.tokens), intact)
    assert not hooks_left(model)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_resetting_permanent_hooks_inside_an_ablation_is_said_at_its_end(
    spec: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    with pytest.raises(UserError, match="including_permanent"), ablated(model, "mlp"):
        model.reset_hooks(including_permanent=True)
    assert not hooks_left(model)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_running_with_hooks_and_with_a_cache_leaves_the_ablation_as_it_is(
    spec: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    inputs = tiny.tokens
    with torch.no_grad(), ablated(model, identities(*SEVEN)):
        before = model(inputs)
        cached, cache = model.run_with_cache(inputs)
        hooked = model.run_with_hooks(
            inputs, fwd_hooks=[("blocks.0.attn.hook_q", lambda tensor, hook: None)]
        )
        assert distance(cached, before) <= NETWORK  # hooked scores are computed, not fused
        assert torch.equal(hooked, before)
        assert torch.equal(model(inputs), before)
    assert cache["blocks.0.attn.hook_attn_scores"].isfinite().all()
    assert not hooks_left(model)


def test_nesting_two_ablations_is_an_error_and_the_outer_one_stays(
    bridge: ByName, tiny: ByName
) -> None:
    model, tokens = bridge("llama"), tiny("llama").tokens
    with ablated(model, Ablation(remove=["mask"])):
        before = hooked_run(model, tokens).logits
        refused = pytest.raises(UserError, match="ablated already")
        with refused, ablated(model, identities("w_k")):
            pass
        assert torch.equal(hooked_run(model, tokens).logits, before)
    with ablated(model, identities("w_k")):
        assert not torch.equal(hooked_run(model, tokens).logits, before)


def test_two_models_may_be_ablated_at_once(bridge: ByName) -> None:
    with ablated(bridge("llama"), "mlp"), ablated(bridge("qwen3"), "mlp"):
        assert hooks_left(bridge("llama"))
        assert hooks_left(bridge("qwen3"))


SHAPE = (
    r"w_k in L0: expected the shape \[2, 42, 10\] or \[6, 42, 10\] \(head, d_model, d_head\), got "
)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"remove": "mask", "heads": {0: [1, 6]}}, "^L0 has the query heads 0 to 5, not 6"),
        ({"remove": "mask", "heads": {1: [-1]}}, "^L1 has the query heads 0 to 5, not -1"),
        ({"remove": "mask", "heads": {2: [1]}}, r"^expected layers from 0 to 1, got \[2\]"),
        ({"remove": "mask", "prefix": 65}, "prefix of 65 positions, but .* context is 64.*"),
        ({"remove": "w_k", "replacement": torch.zeros(3, 5)}, rf"{SHAPE}\[3, 5\]"),
        ({"remove": "w_k", "replacement": lambda *_: None}, "or a function that .*, got NoneType"),
    ],
)
@pytest.mark.usefixtures("unenforced")
def test_an_ablation_that_a_model_cannot_have_is_an_error_and_leaves_no_hook(
    spec: dict[str, Any], message: str, bridge: ByName
) -> None:
    model = bridge("llama")
    with pytest.raises(ValueError, match=f"{message}$"):
        ablated(model, Ablation(**spec)).__enter__()
    assert not hooks_left(model)


def test_an_encoder_has_no_mask_and_an_attention_only_model_no_mlp() -> None:
    from nope_probe import build, parameter_free

    encoder = build(parameter_free(2, 8, causal=False))
    assert components(encoder) == ("w_q", "w_k", "w_o", "w_v")


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_tokens_instead_of_gains_are_calibrated_on_before_the_ablation(
    spec: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    hf, inputs = tiny.hf, tokens(7, seed=5)
    ablation = Ablation(remove=["mask", "w_q", "w_o"], replacement="identity")
    with ablated(model, ablation, tokens=inputs):
        outputs = hooked_run(model, tiny.tokens)
    expected = plain_run(edited(hf, ablation.remove, output_sizes(hf, inputs)), tiny.tokens)
    assert largest_error(outputs, expected) <= NETWORK
    with ablated(model, ablation, calibrate(model, inputs)):
        assert hooked_run(model, tiny.tokens).logits.equal(outputs.logits)
    assert not hooks_left(model)


def test_gains_and_tokens_together_are_an_error(bridge: ByName) -> None:
    model, inputs = bridge("llama"), tokens(7)
    gains = calibrate(model, inputs)
    with pytest.raises(ValueError, match="not both"):
        ablated(model, "w_q", gains, tokens=inputs).__enter__()


@pytest.mark.parametrize("ablation", [Ablation(remove=["mask"]), identities("w_q")])
def test_tokens_are_not_run_where_no_gain_has_to_be_measured(
    ablation: Ablation, bridge: ByName
) -> None:
    model, calls = bridge("llama"), []
    point = layers_of(model)[0].point("hook_resid_pre")
    with (
        hooks_attached([(point, lambda tensor, hook: calls.append(1))]),
        ablated(model, ablation, tokens=tokens(7)),
    ):
        assert not calls


@pytest.mark.filterwarnings("ignore:generating without a KV cache")
@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_tokens_are_generated_as_by_whole_passes_and_padding_stays_hidden_or_is_refused(
    spec: str, model_of: ModelOf
) -> None:
    """tests/ci/test_generation.py has every removal, and caches of users."""
    (model, _), texts = model_of(spec), tokens(2, 7)
    padded, real = torch.nn.functional.pad(texts, (3, 0), value=17), torch.ones(2, 10).long()
    real[:, :3] = 0
    for remove in ("mask", "w_k", "w_q"):  # a cache serves the last alone
        with torch.no_grad(), ablated(model, identities(remove)):
            found = model.generate(texts, max_new_tokens=3, **GREEDY)
            assert torch.equal(found, by_whole_passes(model, texts, 3))
            logits = model(padded, attention_mask=real)[:, 3:]
            assert distance(logits, model(texts)) <= NETWORK
    refused = pytest.raises(ValueError, match="pass sequences of one length, without padd")
    with ablated(model, Ablation(remove=["rope_low"])), refused:
        model(padded, attention_mask=real)


def test_a_prefix_beyond_the_sequence_is_an_error(bridge: ByName, tiny: ByName) -> None:
    model = bridge("llama")
    sequence = pytest.raises(ValueError, match="prefix of 12 positions, but the sequences have 11")
    with sequence, ablated(model, Ablation(remove=["mask"], prefix=12)):
        model(tiny("llama").tokens)
    assert not hooks_left(model)
