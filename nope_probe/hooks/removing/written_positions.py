"""The removal of the position that a component writes into the residual stream.

A component's mean output differs between positions. The removal replaces this mean by its mean over
positions. The rest of the output says as much about content as before, and nothing about position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.layers.attached_hooks import HookGroup, first
from nope_probe.hooks.layers.base_layer import Vectors
from nope_probe.hooks.layers.model import block_point, blocks_of
from nope_probe.hooks.layers.protocols import HookedModel, HookPoint
from nope_probe.maps.folds import State

_POINTS = {
    "L": "hook_attn_out",
    "ATTN": "hook_attn_out",
    "MLP": "hook_mlp_out",
    "BLOCK": "hook_resid_post",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenPosition:
    """A component's mean output at each position, less its mean over the kept positions.

    Attributes:
        vectors: in the residual stream; 0 at positions that are not kept.
        factor: multiplies the component's output before it is added.
    """

    vectors: Float[Tensor, "pos d_model"]
    factor: float = 1.0

    def to_tensors(self, prefix: str = "") -> State:
        """Return the tensors for `from_tensors`; the prefix begins their names."""
        factor = torch.tensor(self.factor, dtype=torch.float64)
        return {f"{prefix}vectors": self.vectors, f"{prefix}factor": factor}

    @classmethod
    def from_tensors(cls, tensors: State, prefix: str = "") -> WrittenPosition:
        """Return the position that `to_tensors` turned into these tensors."""
        factor = float(tensors[f"{prefix}factor"])
        return cls(vectors=tensors[f"{prefix}vectors"], factor=factor)


def block_of_writer(writer: str) -> int:
    """Return the number of the block that a writer belongs to; of embeddings, the first.

    Example:
        >>> block_of_writer("L2H11"), block_of_writer("MLP3"), block_of_writer("pos_embed")
        (2, 3, 0)
    """
    named = re.match(r"[A-Z]+(\d+)", writer)
    return 0 if named is None else int(named[1])


def in_order(writers: Iterable[str]) -> list[str]:
    """Return writers in the order in which a model runs them.

    Example:
        >>> in_order(["L1H0", "MLP0", "L0H10", "pos_embed"])
        ['pos_embed', 'L0H10', 'MLP0', 'L1H0']
    """
    return sorted(writers, key=_place)


def before(writer: str, writers: Iterable[str]) -> list[str]:
    """Return the writers that run before a writer, in order; heads of a layer run side by side.

    Example:
        >>> before("L1H1", ["MLP1", "L1H0", "MLP0", "embed"])
        ['embed', 'MLP0']
    """
    return [name for name in in_order(writers) if _place(name) < _place(writer)]


def _place(writer: str) -> tuple[int, bool, bool]:
    """Return the place of a writer in a forward pass, which heads of a layer share."""
    return block_of_writer(writer), writer.startswith("MLP"), writer[0] in "LA"


def without_position(
    model: HookedModel, writer: str, written: WrittenPosition, reader: int | None = None
) -> HookGroup:
    """Return the hook that takes a component's position out of the residual stream.

    Args:
        model: a HookedTransformer or TransformerBridge.
        writer: the component, such as `L1H0`.
        written: the position to remove.
        reader: the only block whose input loses the position; by default the component's output
            loses it, and so do all later blocks.
    """
    kind = re.sub(r"\d.*", "", writer)
    name = "hook_resid_pre" if reader is not None else _POINTS.get(kind, "hook_resid_pre")
    number, n = block_of_writer(writer) if reader is None else reader, len(written.vectors)
    vectors = written.vectors / (1.0 if reader is not None else written.factor)

    def subtract(tensor: Vectors, hook: HookPoint) -> Vectors:
        if tensor.shape[1] != n:
            raise ValueError(
                f"sequences of {tensor.shape[1]} tokens, but the position of {writer} was "
                f"calibrated on sequences of {n}: pass calibrate(model, tokens) of that length"
            )
        return tensor - vectors.to(tensor)

    block, point = blocks_of(model)[number], block_point(model, number, name)
    return HookGroup(block, [first(point, subtract)])
