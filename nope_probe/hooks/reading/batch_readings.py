"""What blocks and heads do to one short batch: scores, queries, keys, attention to chosen keys.

A change in one block would reach the later ones through the residual stream. Writing the intact
residual stream into every block keeps them apart, so that one pass changes all blocks at once.
Attention to a chosen key per query is read without a map of n x n weights per head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attached_hooks import hooks_attached
from nope_probe.hooks.layers.attention import RemovedPairs, Rotary, repeat_heads, unmasked
from nope_probe.hooks.layers.base_layer import Heads, Keys, Layer, Visible
from nope_probe.hooks.layers.model import (
    Inputs,
    StopForward,
    layers_of,
    position_point,
    run_forward,
)
from nope_probe.hooks.layers.protocols import Attachment, Hook, HookedModel, HookPoint
from nope_probe.hooks.layers.qk_reader import QKReader
from nope_probe.hooks.reading.fused import FusedAttention, can_fuse, fused
from nope_probe.hooks.removing.block_ablation import mean_over_positions


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """What one block did to a batch.

    Attributes:
        residual: what entered the block.
        scores: as softmax takes them, nats; masked cells are very negative.
        products: q.k of every query and key, without scale and soft cap.
        q, k: queries, and keys repeated for each query head, as they are multiplied.
        rotation: the matrix that the block applies to a query at each position.
        rotary: what its RoPE is set to; None if it did not run.
    """

    residual: Float[Tensor, "batch pos d_model"]
    scores: Float[Tensor, "batch head query_pos key_pos"]
    products: Float[Tensor, "batch head query_pos key_pos"]
    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos head d_head"]
    rotation: Float[Tensor, "pos d_head d_head"]
    rotary: Rotary | None

    @property
    def visible(self) -> Bool[Tensor, "head query_pos key_pos"]:
        """Which cells of the first sequence are not masked."""
        return unmasked(self.scores[0])


def read_layers(
    model: HookedModel,
    inputs: Inputs,
    changes: Iterable[Attachment] = (),
    residuals: Sequence[Tensor] = (),
) -> list[LayerReading]:
    """Run a batch and return the reading of every block.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: tokens, or vectors.
        changes: hooks that change something.
        residuals: what to write into each block, from an intact reading; nothing by default.
    """
    readers = [_Reader(layer) for layer in layers_of(model)]
    writers = [
        (reader.layer.point("hook_resid_pre"), partial(_write, residual))
        for reader, residual in zip(readers, residuals, strict=False)
    ]
    hooks = [pair for reader in readers for pair in reader.hooks()]
    with torch.inference_mode(), hooks_attached([*writers, *changes, *hooks]):
        run_forward(model, inputs)
    return [reader.reading() for reader in readers]


def visible_cells(
    model: HookedModel, inputs: Inputs
) -> list[Bool[Tensor, "head query_pos key_pos"]]:
    """Return for each block which cells the mask leaves visible; nothing else is kept."""
    found: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        found.append(unmasked(tensor[0]).cpu())

    hooks = [(layer.point("attn.hook_attn_scores"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(hooks):
        run_forward(model, inputs)
    return found


def read_rotations(
    model: HookedModel, inputs: Inputs, n_layers: int
) -> list[Float[Tensor, "two d_head d_head"]]:
    """Return the matrix that each of the first blocks applies to a query at positions 0 and 1.

    Nothing else is kept of a block when the next one runs. All positions are run, since the angles
    of some models depend on how many there are.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: tokens, or vectors.
        n_layers: how many blocks are read.
    """
    found: list[Tensor] = []
    readers = [QKReader(layer) for layer in layers_of(model)[:n_layers]]

    def keeping(reader: QKReader) -> Hook:
        def keep(scores: Tensor, hook: HookPoint) -> None:
            found.append(reader.rotation(reader.read("q"))[:2].cpu().clone())
            reader.reset()
            if len(found) == len(readers):
                raise StopForward

        return keep

    hooks = [pair for reader in readers for pair in reader.hooks()]
    hooks += [(each.layer.point("attn.hook_attn_scores"), keeping(each)) for each in readers]
    with torch.inference_mode(), hooks_attached(hooks):
        run_forward(model, inputs)
    return found


def hooks_without_rope(model: HookedModel, intact: Sequence[LayerReading]) -> Iterator[Attachment]:
    """Return the hooks that leave q and k unrotated, in every block that rotates them.

    Args:
        model: the model.
        intact: the reading of every block.
    """
    for layer, reading in zip(layers_of(model), intact, strict=True):
        if reading.rotary is not None:
            pairs = RemovedPairs(bands=("rope",), rotary=reading.rotary)
            for placed in layer.hooks_without_rope(pairs):
                yield placed.point, placed.hook


def hooks_scaling(model: HookedModel, name: str, factor: float) -> Iterator[Attachment]:
    """Return the hooks that multiply a tensor of attention, such as `hook_q`, in every block."""

    def scale(tensor: Tensor, hook: HookPoint) -> Tensor:
        return factor * tensor

    for layer in layers_of(model):
        yield layer.point(f"attn.{name}"), scale


def hooks_without_learned_positions(model: HookedModel) -> Iterator[Attachment]:
    """Return the hook that replaces learned position embeddings by their mean; none without."""
    point = position_point(model)
    if point is not None:
        yield point, mean_over_positions


def _write(residual: Tensor, tensor: Tensor, hook: HookPoint) -> Tensor:
    return residual


class _Reader:
    """Reads one block in one pass."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.reader = layer, QKReader(layer)
        self.read: dict[str, Tensor] = {}
        self.rotary: Rotary | None = None

    def hooks(self) -> Iterator[Attachment]:
        yield self.layer.point("hook_resid_pre"), self.keep_residual
        yield from self.reader.hooks()
        yield self.layer.point("attn.hook_attn_scores"), self.keep_scores

    def keep_residual(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read["residual"] = tensor.clone()

    def keep_scores(self, scores: Tensor, hook: HookPoint) -> None:
        q = self.reader.read("q")
        k = repeat_heads(self.reader.read("k"), q.shape[2])
        self.rotary = self.layer.rotary(self.reader.fired)
        self.read |= {
            "scores": scores.cpu(),
            "products": torch.einsum("bqhd,bkhd->bhqk", q, k).cpu(),
            "q": q.cpu(),
            "k": k.cpu(),
            "rotation": self.reader.rotation(q).cpu(),
        }
        self.reader.reset()

    def reading(self) -> LayerReading:
        return LayerReading(**self.read, rotary=self.rotary)


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
