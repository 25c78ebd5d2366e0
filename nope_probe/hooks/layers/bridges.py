"""TransformerLens's bridge of a transformers model, and the copy of a model that it is made of.

Importing TransformerLens takes seconds, so this file is imported where a model becomes a bridge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.component_setup import setup_submodules
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    LinearBridge,
    PosEmbedBridge,
    RotaryEmbeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.sources.transformers import determine_architecture_from_hf_config
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.layers.block_kinds import BridgeLayer, JointRows
from nope_probe.hooks.layers.model import blocks_of, layers_of
from nope_probe.hooks.layers.reference import context_in, is_decoder_class, is_of_a_library
from nope_probe.hooks.layers.tap import current


def boot_bridge(
    source: str,
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    implementation: str = "eager",
) -> TransformerBridge:
    """Return the bridge of a Hugging Face model, with raw weights.

    Args:
        source: the Hub id or folder of the model.
        hf: the model, which is rewired in place.
        tokenizer: its tokenizer; None if it has none.
        implementation: the attention of transformers whose masks a user's code in the model gets.

    Raises:
        UserError: if TransformerLens does not support the architecture, or if the model has no
            attention that can be read.
    """
    name_architecture(source, hf.config, [kind.__name__ for kind in type(hf).__mro__])
    with reading(f"TransformerLens cannot read {source}, a {type(hf).__name__}"):
        named = determine_architecture_from_hf_config(hf.config)
        options = {"tokenizer": tokenizer, "model_name": source}
        model = build_bridge_from_module(hf, named, hf_config=hf.config, **options)
    model.cfg.n_ctx = context_in(hf.config.get_text_config()) or model.cfg.n_ctx
    if getattr(hf.config, "is_decoder", False):
        model.cfg.attention_dir = "causal"  # TransformerLens calls any BERT an encoder
    _add_attention(model)
    _add_position_embeddings(model)
    layers = layers_of(model) if hasattr(model, "blocks") else []
    if not layers:
        raise UserError(
            f"{source} has no attention in a form that can be read (one module of a block, with "
            "hook points of TransformerLens): there are no scores to map; a hybrid model may "
            "attend in later layers"
        )
    _run_as_transformers(model)
    _follow_joint_gates(model)
    hf = model.original_model
    for part in (hf, hf.base_model):
        run = part.forward
        vars(part)["forward"] = update_wrapper(partial(_with_attentions, hf.config, run), run)
    for layer in layers:
        assert isinstance(layer, BridgeLayer)
        layer.attach_for_good(implementation)
    return model


def name_architecture(source: str, config: PreTrainedConfig, kinds: Sequence[str]) -> None:
    """Write into a configuration the name by which TransformerLens knows the model's class.

    A configuration may spell it otherwise (PhiMoE), name a subclass, or name none.

    Args:
        source: the Hub id or folder of the model.
        config: its configuration.
        kinds: the names of the class that transformers makes of it, and of its bases.

    Raises:
        UserError: naming the nearest architectures that TransformerLens reads.
    """
    names = [*(config.architectures or []), *kinds]
    spelled = {key: name for name in SUPPORTED_ARCHITECTURES for key in (name.lower(), name)}
    known = [spelled[key] for name in names for key in (name, name.lower()) if key in spelled]
    config.architectures = known[:1] or config.architectures
    try:
        determine_architecture_from_hf_config(config)
    except ValueError as error:
        decoders = [name for name in SUPPORTED_ARCHITECTURES if is_decoder_class(name)]
        near = get_close_matches(names[0], decoders, n=3, cutoff=0.3)
        raise UserError(
            f"{source} is a {names[0]}, which TransformerLens does not read; the nearest "
            f"architectures that it reads are {', '.join(near)}"
        ) from error


# Attention in blocks where TransformerLens has hook points for the residual stream only.
_WHOLE_BLOCKS = {"NemotronHForCausalLM": "mixer", "RecurrentGemmaForCausalLM": "temporal_block"}


def _add_attention(model: TransformerBridge) -> None:
    """Add TransformerLens's hook points to attention that lacks them."""
    name = _WHOLE_BLOCKS.get(type(model.original_model).__name__)
    if name is None:
        return
    for block in model.blocks:
        hf_block = block.original_component
        module = getattr(hf_block._modules[name], "original_component", hf_block._modules[name])
        if not hasattr(module, "q_proj"):
            continue
        projections = {letter: LinearBridge(name=f"{letter}_proj") for letter in "qkvo"}
        attn = AttentionBridge(name=name, config=model.cfg, submodules=projections)
        attn.set_original_component(module)
        setup_submodules(attn, model.adapter, module)
        attn.setup_hook_compatibility()
        attn.hook_z = attn.o.hook_in
        hf_block._modules[name] = attn
        block.add_module("attn", attn)
    model.clear_hook_registry()
    model._initialize_hook_registry()


def _add_position_embeddings(model: TransformerBridge) -> None:
    """Add a hook point to position embeddings without weights (XGLM's sinusoids)."""
    modules = model.original_model.base_model._modules
    embedding = modules.get("embed_positions")
    if embedding is not None and "pos_embed" not in model._modules:
        positions = PosEmbedBridge(name="embed_positions")
        positions.set_original_component(embedding)
        modules["embed_positions"] = positions
        model.add_module("pos_embed", positions)


