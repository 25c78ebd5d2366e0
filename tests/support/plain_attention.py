"""Attention scores of plain transformers, intact and with a source of position taken away.

An attention function of the tests' own, under a name of its own in transformers' interface, records
what each layer multiplies. No hook point of TransformerLens and no line of nope_probe is used.
Families outside the interface attend eagerly, and the input of their softmax is recorded.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.rounding import NETWORK, assert_same
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

NAME = "recorded_by_the_tests"
_MASKED = -9e3  # finfo.min in most families, -1e4 in the first GPT

# From the cells that a layer sees to those that it sees without a component.
CELLS_WITHOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda cells: cells | cells.mT,  # a window then reaches to both sides
    "window": lambda cells: torch.ones_like(cells).tril(),
    "mask and window": torch.ones_like,
}


@dataclass(frozen=True, kw_only=True)
class PlainAttention:
    """What one layer of plain transformers fed to softmax.

    Attributes:
        scores: [seq, head, query, key], NaN at cells that a query does not see.
        q, k: queries [seq, head, query, d_head] and keys [seq, key head, key, d_head] as they are
            multiplied; None outside the interface.
        sinks: a logit per head, if any.
    """

    scores: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def map(self) -> Tensor:
        """The mean scores [query, key] over sequences and heads, in float64."""
        return self.scores.double().mean((0, 1))


def plain_attention(
    hf: PreTrainedModel, inputs: Tensor, *, without: str | None = None
) -> dict[int, PlainAttention]:
    """Return what each layer that attends fed to softmax, by the number of the layer.

    Args:
        hf: a model of plain transformers.
        inputs: tokens [seq, pos].
        without: what is taken away: a key of `CELLS_WITHOUT`, `rope` (every token is at position
            0), `pos_embed` (every token has the mean position embedding), `alibi` or `sink`; or
            several of these with `and` between them.
    """
    names = (without or "").split(" and ")
    recorder = Recorder(names)
    options = {}
    with recording(hf, recorder), pytest.MonkeyPatch.context() as monkeypatch:
        if "rope" in names:
            for module in rotary_modules(hf):
                monkeypatch.setattr(module, "forward", _at_position_0(module.forward))
            if not rotary_modules(hf):  # GPT-J and CodeGen, whose positions do nothing else
                options["position_ids"] = torch.zeros_like(inputs)
                options["attention_mask"] = torch.ones_like(inputs)  # or each token is a sequence
        if "pos_embed" in names:
            for module in position_embeddings(hf):
                monkeypatch.setattr(module, "forward", _mean_over_positions(module.forward))
        if "alibi" in names:
            options["attention_mask"] = torch.ones_like(inputs)  # or BLOOM builds it in line
            home = sys.modules[type(hf).__module__]
            for name in alibi_functions(hf):
                monkeypatch.setattr(home, name, _zeros(getattr(home, name)))
        with torch.inference_mode():
            hf(inputs, **options)
    return recorder.layers


def plain_maps(hf: PreTrainedModel, inputs: Tensor, *, without: str | None = None) -> Tensor:
    """Return the score maps [layer, query, key] of the layers that attend."""
    attention = plain_attention(hf, inputs, without=without)
    return torch.stack([layer.map for layer in attention.values()])


def plain_scores(hf: PreTrainedModel, inputs: Tensor) -> Tensor:
    """Return the scores of all layers [layer, seq, head, query, key], NaN where masked."""
    attention = plain_attention(hf, inputs)
    return torch.stack([layer.scores.double() for layer in attention.values()])


def components_of(hf: PreTrainedModel, inputs: Tensor) -> list[str]:
    """Return what `plain_attention` can take away from a model; nothing without attention."""
    attention = plain_attention(hf, inputs)
    if not attention:
        return []
    cells = [(~layer.scores[0, 0].isnan()).sum() for layer in attention.values()]
    at_position_0 = plain_attention(hf, inputs, without="rope")
    turned = [
        (layer.scores - at_position_0[number].scores).nan_to_num().any()
        for number, layer in attention.items()
    ]
    n_pos = inputs.shape[1]
    has = {
        "mask": True,
        "window": min(cells) < n_pos * (n_pos + 1) // 2,
        "rope": any(turned) and not position_embeddings(hf),
        "pos_embed": bool(position_embeddings(hf)),
        "alibi": bool(alibi_functions(hf)),
        "sink": any(layer.sinks is not None for layer in attention.values()),
    }
    has["mask and window"] = has["window"]
    return [name for name, present in has.items() if present]


def rotary_modules(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that turn positions into angles."""
    return [module for module in hf.modules() if "Rotary" in type(module).__name__]


