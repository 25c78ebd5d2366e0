"""The oracle of the ablations: plain transformers models whose weights are set by hand.

Nothing here uses a hook point of TransformerLens or a line of nope_probe. Grouped key and value
heads are first repeated, one per query head, which changes nothing; then weights are replaced. Mask
and RoPE are not weights: each attention module gets a zero mask, or the cos and sin of position 0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import combinations
from typing import Any, NamedTuple

import torch
from support.plain_attention import blocks_of
from support.plain_states import calls_of
from support.tiny_models import N_POS
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

SEVEN = ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp")
WEIGHTS = ("w_q", "w_k", "w_o", "w_v")
Sizes = Mapping[tuple[str, int], float]  # (projection, layer) -> c
# (projection, layer) -> weight [out, in] and bias [out] of the ungrouped model
Replaced = Mapping[tuple[str, int], tuple[Tensor, Tensor]]
Where = Mapping[int, Sequence[int] | None]  # layer -> query heads, None for all
MatrixOf = Callable[[str, int], Tensor]  # of a projection and layer, [out, in], ungrouped


class Projection(NamedTuple):
    """Views into a model's parameters: [out, in] and [out]."""

    weight: Tensor
    bias: Tensor | None


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all subsets, from none to all."""
    return [c for size in range(len(names) + 1) for c in combinations(names, size)]


def attention(block: Any) -> Any:
    return block.attn if hasattr(block, "attn") else block.self_attn


def projections(hf: PreTrainedModel, layer: int) -> dict[str, Projection]:
    """Return views of one block's four projections, whatever their layout on disk."""
    attn = attention(blocks_of(hf)[layer])
    if hasattr(attn, "c_attn"):  # GPT-2: Conv1D, transposed and fused in thirds
        weights, biases = attn.c_attn.weight.T.chunk(3), attn.c_attn.bias.chunk(3)
        fused = dict(zip(("w_q", "w_k", "w_v"), map(Projection, weights, biases), strict=True))
        return fused | {"w_o": Projection(attn.c_proj.weight.T, attn.c_proj.bias)}
    output = {"w_o": Projection(attn.o_proj.weight, attn.o_proj.bias)}
    if hasattr(attn, "qkv_proj"):
        n_kv = hf.config.num_key_value_heads * attn.head_dim
        n_q = hf.config.num_attention_heads * attn.head_dim
        sizes, bias = [n_q, n_kv, n_kv], attn.qkv_proj.bias
        thirds = attn.qkv_proj.weight.split(sizes)
        biases = (None, None, None) if bias is None else bias.split(sizes)
        fused = dict(zip(("w_q", "w_k", "w_v"), map(Projection, thirds, biases), strict=True))
        return output | fused
    modules = {"w_q": attn.q_proj, "w_k": attn.k_proj, "w_v": attn.v_proj}
    return output | {n: Projection(m.weight, m.bias) for n, m in modules.items()}


