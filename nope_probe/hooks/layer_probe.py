"""Read what every block does to one short batch, each block on its own input of the intact pass.

A change in one block would reach the later ones through the residual stream. Writing the intact
residual stream into every block keeps them apart, so that one pass changes all blocks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.hooks.attention import repeat_heads, unmasked
from nope_probe.hooks.base_layer import Layer
from nope_probe.hooks.block_ablation import mean_over_positions
from nope_probe.hooks.forward import StopForward, hooks_attached, run_forward
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs, position_point
from nope_probe.hooks.protocols import Attachment, Hook, HookedModel, HookPoint
from nope_probe.hooks.qk_reader import QKReader
from nope_probe.hooks.rope_bands import RemovedPairs, Rotary


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
