"""Hooks of the user and an ablation: whichever is added first, the result is the same."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.edited_model import SEVEN
from support.hooked_runs import hooks_left
from support.rounding import NETWORK, assert_same, rounding
from support.tiny_models import ByName, ModelOf, distance

from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.removals import Ablation

POINTS = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.hook_attn_scores",
    "attn.hook_pattern",
    "attn.hook_z",
    "hook_attn_out",
    "hook_mlp_out",
    "hook_resid_post",
)
CASES = [
    ("bridge:llama", "change"),
    ("bridge:llama", "change_in_place"),
    ("bridge:qwen3", "change"),
    ("hooked:smollm3-rope", "change_in_place"),
]


def change(tensor: torch.Tensor, hook: object) -> torch.Tensor:
    """Change a tensor in the second half of its positions (or heads); -inf stays."""
    changed = tensor.clone()
    changed[:, tensor.shape[1] // 2 :] *= 0.5
    changed[:, tensor.shape[1] // 2 :] += 0.25
    return changed


def change_in_place(tensor: torch.Tensor, hook: object) -> None:
    tensor[:, tensor.shape[1] // 2 :] *= 0.5
    tensor[:, tensor.shape[1] // 2 :] += 0.25


def outcome(
    model: Any, inputs: torch.Tensor, remove: Sequence[str], point: Any, hook: Any, outside: bool
) -> torch.Tensor | str:
    """Return the logits, or the error, of an ablation and a user's hook, added in either order."""
    ablation = ablated(model, Ablation(remove=remove, gain="norm"))
    ours = hooks_attached([(point, hook)])
    first, second = (ours, ablation) if outside else (ablation, ours)
    try:
        with torch.no_grad(), first, second:
            return model(inputs).clone()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize(("spec", "hook_name"), CASES)
def test_the_order_of_a_users_hook_and_an_ablation_does_not_matter(
    spec: str, name: str, hook_name: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, tiny_name = model_of(spec)
    hook = {"change": change, "change_in_place": change_in_place}[hook_name]
    layer, inputs = layers_of(model)[0], tiny(tiny_name).tokens
    if not fires(model, layer, name, inputs):
        pytest.skip("the point never fires")
    with torch.no_grad():
        intact = model(inputs)
    removals = [*((component,) for component in SEVEN), ("mask", "w_q", "w_v")]
    for remove in removals:
        without = outcome(model, inputs, remove, layer.point(name), ignore, True)
        outside = outcome(model, inputs, remove, layer.point(name), hook, True)
        inside = outcome(model, inputs, remove, layer.point(name), hook, False)
        assert isinstance(without, torch.Tensor)
        assert isinstance(outside, torch.Tensor), outside
        assert isinstance(inside, torch.Tensor), inside
        assert torch.equal(outside, inside), remove
        assert not torch.equal(outside, without), (remove, "the hook had no effect")
    with torch.no_grad():
        assert torch.equal(model(inputs), intact)
    assert not hooks_left(model)


def ignore(tensor: torch.Tensor, hook: object) -> None:
    """Read a tensor, as a cache does."""


def fires(model: Any, layer: Any, name: str, inputs: torch.Tensor) -> bool:
    fired: list[int] = []
    if layer.has(name):
        with (
            torch.no_grad(),
            hooks_attached([(layer.point(name), lambda t, hook: fired.append(1))]),
        ):
            model(inputs)
    return bool(fired)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_bias_on_rebuilt_scores_is_the_bias_that_was_asked_for(
    spec: str, outside: bool, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    point = layers_of(model)[1].point("attn.hook_attn_scores")
    read: list[torch.Tensor] = []

    def bias(tensor: torch.Tensor, hook: object) -> torch.Tensor:
        return tensor - 5 * torch.eye(11)

    def keep(tensor: torch.Tensor, hook: object) -> None:
        read.append(tensor.clone())

    ablation = Ablation(remove=["mask", "w_k"], gain="norm")
    with ablated(model, ablation), hooks_attached([(point, keep)]):
        model(tiny(name).tokens)
    contexts = [hooks_attached([(point, bias)]), ablated(model, ablation)]
    outer, inner = contexts if outside else reversed(contexts)
    with outer, inner, hooks_attached([(point, keep)]):
        model(tiny(name).tokens)
    change, size = read[1] - read[0], float(read[0].abs().max()) + 5
    assert_same(change, -5 * torch.eye(11).expand_as(change), rounding(2), size=size)


@pytest.mark.parametrize("outside", [True, False])
def test_a_users_hook_on_learned_positions_counts_before_their_mean(
    outside: bool, bridge: ByName, tiny: ByName
) -> None:
    from nope_probe.hooks.layers.model import position_point

    model, inputs = bridge("gpt2"), tiny("gpt2").tokens
    point = position_point(model)
    found = outcome(model, inputs, ["pos_embed"], point, change, outside)
    other = outcome(model, inputs, ["pos_embed"], point, change, not outside)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, other)


@pytest.mark.parametrize("remove", SEVEN)
@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_resetting_hooks_inside_an_ablation_changes_nothing_or_is_an_error(
    spec: str, remove: Any, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    with torch.no_grad():
        intact = model(tiny(name).tokens)
    with ablated(model, Ablation(remove=[remove], gain="norm")):
        without = model(tiny(name).tokens)
        model.reset_hooks()
        if remove in ("mask", "rope"):  # which attention itself leaves out
            assert torch.equal(model(tiny(name).tokens), without)
        else:
            with pytest.raises(RuntimeError, match="removed inside it"):
                model(tiny(name).tokens)
    with torch.no_grad():
        assert torch.equal(model(tiny(name).tokens), intact)
    assert not hooks_left(model)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_running_with_hooks_and_with_a_cache_leaves_the_ablation_as_it_is(
    spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    inputs = tiny(name).tokens
    with torch.no_grad(), ablated(model, Ablation(remove=SEVEN, gain="norm")):
        before = model(inputs)
        cached, cache = model.run_with_cache(inputs)
        hooked = model.run_with_hooks(inputs, fwd_hooks=[("blocks.0.attn.hook_q", ignore)])
        assert distance(cached, before) <= NETWORK  # hooked scores are computed, not fused
        assert torch.equal(hooked, before)
        assert torch.equal(model(inputs), before)
    assert cache["blocks.0.attn.hook_attn_scores"].isfinite().all()
    assert not hooks_left(model)
