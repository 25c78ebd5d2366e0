"""The models that public functions take: TransformerLens's, and transformers' through a bridge.

A bridge is made of copies of the model's modules that share the model's weights. The model is
never changed, and its weights are in memory once. Adapters are merged into copies of the matrices
that they change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Num
from torch import Tensor, nn
from transformers import PreTrainedModel

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import whole
from nope_probe.hooks.layers.base_layer import is_plain
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import blocks_of
from nope_probe.hooks.layers.reference import (
    errors_of,
    is_of_a_library,
    text_config_of,
    validate_surroundings,
    with_reference,
)


@runtime_checkable
class HasModel(Protocol):
    """A model with its tokenizer and info, as `nope_probe.load` returns them."""

    @property
    def model(self) -> Any: ...


@runtime_checkable
class HasModule(Protocol):
    """A model in nnsight."""

    @property
    def _module(self) -> Any: ...


# A HookedTransformer or TransformerBridge, what `load` returns, or what `load` takes in memory.
Model: TypeAlias = HookedModel | HasModel | HasModule | nn.Module
TAKEN = (
    "a transformers model with a head for text (also in torch.compile, peft or nnsight), a "
    "HookedTransformer, a TransformerBridge, or what load(name) returns"
)
# Where nnsight's, parallel, loaded and peft's models have the model that they wrap.
_WRAPPED = ("_module", "_model", "module", "model")
NOT_ABLATED = (
    "this model is not ablated here: call the model that `ablated` yields (`as model`; so does "
    "`untrained`), or its `model.original_model`, a transformers model of the same weights, run "
    "eagerly (uncompiled)"
)
WITHOUT_EFFECT = ("training", "gradient_checkpointing")  # on what is read
N_NUMBERS = 64  # read of a tensor


def model_of(given: Model) -> HookedModel:
    """Return the hooked model that a caller gave to a public function, in any of its forms.

    The bridge of a transformers model is made anew at every call, as its weights and hooks are now.

    Raises:
        UserError: for what is no model, naming what is taken, or for a model whose weights are on
            disk or in another memory until they are used, that is no decoder of text, or whose
            bridge computes something else; for a bridge that computes without an adapter, or the
            model of one; inside `ablated`, for the caller's model; for a bridge whose model has
            changed since.
    """
    model, _ = as_hooked(given)
    return model


def as_hooked(given: Model, tokenizer: Any = None) -> tuple[HookedModel, dict[str, float]]:
    """Return the hooked model of `model_of`, and the errors of a new bridge's outputs.

    Args:
        given: the caller's model.
        tokenizer: the tokenizer of a transformers model, of which the bridge has a copy; by default
            the one of the object that holds the model.
    """
    validate_surroundings()
    _validate_whole(given)
    model = _unwrapped(given)
    validate_on_devices("the model", model)
    _validate_split(model)
    if hasattr(model, "cfg"):
        validate_unchanged(model)
        return model, {}
    if any(hook is refuse for hook in model._forward_pre_hooks.values()):
        raise UserError(NOT_ABLATED)
    from nope_probe.hooks.layers.bridges import boot_bridge, copy_of

    name = model.name_or_path or type(model).__name__
    implementation = model.config.get_text_config()._attn_implementation
    _validate_apart(model)
    copied = copy_of(model)
    _validate_decoder(copied)
    decoder, reference = with_reference(model, copied)
    bridge = boot_bridge(name, decoder, None, implementation)
    # As it is: TransformerLens would let it add a BOS.
    bridge.tokenizer = deepcopy(tokenizer or getattr(given, "tokenizer", None))
    errors = errors_of(bridge, reference)
    bridge.train(model.training)
    weights = (*bridge.original_model.parameters(), *bridge.original_model.buffers())
    shared = {id(weight) for weight in weights}
    state = partial(state_of, model, shared)
    _ORIGINALS[bridge] = model, state, state()
    return bridge, errors


def _unwrapped(given: object) -> Any:
    """Return the TransformerLens or transformers model that a caller's object is, or wraps."""
    inner: Any = getattr(given, "_orig_mod", given)
    prompts = getattr(getattr(inner, "active_peft_config", None), "is_prompt_learning", False)
    if prompts:
        raise UserError(
            f"the adapter, a {type(inner.active_peft_config).__name__}, adds no numbers to "
            "weights: only adapters that do, such as LORA, are read"
        )
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "blocks") and hasattr(inner, "cfg"):
            return inner
        wrapped = (getattr(inner, name, None) for name in _WRAPPED)
        inner = next((model for model in wrapped if isinstance(model, nn.Module)), None)
        if inner is None:
            hint = "; load it first: load(name)" if isinstance(given, str) else ""
            raise UserError(f"expected {TAKEN}, got {type(given).__name__}{hint}")
    return inner


