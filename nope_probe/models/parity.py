"""The contract a model's hooks must keep, and the info that says what the model is.

Some model families hand out something else than their scores at `hook_attn_scores`, or differ from
plain transformers in their logits. What they say cannot be used, so they are refused at load.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.components import components
from nope_probe.hooks.forward import Installation, hooks_attached, run_forward
from nope_probe.hooks.layer import Layer, is_bridge, layers_of, repeat_heads, unmasked
from nope_probe.hooks.qk_reader import QKReader
from nope_probe.models.info import ModelInfo


def probe_tokens(d_vocab: int) -> Int[Tensor, "seq pos"]:
    """Give the small batch on which the contract is checked."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(d_vocab, (2, 13), generator=generator)


def reference_logits(hf: Any) -> Float[Tensor, "seq pos d_vocab"]:
    """Ask plain transformers, before a bridge rewires the model, for its logits on the probe."""
    tokens = probe_tokens(hf.config.vocab_size).to(hf.device)
    with torch.inference_mode():
        return hf(tokens).logits.float()


def check(
    model: Any, info: ModelInfo, reference: Float[Tensor, "seq pos d_vocab"] | None = None
) -> ModelInfo:
    """Measure how far a model's hooks are from the truth, and refuse it if they lie.

    Args:
        model: the hooked model.
        info: its info; a copy with the parity filled in is returned.
        reference: plain transformers' logits on the probe, where there are any.

    Raises:
        UserError: with the measured mismatch.
    """
    parameter = next(model.parameters())
    accumulators = [_ScoreChecker(layer) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(pair for m in accumulators for pair in m.hooks()):
        if info.parameter_free:
            vectors = torch.randn(2, 13, info.d_model, generator=torch.Generator().manual_seed(0))
            vectors = vectors.to(parameter.device, parameter.dtype)
            run_forward(model, vectors)
        else:
            logits = model(probe_tokens(info.d_vocab).to(parameter.device)).float()
    for accumulator in accumulators:
        accumulator.compare_pattern()
    parity = {name: _largest(accumulators, name) for name in ("pattern", "scores", "keys")}
    if reference is not None:
        parity["logits"] = distance(logits, reference.to(logits.device))
    if _claims_no_positions(model, info):
        parity["positions"] = position_dependence(model)
    tolerance = 1e-4 if parameter.dtype in (torch.float32, torch.float64) else 0.05
    for name, value in parity.items():
        if not value <= tolerance:
            raise UserError(
                f"{info.name} breaks the contract of its hooks: {name} off by {value:.2g} "
                f"(relative), more than {tolerance:g}; what it hands out cannot be trusted"
                + next(
                    (
                        f" ({accumulator.trouble})"
                        for accumulator in accumulators
                        if accumulator.trouble
                    ),
                    "",
                )
            )
    return replace(info, parity=parity)


def _largest(accumulators: list[_ScoreChecker], name: str) -> float:
    """Give the largest deviation; Python's max would pass over one that is not a number."""
    return float(torch.tensor([getattr(accumulator, name) for accumulator in accumulators]).max())


def _claims_no_positions(model: Any, info: ModelInfo) -> bool:
    """Tell whether a bridge that takes position ids is said to make nothing of them."""
    if not is_bridge(model) or any(info.rope_layers) or "pos_embed" in components(model):
        return False
    return "position_ids" in signature(model.original_model.forward).parameters


def position_dependence(model: Any) -> float:
    """Measure how far permuted position ids move a bridge's scores, relative to the largest.

    The all-ones mask is explicit: without one, transformers takes ids out of order for packed
    sequences and masks between them.
    """
    device = next(model.parameters()).device
    tokens = probe_tokens(model.cfg.d_vocab).to(device)
    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0)).to(device)
    in_order, permuted = (
        _scores_at(model, tokens, ids[None].expand_as(tokens)) for ids in (order.sort()[0], order)
    )
    moved = [distance(*pair) for pair in zip(permuted, in_order, strict=True)]
    return float(torch.tensor(moved).max())


def _scores_at(
    model: Any, tokens: Int[Tensor, "seq pos"], position_ids: Int[Tensor, "seq pos"]
) -> list[Float[Tensor, "seq head cell"]]:
    """Give each layer's scores, the cells that are not masked, for tokens at given positions."""
    seen: list[Tensor] = []

    def keep(tensor: Tensor, hook: object) -> None:
        seen.append(tensor[..., unmasked(tensor[0, 0])].float())

    points = [(layer.point("attn.hook_attn_scores"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(points):
        model(tokens, position_ids=position_ids, attention_mask=torch.ones_like(tokens))
    return seen


def distance(seen: Tensor, truth: Tensor) -> float:
    """Give the largest difference relative to the largest value (NaN if there is no value)."""
    if truth.numel() == 0:
        return float("nan")
    return float((seen - truth).abs().max() / truth.abs().max().clamp_min(1e-30))


class _ScoreChecker:
    """Checks one block's scores against its q, k and pattern in one pass."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.reader = layer, QKReader(layer)
        self.pattern = self.scores = self.keys = float("nan")
        self.seen: Tensor | None = None
        self.given: Tensor | None = None
        self.trouble = ""

    def hooks(self) -> list[Installation]:
        point = self.layer.point
        return [
            *self.reader.hooks(),
            (point("attn.hook_attn_scores"), self.see_scores),
            (point("attn.hook_pattern"), self.see_pattern),
        ]

    def see_scores(self, tensor: Tensor, hook: object) -> None:
        self.seen = tensor
        try:
            self.compare_scores(tensor)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a norm or rotation that Layer does not know: NaN stays
            self.trouble = " ".join(str(error).split())[:150]

    def compare_scores(self, tensor: Float[Tensor, "batch head query_pos key_pos"]) -> None:
        """Rebuild keys and scores from what the hooks before them showed."""
        visible = unmasked(tensor[0, 0])
        q, k = self.reader.read("q"), self.reader.read("k")
        rebuilt = self.reader.finish(self.reader.unrotated("k"))
        self.keys = distance(rebuilt.float(), k.float())
        product = self.layer.scores(q, repeat_heads(k, self.layer.n_heads))
        self.scores = distance(product[..., visible].float(), tensor[..., visible].float())

    def see_pattern(self, tensor: Tensor, hook: object) -> None:
        self.given = tensor

    def compare_pattern(self) -> None:
        """Compare after the pass: some models fire the pattern's hook before the scores'."""
        if self.seen is None or self.given is None:
            return
        if getattr(getattr(self.layer.attn, "original_component", None), "sinks", None) is not None:
            self.pattern = 0.0  # a sink column takes its share of each row outside the scores
            return
        self.pattern = distance(self.seen.float().softmax(-1), self.given.float())