def _run_as_transformers(model: TransformerBridge) -> None:
    """Run blocks that do not attend by transformers' code, not TransformerLens's."""
    for module in model.original_model.modules():
        for name, child in module._modules.items():
            if isinstance(child, RotaryEmbeddingBridge) and child.original_component is None:
                module._modules[name] = None  # without RoPE (Granite 4), there is no module to call
    for block in blocks_of(model):
        # GPT-1's blocks return lists, in which TransformerLens does not look for its hook's tensor.
        if type(model.original_model).__name__ == "OpenAIGPTLMHeadModel":
            hf_block: Any = block.original_component
            hf_block.register_forward_hook(lambda _, args, output: tuple(output))
        linear = block._modules.get("linear_attn")
        if linear is not None:
            vars(linear)["forward"] = partial(GeneralizedComponent.forward, linear)


def _follow_joint_gates(model: TransformerBridge) -> None:
    """Let the gates of MLPs follow the joint projection that TransformerLens has split."""
    for block in blocks_of(model):
        mlp: Any = block._modules.get("mlp")
        if hasattr(mlp, "split_gate_up_matrix"):
            joint = getattr(mlp.original_component, mlp.fused_attr)
            halves = torch.arange(len(joint.weight)).chunk(2)
            for name, rows in zip(("gate", "in"), halves, strict=True):
                getattr(mlp, name).set_original_component(JointRows(joint, rows))


def _with_attentions(
    config: PreTrainedConfig, forward: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Run a decoder's forward pass, and return attention weights if they are asked for.

    transformers finds none: its attention hands over what the tap returns.
    """
    outer, wanted = current.weights, options.get("output_attentions")
    if wanted is None:  # captures read what they need
        wanted = getattr(config, "output_attentions", False) and not current.readers
    if not wanted and outer is None:
        return forward(*args, **options)
    weights = current.weights = list[Tensor]() if outer is None else outer
    try:
        output = forward(*args, **options)
    finally:
        current.weights = outer
    if hasattr(output, "attentions"):
        output["attentions"] = tuple(weights)
    return output


def copy_of(original: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same weights, buffers and hooks, with adapters merged.

    Its configuration names its class, as that of a saved model does.

    Raises:
        UserError: naming a module whose forward a user's function replaces.
    """
    shared: dict[int, Any] = {}
    for module in original.modules():
        kinds = ("_hooks", "_parameters", "_buffers")
        tables = [table for name, table in vars(module).items() if name.endswith(kinds)]
        tables = [table for table in tables if isinstance(table, dict)]
        shared |= {id(value): value for table in tables for value in table.values()}
    copied = deepcopy(original, shared)
    for path, module in copied.named_modules():
        forward = vars(module).get("_old_forward", vars(module).get("forward"))  # of accelerate
        if not isinstance(forward, FunctionType):  # a function would run the original
            continue
        if not hasattr(forward, "_torchdynamo_orig_callable") and not is_of_a_library(forward):
            raise UserError(
                f"the forward of {path or 'the model'} was replaced by a function, which runs this "
                "object alone: write it as a subclass, or as a hook (register_forward_hook)"
            )
        del vars(module)["forward"]
    merge_adapters(copied)
    copied.config.architectures = copied.config.architectures or [type(copied).__name__]
    return copied


def refuse_gradient(gradient: Tensor) -> None:
    """Refuse a gradient that would reach an adapter.

    Raises:
        UserError: saying where adapters get gradients.
    """
    raise UserError(
        "adapters are merged into copies of the weights, and get no gradients: train the caller's "
        "model outside of `ablated`, or merge the adapter first (merge_and_unload)"
    )


def merge_adapters(model: Any) -> None:
    """Put the matrices that adapters change, with the changes, in the places of peft's modules.

    Disabled adapters are left out. A matrix that is tied to a changed matrix keeps its numbers.

    Raises:
        UserError: for an adapter that peft does not merge.
    """
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for path, layer in reversed([*model.named_modules()]):
        is_within = path.endswith(".token_adapter")  # of a wrapper, which merges it
        if is_within or not isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        model.set_submodule(path, _merged(path, layer))


def _merged(path: str, tuner: Any) -> nn.Module:
    """Return the module under an adapter, with copies of the weights that the adapter changes."""
    base = getattr(tuner, "original_module", None) or tuner.get_base_layer()
    originals = dict(base.named_parameters(recurse=False))
    for name, weight in originals.items():
        # `detach` would share the count of changes, which is the caller's.
        base.register_parameter(name, nn.Parameter(weight.data, requires_grad=False))
    with reading(f"peft does not merge the adapter of {path} into its weights"):
        if not tuner.disable_adapters and hasattr(tuner, "unload_and_optionally_merge_module"):
            base = tuner.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        elif not tuner.disable_adapters and not tuner.merged:
            tuner.merge(safe_merge=True)
            base = tuner.get_base_layer()
    is_trained = any(weight.requires_grad for weight in tuner.parameters())
    for name, weight in dict(base.named_parameters(recurse=False)).items():
        before = originals.get(name)
        if before is not None and before.data_ptr() == weight.data_ptr():
            base.register_parameter(name, before)
        elif is_trained:
            weight.requires_grad_().register_hook(refuse_gradient)
    return base