def _validate_whole(given: object) -> None:
    """Check that no process holds only a part of each weight, as in FSDP.

    Raises:
        UserError: saying how large models are read.
    """
    sharded: Any = sys.modules.get("torch.distributed.fsdp")
    if sharded is None or not isinstance(given, nn.Module):
        return
    kinds = (sharded.FSDPModule, sharded.FullyShardedDataParallel)
    path = next((path for path, part in given.named_modules() if isinstance(part, kinds)), None)
    if path is not None:
        raise UserError(
            f"FSDP has sharded {path or 'the model'}, so that no process has its weights: save the "
            "whole model and load it by its folder, on several devices with device_map='auto', or "
            "under torchrun, where each process has a model and shares the sequences"
        )


def validate_on_devices(what: str, model: nn.Module) -> None:
    """Check that every weight is on a device, not on disk or in another memory until it is used.

    Raises:
        UserError: naming the first weight that is elsewhere.
    """
    away = [name for name, weight in model.named_parameters() if weight.is_meta]
    if away:
        raise UserError(
            f"{len(away)} weights of {what}, such as {away[0]}, are offloaded (on the device meta) "
            "and cannot be read: take fewer --layers (n_layers) or a smaller --dtype"
        )


def _validate_split(model: Any) -> None:
    """Check that the joint projections of a bridge multiply by what was split.

    TransformerLens splits a joint projection's weight when it makes a bridge, and multiplies by the
    parts, in the model of the bridge too: what else the projection computes is lost.

    Raises:
        UserError: for a joint projection with an adapter, or whose weight is packed.
    """
    for path, part in model.named_modules():
        joint = None
        if hasattr(part, "split_qkv_matrix"):
            joint = getattr(part._modules.get("qkv"), "original_component", None)
        elif hasattr(part, "split_gate_up_matrix"):
            joint = getattr(part.original_component, part.fused_attr, None)
        if joint is not None and not is_plain(joint):
            raise UserError(
                f"TransformerLens computes {path} without the adapter or the scales of its joint "
                f"projection, a {type(joint).__module__}.{type(joint).__name__}, and has changed "
                "the model itself: load that again, and give it without a bridge"
            )


def _validate_apart(model: nn.Module) -> None:
    """Check that no attention stands in two places, whose passes could not be told apart.

    Raises:
        UserError: naming the two places.
    """
    first_at: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_attention = "att" in path.rpartition(".")[2] and any(True for _ in module.parameters())
        if is_attention and first_at.setdefault(module, path) != path:
            raise UserError(
                f"{first_at[module]} and {path} are one module, which runs twice: give each place "
                "a copy (copy.deepcopy)"
            )


State: TypeAlias = dict[str, object]
# By bridge: the caller's model, its state, and the state when the bridge was made.
_ORIGINALS: WeakKeyDictionary[Any, tuple[PreTrainedModel, Callable[[], State], State]] = (
    WeakKeyDictionary()
)


