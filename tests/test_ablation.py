"""What is removed through hooks equals a model whose weights are set by hand."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from edited_model import (
    SEVEN,
    WEIGHTS,
    Seen,
    edited,
    norm_sizes,
    output_sizes,
    plain_run,
    subsets,
)
from tiny_models import distance

from nope_probe.hooks.ablation import Ablation, ablated, components, rope_layers
from nope_probe.hooks.gain import calibrate
from nope_probe.hooks.layer import installed, layers_of

ModelOf = Callable[[str], tuple[Any, str]]
TinyOf = Callable[[str], Any]

BRIDGES = ("bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3")
HOOKED = ("hooked:smollm3-rope", "hooked:smollm3-nope")
ALL = (*BRIDGES, *HOOKED)


def hooked_run(model: Any, tokens: torch.Tensor) -> Seen:
    """Run a hooked model for its logits, and the softmax of the scores that it hands out."""
    patterns: list[torch.Tensor] = []

    def keep(scores: torch.Tensor, hook: object) -> None:
        patterns.append(scores.softmax(-1))

    points = [(layer.point("attn.hook_attn_scores"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), installed(points):
        logits = model(tokens)
    return Seen(logits, torch.stack(patterns))


def worst(seen: Seen, truth: Seen) -> float:
    return max(distance(seen.logits, truth.logits), distance(seen.patterns, truth.patterns))


def errors_above(
    bound: float, model: Any, tiny: Any, removals: list[tuple[str, ...]], gain: Any = "output"
) -> dict[tuple[str, ...], float]:
    """Compare removals with edited models, and give the ones that differ."""
    hf, tokens = tiny.hf, tiny.tokens
    sizes = {"norm": norm_sizes(hf), "output": output_sizes(hf, tokens)}.get(gain)
    gains = calibrate(model, tokens) if gain == "output" else None
    errors = {}
    for remove in removals:
        truth = plain_run(edited(hf, remove, sizes), tokens)
        with ablated(model, Ablation(remove=remove, gain=gain), gains):
            errors[remove] = worst(hooked_run(model, tokens), truth)
    return {remove: error for remove, error in errors.items() if not error <= bound}


@pytest.mark.parametrize("spec", [*BRIDGES, "hooked:smollm3-rope"])
def test_all_128_combinations_equal_an_edited_model(
    spec: str, model_of: ModelOf, tiny: TinyOf
) -> None:
    model, name = model_of(spec)
    assert not errors_above(1e-5, model, tiny(name), subsets(SEVEN))


def test_all_64_combinations_on_a_model_without_rope_equal_an_edited_model(
    hooked: Callable[[str], Any], tiny: TinyOf
) -> None:
    model = hooked("smollm3-nope")
    assert components(model) == tuple(c for c in SEVEN if c != "rope")
    assert not errors_above(1e-5, model, tiny("smollm3-nope"), subsets(components(model)))


@pytest.mark.parametrize("gain", ["identity", "norm"])
@pytest.mark.parametrize("spec", ALL)
def test_the_other_gains_equal_an_edited_model_for_every_set_of_weights(
    spec: str, gain: str, model_of: ModelOf, tiny: TinyOf
) -> None:
    model, name = model_of(spec)
    assert not errors_above(1e-5, model, tiny(name), subsets(WEIGHTS), gain)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_sliding_window_and_a_soft_cap_are_removed_or_kept_as_the_model_has_them(
    name: str, bridge: Callable[[str], Any], tiny: TinyOf
) -> None:
    removals = [*subsets(("mask", "rope", "w_q", "w_k")), SEVEN]
    assert not errors_above(1e-5, bridge(name), tiny(name), removals)


def test_gpt2_loses_its_learned_positions_like_a_model_with_their_mean(
    bridge: Callable[[str], Any], tiny: TinyOf
) -> None:
    model, tokens = bridge("gpt2"), tiny("gpt2").tokens
    flat = deepcopy(tiny("gpt2").hf)
    n_pos = tokens.shape[1]
    flat.transformer.wpe.weight[:n_pos] = flat.transformer.wpe.weight[:n_pos].mean(0)
    with ablated(model, Ablation(remove=["pos_embed"])):
        assert worst(hooked_run(model, tokens), plain_run(flat, tokens)) <= 1e-5


def test_gpt2_loses_its_other_components_like_an_edited_model(
    bridge: Callable[[str], Any], tiny: TinyOf
) -> None:
    model = bridge("gpt2")
    assert components(model) == ("mask", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed")
    removals = subsets([c for c in SEVEN if c != "rope"])
    assert not errors_above(1e-5, model, tiny("gpt2"), removals, "norm")


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("bridge:llama", (0,)),
        ("bridge:llama", (1,)),
        ("bridge:phi3", (1,)),
        ("bridge:qwen3", (0,)),
        ("bridge:smollm3", (0, 2)),
        ("bridge:smollm3", (2, 1)),
        ("hooked:smollm3-rope", (0,)),
    ],
)
@pytest.mark.parametrize("remove", [*((c,) for c in SEVEN), SEVEN], ids="+".join)
def test_an_ablation_of_some_layers_leaves_the_others_alone(
    remove: tuple[str, ...], layers: tuple[int, ...], spec: str, model_of: ModelOf, tiny: TinyOf
) -> None:
    model, name = model_of(spec)
    hf, tokens = tiny(name).hf, tiny(name).tokens
    truth = plain_run(edited(hf, remove, norm_sizes(hf), layers), tokens)
    with ablated(model, Ablation(remove=remove, layers=layers, gain="norm")):
        assert worst(hooked_run(model, tokens), truth) <= 1e-5


@pytest.mark.parametrize("spec", ALL)
def test_each_removal_changes_the_model(spec: str, model_of: ModelOf, tiny: TinyOf) -> None:
    model, name = model_of(spec)
    intact = hooked_run(model, tiny(name).tokens)
    for component in components(model):
        with ablated(model, Ablation(remove=[component], gain="norm")):
            assert worst(hooked_run(model, tiny(name).tokens), intact) > 1e-2, component


def test_an_empty_ablation_changes_no_bit(bridge: Callable[[str], Any], tiny: TinyOf) -> None:
    model, tokens = bridge("llama"), tiny("llama").tokens
    intact = hooked_run(model, tokens).logits
    for spec in (Ablation(), Ablation(remove=SEVEN, layers=(), gain="norm")):
        with ablated(model, spec):
            assert torch.equal(hooked_run(model, tokens).logits, intact)


@pytest.mark.parametrize("spec", ALL)
def test_outputs_are_bit_identical_afterwards_also_when_the_body_raises(
    spec: str, model_of: ModelOf, tiny: TinyOf
) -> None:
    model, name = model_of(spec)
    tokens, everything = tiny(name).tokens, Ablation(remove=components(model), gain="norm")
    intact = hooked_run(model, tokens)

    def fail_inside() -> None:
        with ablated(model, everything):
            assert not torch.equal(hooked_run(model, tokens).logits, intact.logits)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    after = hooked_run(model, tokens)
    assert torch.equal(after.logits, intact.logits)
    assert torch.equal(after.patterns, intact.patterns)
    assert not hooks_left(model)


def hooks_left(model: Any) -> list[str]:
    return [n for n, point in model.named_modules() if getattr(point, "fwd_hooks", None)]


def test_a_hook_of_the_user_survives_an_ablation(
    bridge: Callable[[str], Any], tiny: TinyOf
) -> None:
    model, seen = bridge("llama"), []
    point = layers_of(model)[0].point("attn.hook_attn_scores")
    with installed([(point, lambda tensor, hook: seen.append(1))]):
        with ablated(model, Ablation(remove=["mask"])):
            model(tiny("llama").tokens)
        model(tiny("llama").tokens)
    assert len(seen) == 2


def test_nesting_two_ablations_is_refused_and_the_outer_one_stays(
    bridge: Callable[[str], Any], tiny: TinyOf
) -> None:
    model, tokens = bridge("llama"), tiny("llama").tokens
    with ablated(model, Ablation(remove=["mask"])):
        before = hooked_run(model, tokens).logits
        with (
            pytest.raises(RuntimeError, match="ablated already"),
            ablated(model, Ablation(remove=["w_k"], gain="norm")),
        ):
            pass
        assert torch.equal(hooked_run(model, tokens).logits, before)
    with ablated(model, Ablation(remove=["w_k"], gain="norm")):
        assert not torch.equal(hooked_run(model, tokens).logits, before)


def test_two_models_may_be_ablated_at_once(bridge: Callable[[str], Any]) -> None:
    with (
        ablated(bridge("llama"), Ablation(remove=["mask"])),
        ablated(bridge("qwen3"), Ablation(remove=["mask"])),
    ):
        assert hooks_left(bridge("llama"))
        assert hooks_left(bridge("qwen3"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"remove": ["mask", "w_qk"]}, "unknown component 'w_qk'; there are mask, rope"),
        ({"gain": "loud"}, "unknown gain 'loud'; there are output, norm, identity"),
    ],
)
@pytest.mark.usefixtures("unenforced")
def test_an_unknown_component_or_gain_is_an_error(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ablation(**spec)


@pytest.mark.parametrize("layers", [(2,), (-1,), (0, 5)])
def test_an_unknown_layer_is_an_error(
    layers: tuple[int, ...], bridge: Callable[[str], Any]
) -> None:
    spec = Ablation(remove=["mask"], layers=layers)
    with pytest.raises(ValueError, match="from 0 to 1"), ablated(bridge("llama"), spec):
        pass


@pytest.mark.parametrize(
    ("spec", "component"),
    [("bridge:llama", "pos_embed"), ("bridge:gpt2", "rope"), ("hooked:smollm3-nope", "rope")],
)
def test_removing_what_a_model_does_not_have_is_an_error(
    spec: str, component: Any, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    lacks = rf"no {component} to remove; it has mask, .*mlp"
    with pytest.raises(ValueError, match=lacks), ablated(model, Ablation(remove=[component])):
        pass


def test_an_encoder_has_no_mask_and_an_attention_only_model_no_mlp() -> None:
    from nope_probe.models import build, parameter_free

    encoder = build(parameter_free(2, 8, causal=False))
    assert components(encoder) == ("w_q", "w_k", "w_o", "w_v")


def test_the_gain_output_must_be_measured_first(bridge: Callable[[str], Any]) -> None:
    spec = Ablation(remove=["mask", "w_v"])
    with pytest.raises(ValueError, match="'output' of w_v"), ablated(bridge("llama"), spec):
        pass
    assert not hooks_left(bridge("llama"))


@pytest.mark.parametrize(
    ("spec", "truth"),
    [
        ("bridge:smollm3", (True, False, True)),
        ("bridge:smollm3-nope", (False, False)),
        ("bridge:llama", (True, True)),
        ("bridge:phi3", (True, True)),
        ("bridge:gpt2", (False, False)),
        ("hooked:smollm3-rope", (True, True)),
        ("hooked:smollm3-nope", (False, False)),
    ],
)
def test_layers_without_rope_are_known(
    spec: str, truth: tuple[bool, ...], model_of: ModelOf
) -> None:
    assert rope_layers(model_of(spec)[0]) == truth
