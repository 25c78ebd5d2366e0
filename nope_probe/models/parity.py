"""The parity check: whether a model's hook points carry what plain transformers computes.

Some model families carry something else than scores at `hook_attn_scores`, or differ from plain
transformers in their logits. Nothing can be measured on them, so they are refused at load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attached_hooks import hooks_attached
from nope_probe.hooks.layers.attention import (
    relative_error,
    repeat_heads,
    score_tolerance,
    unmasked,
)
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.model import layers_of, position_point, run_forward, takes_position_ids
from nope_probe.hooks.layers.protocols import Attachment, HookedModel, HookPoint
from nope_probe.hooks.layers.qk_reader import QKReader
from nope_probe.models.info import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def probe_tokens(d_vocab: int) -> Int[Tensor, "seq pos"]:
    """Return the small batch of random tokens on which parity is measured."""
    return torch.randint(d_vocab, (2, 13), generator=torch.Generator().manual_seed(0))


def reference_logits(hf: PreTrainedModel) -> Float[Tensor, "seq pos d_vocab"]:
    """Return plain transformers' logits on the probe, before a bridge rewires the model."""
    tokens = probe_tokens(hf.config.vocab_size).to(hf.device)
    with torch.inference_mode():
        return hf(tokens).logits.float()


def check_parity(
    model: HookedModel,
    info: ModelInfo,
    reference: Float[Tensor, "seq pos d_vocab"] | None = None,
) -> ModelInfo:
    """Check that a model's hook points carry what it computes, and return its info with the parity.

    Args:
        model: the hooked model.
        info: its info, without parity.
        reference: plain transformers' logits on the probe, where there are any.

    Raises:
        UserError: naming what is off, and by how much.
    """
    blocks = [_BlockParity(layer) for layer in layers_of(model)]
    logits = _run_probe(model, info, blocks)
    parity = {name: _largest(blocks, name) for name in ("pattern", "scores", "keys")}
    if reference is not None:
        parity["logits"] = relative_error(logits, reference.to(logits.device))
    has_positions = any(info.rope_layers) or position_point(model) is not None
    if takes_position_ids(model) and not has_positions:
        parity["positions"] = position_dependence(model)
    tolerance = _tolerance(model)
    for name, value in parity.items():
        if not value <= tolerance:
            reason = next((f" ({block.error})" for block in blocks if block.error), "")
            raise UserError(
                f"{info.name} fails parity: {name} off by {value:.2g} (relative), more than "
                f"{tolerance:g}; its hook points do not carry what the model computes{reason}"
            )
    return replace(info, parity=parity)


def position_dependence(model: HookedModel) -> float:
    """Return how far permuted position ids change a bridge's scores, relative to the largest.

    The all-ones mask is explicit: without one, transformers takes ids out of order for packed
    sequences and masks between them.
    """
    device = next(model.parameters()).device
    tokens = probe_tokens(model.cfg.d_vocab).to(device)
    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0)).to(device)
    in_order, permuted = (
        _scores_at(model, tokens, ids[None].expand_as(tokens)) for ids in (order.sort()[0], order)
    )
    changes = [relative_error(*pair) for pair in zip(permuted, in_order, strict=True)]
    return float(torch.tensor(changes).max())


def _scores_at(
    model: HookedModel, tokens: Int[Tensor, "seq pos"], position_ids: Int[Tensor, "seq pos"]
) -> list[Float[Tensor, "seq head cell"]]:
    """Return each layer's unmasked scores of tokens at given positions."""
    scores: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        scores.append(tensor[..., unmasked(tensor[0, 0])].float())

    hooks = [(layer.point("attn.hook_attn_scores"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(hooks):
        model(tokens, position_ids=position_ids, attention_mask=torch.ones_like(tokens))
    return scores


def _run_probe(model: HookedModel, info: ModelInfo, blocks: list[_BlockParity]) -> Tensor:
    """Run the probe through a model; return its logits, nothing for a parameter-free model."""
    parameter = next(model.parameters())
    logits = torch.empty(0)
    with torch.inference_mode(), hooks_attached(pair for each in blocks for pair in each.hooks()):
        if info.parameter_free:
            vectors = torch.randn(2, 13, info.d_model, generator=torch.Generator().manual_seed(0))
            run_forward(model, vectors.to(parameter.dtype))
        else:
            logits = model(probe_tokens(info.d_vocab).to(parameter.device)).float()
    for each in blocks:
        each.compare_pattern()
    return logits


def _largest(blocks: list[_BlockParity], name: str) -> float:
    """Return the largest error of the blocks; Python's max would pass over NaN."""
    return float(torch.tensor([getattr(block, name) for block in blocks]).max())


def _tolerance(model: HookedModel) -> float:
    return score_tolerance(next(model.parameters()).dtype)


class _BlockParity:
    """Compares one block's scores with its q, k and attention pattern in one pass.

    Attributes:
        pattern: relative error of softmax(scores) against the pattern; NaN if not compared.
        scores: of q.k times the scale against the scores.
        keys: of keys normed and rotated again against the keys.
        error: why scores or keys could not be compared, if they could not.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, self.reader = layer, QKReader(layer)
        self.pattern = self.scores = self.keys = float("nan")
        self.read_scores: Tensor | None = None
        self.read_pattern: Tensor | None = None
        self.error = ""

    def hooks(self) -> list[Attachment]:
        point = self.layer.point
        return [
            *self.reader.hooks(),
            (point("attn.hook_attn_scores"), self.keep_scores),
            (point("attn.hook_pattern"), self.keep_pattern),
        ]

    def keep_scores(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read_scores = tensor
        try:
            self.compare_scores(tensor)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a norm or rotation that Layer does not have: NaN stays
            self.error = " ".join(str(error).split())[:150]

    def compare_scores(self, tensor: Float[Tensor, "batch head query_pos key_pos"]) -> None:
        """Rebuild keys and scores from what the hook points before them carry."""
        visible = unmasked(tensor[0, 0])
        q, k = self.reader.read("q"), self.reader.read("k")
        self.keys = relative_error(self.reader.rebuild("k").float(), k.float())
        product = self.layer.scores(q, repeat_heads(k, self.layer.n_heads))
        self.scores = relative_error(product[..., visible].float(), tensor[..., visible].float())

    def keep_pattern(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read_pattern = tensor

    def compare_pattern(self) -> None:
        """Compare after the pass: some models fire the pattern's hook before the scores'."""
        if self.read_scores is None or self.read_pattern is None:
            return
        if self.layer.has_sinks:  # a sink takes its share of each row outside the scores
            self.pattern = 0.0
            return
        pattern = self.read_scores.float().softmax(-1)
        self.pattern = relative_error(pattern, self.read_pattern.float())
