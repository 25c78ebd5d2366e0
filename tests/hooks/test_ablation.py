"""An ablated model equals one whose weights are set by hand, whatever is removed, and where."""

from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ablations import ablations, calibration_of, edited_as, identities
from support.edited_model import plain_run
from support.hooked_runs import hooked_run, hooks_left, largest_error
from support.rounding import NETWORK, assert_same
from support.tiny_models import D_VOCAB, ModelOf, hooked_transformer

from nope_probe import Ablation, ablated, capture_scores
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of

BRIDGES = ("llama", "phi3", "qwen3", "smollm3", "cohere", "mistral", "gemma2", "gpt2")
SCALED = ("llama-yarn", "phi3-longrope")  # rotated queries and keys grow, at position 0 too
HOOKED = ("hooked:smollm3-rope", "hooked:smollm3-nope")
ALL = (*(f"bridge:{name}" for name in (*BRIDGES, *SCALED)), *HOOKED)


@pytest.mark.parametrize("spec", ALL)
@given(st.data())
def test_an_ablation_equals_an_edited_model(
    spec: str, model_of: ModelOf, data: st.DataObject
) -> None:
    model, tiny = model_of(spec)
    inputs = tiny.tokens
    ablation = data.draw(ablations(model, tiny))
    expected = plain_run(edited_as(ablation, model, tiny), inputs)
    with ablated(model, ablation, calibration_of(model, tiny, ablation.seed)):
        assert largest_error(hooked_run(model, inputs), expected) <= NETWORK
        maps = capture_scores(model, inputs, n_folds=1).mean
    # A score less that of the query's own key, which no mask hides, from the softmax alone.
    scores = expected.patterns.double().log().mean((1, 2))
    relative = scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]
    relative = relative.where(relative.isfinite(), torch.nan)
    size = 1 + float(relative.nan_to_num().abs().max())
    assert_same(maps - maps.diagonal(dim1=-2, dim2=-1)[..., None], relative, NETWORK, size=size)


POINTS = (
    *("hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_rot_q"),
    *("attn.hook_rot_k", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z"),
    *("hook_attn_out", "hook_mlp_out", "hook_resid_post"),
)


def change(tensor: torch.Tensor, hook: object) -> torch.Tensor:
    """Change a tensor in the second half of its positions (or heads); -inf stays."""
    changed = tensor.clone()
    change_in_place(changed, hook)
    return changed


def change_in_place(tensor: torch.Tensor, hook: object) -> None:
    tensor[:, tensor.shape[1] // 2 :] *= 0.5
    tensor[:, tensor.shape[1] // 2 :] += 0.25


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:qwen3", "hooked:smollm3-rope"])
@given(st.data())
def test_the_order_of_names_and_of_a_users_hooks_and_an_ablation_does_not_matter(
    spec: str, model_of: ModelOf, data: st.DataObject
) -> None:
    model, tiny = model_of(spec)
    inputs, layer = tiny.tokens, layers_of(model)[data.draw(st.integers(0, 1))]
    known = [point for point in POINTS if layer.has(point)]
    names = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1))
    points = [layer.point(point) for point in names]
    given = data.draw(ablations(model, tiny))
    shuffled = replace(given, remove=data.draw(st.permutations(given.remove)))
    union = replace(given, remove="+".join(shuffled.remove) or ())
    change_of = data.draw(st.sampled_from((change, change_in_place)))
    calibration = calibration_of(model, tiny, given.seed)

    def run(ablation: Ablation, outside: bool) -> torch.Tensor:
        hooks = hooks_attached([(point, change_of) for point in points])
        contexts = [hooks, ablated(model, ablation, calibration)]
        outer, inner = contexts if outside else reversed(contexts)
        with torch.no_grad(), outer, inner:
            return model(inputs).clone()

    expected = run(given, outside=False)
    assert torch.equal(run(shuffled, outside=True), expected)
    assert torch.equal(run(union, outside=True), expected)


WRITTEN = {"mask": "attn.hook_attn_scores", "w_q": "attn.hook_q", "w_k": "attn.hook_k"}
WRITTEN |= {"w_v": "attn.hook_v", "w_o": "hook_attn_out", "mlp": "hook_mlp_out"}


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_users_hook_changes_what_a_removal_writes(
    spec: str, outside: bool, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    for component, written in WRITTEN.items():
        outputs, point = [], layers_of(model)[0].point(written)
        for hook in (ignore, change):
            contexts = [hooks_attached([(point, hook)]), ablated(model, identities(component))]
            outer, inner = contexts if outside else reversed(contexts)
            with torch.no_grad(), outer, inner:
                outputs.append(model(tiny.tokens).clone())
        assert not torch.equal(*outputs), component


def ignore(tensor: torch.Tensor, hook: object) -> None:
    """Read a tensor, as a cache does."""


def hooks_of_modules(model: Any) -> list[int]:
    """Return how many hooks of PyTorch each module has."""
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


@pytest.mark.parametrize("spec", ALL)
@settings(max_examples=settings.default.max_examples // 5)
@given(st.data())
def test_leaving_an_ablation_restores_every_bit_also_when_the_body_raises(
    spec: str, model_of: ModelOf, data: st.DataObject
) -> None:
    model, tiny = model_of(spec)
    inputs, attributes = tiny.tokens, {*vars(model)}
    hooks = hooks_of_modules(model)
    parameters = {key: value.clone() for key, value in model.state_dict().items()}
    before = hooked_run(model, inputs)
    for ablation in data.draw(st.lists(ablations(model, tiny), min_size=1, max_size=3)):
        ablations_run = ablated(model, ablation, calibration_of(model, tiny, ablation.seed))
        with suppress(ZeroDivisionError), ablations_run:
            hooked_run(model, inputs)
            if data.draw(st.booleans()):
                raise ZeroDivisionError
        after = hooked_run(model, inputs)
        assert torch.equal(after.logits, before.logits)
        assert torch.equal(after.patterns, before.patterns)
        assert not hooks_left(model)
        assert hooks_of_modules(model) == hooks
        assert {*vars(model)} == attributes
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in parameters.items())


@pytest.mark.hooked_transformer
def test_without_rope_a_hooked_transformer_keeps_the_factor_of_yarn() -> None:
    torch.manual_seed(0)
    yarn = {"use_yarn_rope": True, "yarn_factor": 4.0, "yarn_attention_factor": 1.3}
    yarn |= {"yarn_original_max_position_embeddings": 16}
    rotary = {"positional_embedding_type": "rotary", "rotary_dim": 6, **yarn}
    model = hooked_transformer(d_model=21, n_heads=3, d_head=10, act_fn="silu", **rotary)
    tokens, at_zero = torch.randint(D_VOCAB, (3, 11)), deepcopy(model)
    for block in at_zero.blocks:
        for angles in (block.attn.rotary_cos, block.attn.rotary_sin):
            angles.copy_(angles[0].clone().expand_as(angles))
    for others in ((), ("w_k",), ("mask",)):
        with ablated(model, identities("rope", *others)):
            outputs = hooked_run(model, tokens)
        with ablated(at_zero, identities(*others)):
            assert largest_error(outputs, hooked_run(at_zero, tokens)) <= NETWORK
