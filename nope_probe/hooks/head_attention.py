"""Each head's attention to one chosen key per query, without a map of n x n weights per head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.attention import repeat_heads
from nope_probe.hooks.base_layer import Heads, Keys, Layer, Visible
from nope_probe.hooks.forward import StopForward, hooks_attached, run_forward
from nope_probe.hooks.fusable import can_fuse
from nope_probe.hooks.fused import FusedAttention, fused
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs
from nope_probe.hooks.protocols import HookedModel, HookPoint
from nope_probe.hooks.qk_reader import QKReader

ROWS = 128  # queries whose scores are held at once
Weights = Float[Tensor, "batch head query_pos which"]


@dataclass(frozen=True, kw_only=True)
class HeadReading:
    """What the heads of one block did to a batch.

    Attributes:
        weights: each query's attention to the keys that were asked for.
        q: the last query, as it is multiplied.
        k: keys, repeated for each query head, as they are multiplied.
        rotation: the matrix that the block applies to a query at each position.
    """

    weights: Weights
    q: Float[Tensor, "batch head d_head"]
    k: Float[Tensor, "batch pos head d_head"]
    rotation: Float[Tensor, "pos d_head d_head"]


def read_heads(
    model: HookedModel, inputs: Inputs, keys: Int[Tensor, "which query_pos"], n_layers: int
) -> list[HeadReading]:
    """Run a batch through the first blocks, and return the reading of each.

    Attention is the softmax of the scores: a learned sink outside them (as in gpt-oss) is left out.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: tokens, or vectors.
        keys: the keys to which each query's attention is wanted.
        n_layers: how many blocks to read.
    """
    readers = [_HeadReader(layer, keys) for layer in layers_of(model)[:n_layers]]
    with torch.inference_mode(), _reading(model, inputs, readers):
        run_forward(model, inputs)
    return [reading for reader in readers for reading in reader.readings]


def weights_at(
    scores: Float[Tensor, "batch head query_pos key_pos"], keys: Int[Tensor, "which query_pos"]
) -> Weights:
    """Return exp(s - logsumexp(s)) of chosen cells of scores, in float32 or better."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    where = keys.T.to(scores.device).expand(*scores.shape[:3], -1)
    return (scores.gather(-1, where) - scores.logsumexp(-1, keepdim=True)).exp()


@contextmanager
def _reading(model: HookedModel, inputs: Inputs, readers: list[_HeadReader]) -> Iterator[None]:
    """Let readers read forward passes that stop in the last one's block, fused if possible."""
    reads = [pair for each in readers for pair in each.reader.hooks()]
    if can_fuse(model, inputs):
        *before, last = readers
        attentions = [FusedAttention(each.layer, [each.read_product]) for each in before]
        attentions.append(FusedAttention(last.layer, [last.read_product], is_last=True))
        with fused(attentions), hooks_attached(reads):
            yield
        return
    points = [each.layer.point("attn.hook_attn_scores") for each in readers]
    reads += list(zip(points, (each.read_scores for each in readers), strict=True))
    with hooks_attached([*reads, (points[-1], _stop)]):
        yield


class _HeadReader:
    """Reads the heads of one block in one pass."""

    def __init__(self, layer: Layer, keys: Int[Tensor, "which query_pos"]) -> None:
        self.layer, self.keys, self.reader = layer, keys, QKReader(layer)
        self.readings: list[HeadReading] = []

    def read_product(self, q: Heads, k: Keys, visible: Visible) -> None:
        blocks = []
        for rows in torch.arange(q.shape[1]).split(ROWS):
            scores = self.layer.scores(q[:, rows], k).masked_fill(~visible[rows], -torch.inf)
            blocks.append(weights_at(scores, self.keys[:, rows]))
        self._keep(torch.cat(blocks, 2), q, k)

    def read_scores(self, scores: Tensor, hook: HookPoint) -> None:
        weights = [
            weights_at(block, keys)
            for block, keys in zip(scores.split(ROWS, 2), self.keys.split(ROWS, 1), strict=True)
        ]
        self._keep(torch.cat(weights, 2), self.reader.read("q"), self.reader.read("k"))

    def _keep(self, weights: Weights, q: Heads, k: Keys) -> None:
        reading = HeadReading(
            weights=weights.cpu(),
            q=q[:, -1].cpu(),
            k=repeat_heads(k, self.layer.n_heads).cpu(),
            rotation=self.reader.rotation(q).cpu(),
        )
        self.readings.append(reading)
        self.reader.reset()


def _stop(tensor: Tensor, hook: HookPoint) -> None:
    raise StopForward