def state_of(model: nn.Module, shared: Collection[int]) -> State:
    """Return what decides a model's outputs, by place, except the numbers of shared tensors.

    Args:
        model: the model of transformers, with or without adapters.
        shared: the ids of tensors whose numbers do not count.
    """
    state: State = {}
    for path, module in model.named_modules():
        attributes = vars(module)
        tables = module._forward_pre_hooks | module._forward_hooks
        hooks = [number for number, hook in tables.items() if not is_of_a_library(hook)]
        state[path] = (module, type(module), attributes.get("forward"), hooks)
        for name, value in attributes.items():
            is_left_out = name.endswith("_hooks") or name in WITHOUT_EFFECT
            if not is_left_out and _is_setting(value):
                state[f"{path}.{name}"] = deepcopy(value)
        for name, tensor in (module._parameters | module._buffers).items():
            # Frequencies that depend on a pass's length are made anew in the pass.
            if tensor is not None and "inv_freq" not in name:
                numbers = None if id(tensor) in shared else _version_of(tensor)
                state[f"{path}.{name}"] = (id(tensor), numbers)
    return state


def _is_setting(value: object) -> bool:
    """Return whether a module's attribute is a setting, such as an adapter's scale, not a count."""
    values: Iterable[object] = [value]
    if isinstance(value, dict | list | tuple):
        values = value.values() if isinstance(value, dict) else value
    return all(isinstance(value, bool | float | str) for value in values)


def _version_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what a change of a tensor changes, a change of `tensor.data` too."""
    return tensor._version, tensor.data_ptr(), *some_numbers(tensor).tolist()


def some_numbers(tensor: Tensor) -> Num[Tensor, " number"]:
    """Return some numbers of a tensor: enough to know it by, and read in no time."""
    numbers = whole(tensor.detach()).flatten()
    return numbers[:: 1 + len(numbers) // N_NUMBERS]


def validate_unchanged(bridge: HookedModel) -> None:
    """Check that the transformers model of a bridge is as it was when the bridge was made.

    Raises:
        UserError: naming a part that has changed, whose change the bridge does not follow.
    """
    if bridge not in _ORIGINALS:
        return
    _, state, before = _ORIGINALS[bridge]
    now = state()
    changed = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    if changed:
        raise UserError(
            f"the model has changed since it was loaded ({changed[0] or 'the model'}: a hook, a "
            "module, a setting or an adapter), and what was loaded does not follow: load it again"
        )


def refuse(module: nn.Module, args: object) -> None:
    """Refuse a pass of the caller's model, or of a part of it, inside `ablated`.

    Raises:
        UserError: saying which model is ablated.
    """
    raise UserError(NOT_ABLATED)


@contextmanager
def refused(bridge: HookedModel) -> Iterator[None]:
    """Refuse passes of the transformers model of a bridge for as long as the context lasts.

    Compiled code would not see the refusal, so it runs as it is written meanwhile. A pass of the
    bridge checks that the transformers model has not changed.
    """
    blocks = blocks_of(bridge)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if bridge in _ORIGINALS:
            for module in _run_alone(_ORIGINALS[bridge][0]):
                stack.enter_context(module.register_forward_pre_hook(refuse, prepend=True))
            check = blocks[0].register_forward_pre_hook(lambda *_: validate_unchanged(bridge))
            stack.enter_context(check)
        yield


def _run_alone(model: PreTrainedModel) -> set[nn.Module]:
    """Return the parts of a model that code outside of it may call: backbones and blocks."""
    parts = [*model.modules()]
    blocks = [block for part in parts if isinstance(part, nn.ModuleList) for block in part]
    return {*blocks, *(part for part in parts if isinstance(part, PreTrainedModel))}


def _validate_decoder(model: Any) -> None:
    """Check that a model is a decoder of text, or has one within it, with embeddings as tensors.

    Raises:
        UserError: saying what is taken, or naming the packed embeddings.
    """
    text = text_config_of(model.config)
    is_other = text.is_encoder_decoder or hasattr(text, "text_config")
    if is_other or model.get_output_embeddings() is None:
        raise UserError(f"a {type(model).__name__} is not taken; what is taken is {TAKEN}")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for path, module in model.named_modules():
        if module in ends and not isinstance(getattr(module, "weight", None), Tensor):
            raise UserError(
                f"{path} is quantised (a {type(module).__module__}.{type(module).__name__} with "
                "packed weights): quantise all layers but embeddings and the head, as torch.ao's "
                "quantize_dynamic(model.model, ...) does"
            )