def position_embeddings(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the module that turns positions into vectors of the residual stream, if any."""
    names = ("wpe", "embed_positions", "position_embeddings", "positions_embed")
    return [module for name, module in hf.named_modules() if name.rpartition(".")[2] in names]


def alibi_functions(hf: PreTrainedModel) -> list[str]:
    """Return the names of the functions of transformers that a model's ALiBi comes from."""
    home = sys.modules[type(hf).__module__]
    names = [name for name in vars(home) if name.endswith("alibi_tensor")]
    return names if getattr(hf.config, "alibi", True) else []


def _at_position_0(forward: Callable[..., Any]) -> Callable[..., Any]:
    def zeroed(value: Any) -> Any:
        is_positions = isinstance(value, Tensor) and not value.is_floating_point()
        return torch.zeros_like(value) if is_positions else value

    return lambda *values, **options: forward(
        *map(zeroed, values), **{name: zeroed(value) for name, value in options.items()}
    )


def _mean_over_positions(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mean(*values: Any, **options: Any) -> Tensor:
        embedded = forward(*values, **options)
        return embedded.mean(-2, keepdim=True).expand_as(embedded)

    return mean


def _zeros(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *values, **options: torch.zeros_like(function(*values, **options))


class Recorder:
    """The functions that stand in for transformers' own, and what they record by layer.

    `rewrite` takes a layer's number and attention weights, and returns those that are used.
    """

    def __init__(
        self,
        without: Sequence[str] = (),
        rewrite: Callable[[int, Tensor], Tensor] = lambda layer, weights: weights,
    ) -> None:
        self.rewrite = rewrite
        of_cells = " and ".join(name for name in ("mask", "window") if name in without)
        self.change = CELLS_WITHOUT.get(of_cells, lambda cells: cells)
        self.has_sinks = "sink" not in without
        self.layers: dict[int, PlainAttention] = {}
        self.block = -1  # the block that is running
        self.softmax = nn.functional.softmax

    def mask(self, *arguments: Any, **options: Any) -> Tensor:
        mask = eager_mask(*arguments, **options)
        visible = self.change(mask == 0)
        return torch.zeros_like(mask).masked_fill(~visible, torch.finfo(mask.dtype).min)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ _per_query_head(key, query).mT * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        logits = scores + attention_mask
        if s_aux is not None and self.has_sinks:
            logits = torch.cat(
                [logits, s_aux.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1
            )
        weights = self.rewrite(self.block, logits.softmax(-1)[..., : key.shape[2]])
        self.layers[self.block] = PlainAttention(
            scores=scores.masked_fill(attention_mask < _MASKED, torch.nan),
            q=query,
            k=key,
            sinks=s_aux,
        )
        mixed = weights @ _per_query_head(value, query)
        return mixed.transpose(1, 2).contiguous(), weights

    def record_softmax(self, scores: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if scores.shape[-1] == scores.shape[-2]:
            per_head = scores if scores.ndim == 4 else scores.unflatten(0, (self.n_seqs, -1))
            self.layers[self.block] = PlainAttention(
                scores=per_head.masked_fill(per_head < _MASKED, torch.nan)
            )
        return self.softmax(scores, *arguments, **options)

    def enter_block(self, number: int, inputs: tuple[Any, ...]) -> None:
        self.block, self.n_seqs = number, len(inputs[0])


def _per_query_head(vectors: Tensor, query: Tensor) -> Tensor:
    """Return keys or values [seq, head, pos, width] for each query head."""
    return vectors.repeat_interleave(query.shape[1] // vectors.shape[1], 1)


@contextmanager
def recording(hf: PreTrainedModel, recorder: Recorder) -> Iterator[None]:
    """Let a model attend through the functions of a recorder, for the context."""
    AttentionInterface.register(NAME, recorder.attend)
    AttentionMaskInterface.register(NAME, recorder.mask)
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr(hf.config, "_attn_implementation", NAME)
        monkeypatch.setattr(nn.functional, "softmax", recorder.record_softmax)
        for module in hf.modules():  # a causal mask of a module's own
            own = dict(module.named_buffers(recurse=False)).get("bias")
            if own is not None and own.shape[-1] == own.shape[-2]:
                monkeypatch.setitem(
                    module._buffers, "bias", recorder.change(own.bool()).to(own.dtype)
                )
        for number, block in enumerate(blocks_of(hf)):
            hook = block.register_forward_pre_hook(
                lambda _, inputs, number=number: recorder.enter_block(number, inputs)
            )
            stack.callback(hook.remove)
        yield


def blocks_of(hf: PreTrainedModel) -> nn.ModuleList:
    """Return a model's blocks: its longest list of modules."""
    lists = (module for module in hf.modules() if isinstance(module, nn.ModuleList))
    return max(lists, key=len)


def close(values: Tensor, expected: Tensor) -> None:
    """Compare numbers in nats, or inner products, within the contract of networks."""
    size = 1 + float(expected.nan_to_num().abs().max())
    assert_same(values.double(), expected.double(), NETWORK, size=size)


def per_fold(values: Tensor, n_folds: int) -> Tensor:
    """Return the means over the sequences s of each fold s % n_folds, in float64."""
    return torch.stack([values[fold::n_folds].double().mean(0) for fold in range(n_folds)])


def assert_attention(maps: Any, plain: list[PlainAttention], n_folds: int, rows: Tensor) -> None:
    """Check weights, scores and information of some rows against what softmax was fed."""
    for place, layer in enumerate(plain):
        scores = layer.scores.double()[:, :, rows]
        visible = ~scores[0, 0].isnan()
        assert maps.visible[place].equal(visible)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        n_keys, n_others = visible.sum(-1), visible[:, 1:].sum(-1).clamp_min(1)
        others = weights[..., 1:] / weights[..., 1:].sum(-1, keepdim=True)
        of_others = n_others.log() - torch.special.entr(others.nan_to_num()).sum(-1)
        close(maps.weights[:, place], per_fold(weights, n_folds))
        close(maps.scores[:, place], per_fold(scores, n_folds))
        information = n_keys.log() - torch.special.entr(weights).sum(-1)
        close(maps.information[:, place], per_fold(information, n_folds))
        kept = 1 - weights[..., 0]
        close(maps.others[:, place], per_fold(kept * of_others, n_folds))