def ungrouped(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with one key and value head per query head: the same function."""
    config = deepcopy(hf.config)
    if config.model_type == "gpt2" or config.num_key_value_heads == config.num_attention_heads:
        return deepcopy(hf)
    group = config.num_attention_heads // config.num_key_value_heads
    config.num_key_value_heads = config.num_attention_heads
    copied = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    actual, theirs = dict(copied.requires_grad_(False).named_parameters()), hf.state_dict()
    for name, parameter in actual.items():
        if parameter.shape == theirs[name].shape:
            parameter.copy_(theirs[name])
    for layer in range(len(blocks_of(hf))):
        source, target = projections(hf, layer), projections(copied, layer)
        d_head = attention(blocks_of(hf)[layer]).head_dim
        target["w_q"].weight.copy_(source["w_q"].weight)
        for name in ("w_k", "w_v"):
            for new, old in zip(target[name], source[name], strict=True):
                if new is not None:
                    per_head = old.unflatten(0, (-1, d_head))
                    new.copy_(per_head.repeat_interleave(group, 0).flatten(0, 1))
    return copied


def edited(
    hf: PreTrainedModel,
    remove: Iterable[str],
    c: Sizes | None = None,
    where: Where | None = None,
    *,
    prefix: int | None = None,
    replaced: Replaced | None = None,
    pairs: Sequence[int] | None = None,
    n_pos: int = N_POS,
) -> PreTrainedModel:
    """Return a plain model without some components somewhere; weights become c * P.

    With a prefix, the mask is removed among that many first positions only; with pairs, RoPE is in
    these rotary pairs only. `replaced` holds other weights and biases than c * P and 0. Learned
    positions and the weights of norms belong to no head.
    """
    copied, remove = ungrouped(hf), set(remove)
    if replaced is None:
        replaced = scaled_identities(copied, c)
    add_biases(copied)
    if "pos_embed" in remove:
        positions = copied.transformer.wpe.weight
        positions[:n_pos] = positions[:n_pos].mean(0)
    everywhere: dict[int, Any] = dict.fromkeys(range(len(blocks_of(hf))))
    for layer, heads in (everywhere if where is None else where).items():
        actual = projections(copied, layer)
        for name in remove & set(WEIGHTS):
            rows = rows_of(heads, hf, layer)
            if name == "w_o" and heads is not None:  # its bias belongs to no head
                actual[name].weight[:, rows] = replaced[name, layer][0][:, rows]
                continue
            rows = slice(None) if name == "w_o" else rows
            for parameter, value in zip(actual[name], replaced[name, layer], strict=True):
                parameter[rows] = value[rows]
        block = blocks_of(copied)[layer]
        if "mlp" in remove:
            last = block.mlp.c_proj if hasattr(block.mlp, "c_proj") else block.mlp.down_proj
            for parameter in last.parameters():
                parameter.zero_()
        if "norms" in remove:
            set_norms_to_1(block)
        unmask_and_unrotate(attention(block), remove, prefix, heads, pairs)
    return copied


def set_norms_to_1(block: Any) -> None:
    """Set the weights of the norms before attention and MLP to 1, and their biases to 0."""
    before_mlp = "pre_feedforward_layernorm"
    if not hasattr(block, before_mlp):
        before_mlp = "post_attention_layernorm"
    norms = [getattr(block, n, None) for n in ("ln_1", "ln_2", "input_layernorm", before_mlp)]
    for norm in filter(None, norms):
        norm.weight.fill_(0.0 if "Gemma" in type(norm).__name__ else 1.0)  # Gemma's is 1 + weight
        if getattr(norm, "bias", None) is not None:
            norm.bias.zero_()


def rows_of(heads: Sequence[int] | None, hf: PreTrainedModel, layer: int) -> Any:
    """Return the rows of W_Q that belong to some heads, in the ungrouped model."""
    if heads is None:
        return slice(None)
    d_head = attention(blocks_of(hf)[layer]).head_dim
    return [head * d_head + row for head in heads for row in range(d_head)]


def scaled_identities(copied: PreTrainedModel, c: Sizes | None) -> Replaced:
    """Return c * P, without bias, for each projection of an ungrouped model."""
    replaced = {}
    for layer in range(len(blocks_of(copied))):
        for name, (weight, _) in projections(copied, layer).items():
            size = 1.0 if c is None else c[name, layer]
            matrix = size * rectangular_identity(name, weight.shape)
            replaced[name, layer] = (matrix, torch.zeros(len(weight)))
    return replaced


def add_biases(copied: PreTrainedModel) -> None:
    """Add a bias of 0, which changes nothing, to each linear module of attention without one."""
    for block in blocks_of(copied):
        for module in attention(block).children():
            if isinstance(module, torch.nn.Linear) and module.bias is None:
                module.bias = torch.nn.Parameter(torch.zeros(len(module.weight)), False)


def rectangular_identity(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return P, whose row r reads coordinate r % d_model; for W_O, its transpose."""
    rows, d_model = shape if name != "w_o" else reversed(shape)
    p = torch.zeros(rows, d_model)
    for r in range(rows):
        p[r, r % d_model] = 1
    return p if name != "w_o" else p.T


def unmask_and_unrotate(
    attn: Any,
    remove: set[str],
    prefix: int | None = None,
    heads: Sequence[int] | None = None,
    pairs: Sequence[int] | None = None,
) -> None:
    """Pass an attention module a 4-D mask of 0 (in the prefix), or cos and sin of position 0."""

    def receive(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        which = slice(None) if heads is None else list(heads)
        if remove & {"mask", "window"}:
            mask = kwargs["attention_mask"]
            mask = mask.expand(-1, module.config.num_attention_heads, -1, -1).clone()
            mask[:, which] = unmasked(mask, remove, prefix)[:, which]
            kwargs["attention_mask"] = mask
        if "rope" in remove:
            angles = kwargs["position_embeddings"]
            n_heads = module.config.num_attention_heads
            kwargs["position_embeddings"] = tuple(
                PerHead(unrotated(x, n_heads, which, pairs)) for x in angles
            )
        return args, kwargs

    attn.register_forward_pre_hook(receive, with_kwargs=True)


def unmasked(mask: Tensor, remove: set[str], prefix: int | None) -> Tensor:
    """Return an additive mask without its causal half (in the prefix), or without its window."""
    seen, inside = mask > -1e30, torch.arange(mask.shape[-1]) < (prefix or mask.shape[-1])
    if "window" in remove:
        seen = torch.ones_like(seen).tril()
    if "mask" in remove:
        seen = seen | (seen.mT & inside & inside[:, None])
    return torch.where(seen, 0.0, torch.finfo(mask.dtype).min)


def unrotated(x: Tensor, n_heads: int, heads: Any, pairs: Any) -> Tensor:
    """Return cos or sin per head, with the value of position 0 in some heads and pairs."""
    half = x.shape[-1] // 2
    out = x[:, None].repeat(1, n_heads, 1, 1)
    is_adjacent = x.shape[1] > 1 and torch.equal(x[..., ::2], x[..., 1::2])  # as in Cohere
    if pairs is None:
        out[:, heads] = x[:, None, :1]
    for pair in pairs or ():
        for item in (2 * pair, 2 * pair + 1) if is_adjacent else (pair, pair + half):
            out[:, heads, :, item] = x[:, None, :1, item]
    return out


class PerHead:
    """cos or sin that has a head dimension already, where transformers would add one."""

    def __init__(self, per_head: Tensor) -> None:
        self.per_head, self.shape = per_head, per_head.shape

    def unsqueeze(self, dim: int) -> Tensor:
        assert dim == 1
        return self.per_head


def norm_sizes(hf: PreTrainedModel) -> dict[tuple[str, int], float]:
    """Return the gains `norm`: ||W||_F / sqrt(rows), rows on the side of the heads."""
    sizes = {}
    for layer in range(len(blocks_of(hf))):
        for name, projection in projections(hf, layer).items():
            rows = projection.weight.shape[1 if name == "w_o" else 0]
            sizes[name, layer] = float(projection.weight.square().sum() / rows) ** 0.5
    return sizes


def output_sizes(
    hf: PreTrainedModel, tokens: Tensor, matrix_of: MatrixOf | None = None
) -> dict[tuple[str, int], float]:
    """Return the gains `output`: RMS of a weight's output over RMS of P's (or a matrix's)."""
    sizes = {}
    for layer, (y, z) in enumerate(attention_inputs(hf, tokens)):
        for name, (weight, bias) in projections(hf, layer).items():
            x = z if name == "w_o" else y
            given = torch.nn.functional.linear(x, weight, bias)
            # P of the ungrouped model has as many rows as the query heads.
            rows = (hf.config.hidden_size, z.shape[-1])
            shape = rows if name == "w_o" else rows[::-1]
            matrix = rectangular_identity(name, shape)
            if matrix_of is not None:
                matrix = matrix_of(name, layer)
            its = x @ matrix.T
            sizes[name, layer] = float(given.square().mean() / its.square().mean()) ** 0.5
    return sizes


def constants(hf: PreTrainedModel, tokens: Tensor) -> Replaced:
    """Return no weight and the mean output as bias, for each projection of the ungrouped model."""
    replaced = {}
    for layer, (y, z) in enumerate(attention_inputs(hf, tokens)):
        for name, projection in projections(ungrouped(hf), layer).items():
            output = torch.nn.functional.linear(z if name == "w_o" else y, *projection)
            replaced[name, layer] = torch.zeros_like(projection.weight), output.mean((0, 1))
    return replaced


def attention_inputs(hf: PreTrainedModel, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return, per layer, the input of W_Q, W_K, W_V (y) and that of W_O (z)."""
    modules = {}
    for layer, block in enumerate(blocks_of(hf)):
        named = dict(attention(block).named_children())
        for side, names in (("y", ("q_proj", "qkv_proj", "c_attn")), ("z", ("o_proj", "c_proj"))):
            modules[side, layer] = next(named[name] for name in names if name in named)
    calls = calls_of(hf, modules, tokens)
    return [(calls["y", at].input, calls["z", at].input) for at in range(len(blocks_of(hf)))]


class Outputs(NamedTuple):
    """A model's logits and attention probabilities."""

    logits: Tensor
    patterns: Tensor  # [layer, batch, head, query_pos, key_pos]


def plain_run(hf: PreTrainedModel, tokens: Tensor, **inputs: Tensor) -> Outputs:
    """Return the logits and attention probabilities of plain transformers."""
    with torch.inference_mode():
        out = hf(tokens, output_attentions=True, **inputs)
    return Outputs(out.logits, torch.stack(out.attentions))
