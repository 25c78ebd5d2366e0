"""The intermediate states of plain transformers: the oracle of all that hook points carry.

They are read by PyTorch forward hooks on the modules of a Llama-like model; RoPE is transformers'
own function.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.plain_attention import blocks_of
from support.rounding import NETWORK
from support.tiny_models import distance
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


@dataclass
class BlockStates:
    """One block's tensors, positions second: [batch, pos, ...]."""

    y: Tensor = field(default_factory=lambda: torch.empty(0))  # LN(X)
    q: Tensor = field(default_factory=lambda: torch.empty(0))  # [batch, pos, head, d_head]
    k: Tensor = field(default_factory=lambda: torch.empty(0))
    z: Tensor = field(default_factory=lambda: torch.empty(0))
    written: Tensor = field(default_factory=lambda: torch.empty(0))
    middle: Tensor = field(default_factory=lambda: torch.empty(0))
    normed_middle: Tensor = field(default_factory=lambda: torch.empty(0))
    output: Tensor = field(default_factory=lambda: torch.empty(0))

    def scores(self) -> Tensor:
        """Return the score of every query and key, masked ones too: [batch, head, query, key]."""
        group = self.q.shape[2] // self.k.shape[2]
        k = self.k.repeat_interleave(group, 2)
        return torch.einsum("bqhd,bkhd->bhqk", self.q, k) / self.q.shape[-1] ** 0.5


def plain_states(hf: PreTrainedModel, tokens: Tensor, rope: bool = True) -> list[BlockStates]:
    """Return every stage of every block of a plain Llama or SmolLM3.

    With `rope` false, q and k are those of a model whose rotation was switched off.
    """
    states = [BlockStates() for _ in hf.model.layers]
    handles = [h for b, s in zip(hf.model.layers, states, strict=True) for h in _hooks(b, s)]
    with torch.inference_mode():
        hf(tokens)
    for handle in handles:
        handle.remove()
    positions = torch.arange(tokens.shape[1])[None]
    cos, sin = hf.model.rotary_emb(tokens.float(), positions)
    for layer, s in enumerate(states):
        d_head = hf.model.layers[layer].self_attn.head_dim
        s.q, s.k = (x.unflatten(-1, (-1, d_head)) for x in (s.q, s.k))
        if rope and getattr(hf.config, "no_rope_layers", [1] * len(states))[layer]:
            s.q, s.k = apply_rotary_pos_emb(s.q, s.k, cos, sin, unsqueeze_dim=2)
    return states


def _hooks(block: Any, states: BlockStates) -> list[Any]:
    def output_of(module: Any, name: str) -> Any:
        return module.register_forward_hook(_keep(states, name, lambda inputs, output: output))

    def input_of(module: Any, name: str) -> Any:
        return module.register_forward_hook(_keep(states, name, lambda inputs, output: inputs[0]))

    attn = block.self_attn
    return [
        output_of(block.input_layernorm, "y"),
        output_of(attn.q_proj, "q"),
        output_of(attn.k_proj, "k"),
        input_of(attn.o_proj, "z"),
        output_of(attn.o_proj, "written"),
        input_of(block.post_attention_layernorm, "middle"),
        output_of(block.post_attention_layernorm, "normed_middle"),
        output_of(block, "output"),
    ]


def _keep(states: BlockStates, name: str, pick: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        picked = pick(inputs, output)
        setattr(states, name, picked[0] if isinstance(picked, tuple) else picked)

    return hook


def block_outputs(hf: PreTrainedModel, **inputs: Tensor) -> Tensor:
    """Return the output of every block of a plain model: [layer, batch, pos, d_model]."""
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(keep) for block in blocks_of(hf)]
    with torch.inference_mode():
        hf(**inputs)
    for handle in handles:
        handle.remove()
    return torch.stack(kept)


def per_fold(values: Tensor, n_folds: int) -> Tensor:
    """Return the means over the sequences s of each fold s % n_folds, in float64."""
    folds = [values[fold::n_folds].double().mean(0) for fold in range(n_folds)]
    return torch.stack(folds)


def agree(values: Tensor, expected: Tensor, bound: float = NETWORK) -> bool:
    """Return whether maps are NaN in the same cells and agree in the others."""
    if not torch.equal(values.isnan(), expected.isnan()):
        return False
    return distance(values.nan_to_num(), expected.nan_to_num()) <= bound
