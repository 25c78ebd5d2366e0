"""The intermediate states of plain transformers: the oracle of all that hook points carry.

They are read by PyTorch forward hooks on modules; RoPE is transformers' own function.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from support.plain_attention import blocks_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Name = TypeVar("Name")


class Call(NamedTuple):
    """What a module was given first, and what it returned first."""

    input: Tensor
    output: Tensor


def calls_of(
    hf: PreTrainedModel, modules: Mapping[Name, nn.Module], *inputs: Tensor, **options: Tensor
) -> dict[Name, Call]:
    """Run a plain model, and return what some of its modules were given and returned."""
    calls: dict[Name, Call] = {}
    with ExitStack() as stack, torch.inference_mode():
        for name, module in modules.items():

            def keep(_: Any, args: Any, given: Any, output: Any, name: Name = name) -> None:
                first = args[0] if args else given["hidden_states"]
                calls[name] = Call(first, output[0] if isinstance(output, tuple) else output)

            stack.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        hf(*inputs, **options)
    return {name: calls[name] for name in modules}


@dataclass(frozen=True, kw_only=True)
class BlockStates:
    """One block's tensors, positions second: [batch, pos, ...]."""

    y: Tensor  # LN(X)
    q: Tensor  # [batch, pos, head, d_head]
    k: Tensor
    z: Tensor
    written: Tensor
    middle: Tensor
    normed_middle: Tensor
    output: Tensor

    def scores(self) -> Tensor:
        """Return the score of every query and key, masked ones too: [batch, head, query, key]."""
        group = self.q.shape[2] // self.k.shape[2]
        k = self.k.repeat_interleave(group, 2)
        return torch.einsum("bqhd,bkhd->bhqk", self.q, k) / self.q.shape[-1] ** 0.5


def plain_states(hf: PreTrainedModel, tokens: Tensor, rope: bool = True) -> list[BlockStates]:
    """Return every stage of every block of a plain Llama or SmolLM3.

    With `rope` false, q and k are those of a model whose rotation was switched off.
    """
    blocks = enumerate(hf.model.layers)
    modules = {(at, name): block.get_submodule(name) for at, block in blocks for name in _MODULES}
    calls = calls_of(hf, modules, tokens)
    positions = torch.arange(tokens.shape[1])[None]
    cos, sin = hf.model.rotary_emb(tokens.float(), positions)
    states = []
    for at, block in enumerate(hf.model.layers):
        norm, q, k, o, second_norm, whole = (calls[at, name] for name in _MODULES)
        d_head = block.self_attn.head_dim
        heads = tuple(x.output.unflatten(-1, (-1, d_head)) for x in (q, k))
        if rope and getattr(hf.config, "no_rope_layers", [1] * (at + 1))[at]:
            heads = apply_rotary_pos_emb(*heads, cos, sin, unsqueeze_dim=2)
        states.append(
            BlockStates(
                y=norm.output,
                q=heads[0],
                k=heads[1],
                z=o.input,
                written=o.output,
                middle=second_norm.input,
                normed_middle=second_norm.output,
                output=whole.output,
            )
        )
    return states


_MODULES = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", ""),
)


def block_outputs(hf: PreTrainedModel, **inputs: Tensor) -> Tensor:
    """Return the output of every block of a plain model: [layer, batch, pos, d_model]."""
    calls = calls_of(hf, dict(enumerate(blocks_of(hf))), **inputs)
    return torch.stack([call.output for call in calls.values()])


def plain_losses(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the loss of each prediction of a plain model, nats [batch, pos - 1]."""
    with torch.no_grad():
        logits = hf(input_ids=tokens).logits
    return cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")


# Written position by its definition: means over the other texts of a half.
def of_others(outputs: Tensor, kept: int, half: Tensor | None = None) -> Tensor:
    """Return what each text loses of the outputs: what the other texts of its half show."""
    counts, rows = counted(outputs, kept), torch.arange(len(outputs))
    half = rows % 2 if half is None else half
    others = [(rows != row) & (half == half[row]) for row in rows]
    return torch.stack([_about_mean(outputs[of], counts[of], kept) for of in others])


def of_all(outputs: Tensor, kept: int) -> Tensor:
    """Return what a new text loses of the outputs: what all texts show."""
    return _about_mean(outputs, counted(outputs, kept), kept)


def counted(outputs: Tensor, kept: int) -> Tensor:
    """Return 1 for outputs that count, 0 for massive ones where a position has few of them."""
    norm = outputs.norm(dim=-1)
    counts = (norm <= 4 * norm[:, kept:].median()).float()
    counts[:, counts.mean(0) < 0.5] = 1.0
    return counts


def _about_mean(outputs: Tensor, counts: Tensor, kept: int) -> Tensor:
    """Return the mean output that counts at each position, less its mean over later positions."""
    total = (outputs * counts[..., None]).sum(0)
    mean = total / counts.sum(0).clamp(min=1)[:, None]
    written = mean - mean[kept:].mean(0)
    written[:kept] = 0
    return written
