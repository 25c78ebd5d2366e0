"""Written position, taken out of a model that stays causal.

Without position encoding a causal model still knows where a token stands, because its blocks write
positions into the residual stream. What a component adds at a position, on average over texts, less
the mean of that over positions, is its written position. The removal subtracts it from the outputs
of all blocks' attention and MLP, or of the components that are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.base_layer import Vectors
from nope_probe.hooks.layers.hook_points import (
    HookedModel,
    HookPoint,
    PlacedHook,
    first,
    last,
)
from nope_probe.hooks.layers.model import block_point
from nope_probe.hooks.layers.writers import Outlet, blocks_that_write, outlets_of
from nope_probe.hooks.removing.components import Removal
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Calibration, WrittenPositions
from nope_probe.removal import Writer

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Written(Removal):
    """The position that blocks write is taken out of what each of them adds."""

    kind = "written"

    @classmethod
    def hooks_outside(
        cls, model: HookedModel, ablation: Ablation, calibration: Calibration | None
    ) -> Iterator[PlacedHook]:
        assert calibration is not None
        positions = calibration.positions_for(ablation.condition)
        assert positions is not None
        writers = ablation.condition.writers or map(Writer, positions.outputs)
        yield from without_position(model, writers, positions)


class Position(Written):
    """The position that single writers write is taken out of what they add."""

    kind = "position"


def without_position(
    model: HookedModel,
    writers: Iterable[Writer],
    positions: WrittenPositions,
    reader: int | None = None,
) -> Iterator[PlacedHook]:
    """Yield the hooks that take the position of some writers out of the residual stream.

    Args:
        model: a HookedTransformer or TransformerBridge.
        writers: the components.
        positions: what they write.
        reader: the only block whose input loses the position; by default the components' outputs
            lose it, and so do all later blocks.
    """
    writers, texts = [*writers], Texts(positions.texts)
    heads = [writer for writer in writers if writer.head is not None]
    blocks = {block.index: block for block in blocks_that_write(model, heads)}
    outlets = outlets_of(model, writers, blocks, of_tokens=positions.of_tokens)
    entry = block_point(model, 0, "hook_resid_pre")
    yield first(entry, texts.recognise)
    yield from positions_taken(outlets, positions, texts, reader)


def positions_taken(
    outlets: Iterable[Outlet], positions: WrittenPositions, texts: Texts, reader: int | None = None
) -> Iterator[PlacedHook]:
    """Yield the hooks that take positions out of what outlets carry, or out of a block's input."""
    for outlet in outlets:
        taken = _Taken(outlet, positions, texts)
        for name, point in outlet.points_before().items():
            yield last(point, partial(taken.keep, name))
        yield first(outlet.point, taken.subtract if reader is None else taken.keep_written)
        if reader is not None:
            yield first(block_point(outlet.model, reader, "hook_resid_pre"), taken.subtract_kept)


@dataclass(eq=False)
class _Taken:
    """Takes positions out of what an outlet carries, given the tensors of a pass before it."""

    outlet: Outlet
    positions: WrittenPositions
    texts: Texts
    kept: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, name: str, tensor: Tensor, hook: HookPoint) -> None:
        self.kept[name] = tensor

    def subtract(self, tensor: Vectors, hook: HookPoint) -> Vectors:
        written = self._written(tensor).to(tensor.dtype)
        self.kept.clear()
        return tensor - written

    def keep_written(self, tensor: Vectors, hook: HookPoint) -> None:
        factor = self.positions.outputs[self.outlet.writers[0]].factor
        self.kept = {"written": factor * self._written(tensor)}

    def subtract_kept(self, tensor: Vectors, hook: HookPoint) -> Vectors:
        return tensor - self.kept.pop("written").to(tensor.dtype)

    def _written(self, tensor: Vectors) -> Vectors:
        """Return what the outlet's writers write into the texts of this thread's pass."""
        positions, writers = self.positions, self.outlet.writers
        n = len(positions.outputs[writers[0]].limits)
        if tensor.shape[1] != n:
            raise UserError(
                f"sequences of {tensor.shape[1]} tokens, but the position that {writers[0]} writes "
                f"was measured on sequences of {n}: measure it on texts of that length"
            )
        outputs = {writer: self.outlet.output(writer, tensor, self.kept) for writer in writers}
        return sum(  # type: ignore[return-value]  # an outlet has a writer
            positions.written(writer, output, self.texts.numbers)
            for writer, output in outputs.items()
        )


class Texts:
    """The numbers of the texts of a pass among those that means are of.

    Attributes:
        known: the `fingerprints` of these texts.
        numbers: the number of each text of the pass; negative where a text is new.
    """

    def __init__(self, known: Int[Tensor, " text"]) -> None:
        self.known = known
        self.numbers = known[:0]

    def recognise(self, tensor: Vectors, hook: HookPoint) -> None:
        """Find the texts of a pass by the residual stream before the first block."""
        known = self.known.to(tensor.device)
        is_same = fingerprints(tensor)[:, None] == known
        found = is_same.int().argmax(1) if len(known) else known.new_zeros(len(tensor))
        self.numbers = torch.where(is_same.any(1), found, -1)


def fingerprints(
    residual: Float[Tensor, "batch pos d_model"],
) -> Int[Tensor, " batch"]:
    """Return a number for each text, which its residual stream before the first block decides.

    Example:
        >>> x = torch.arange(12.0).view(2, 3, 2)
        >>> bool((fingerprints(x)[0] == fingerprints(x[:1])[0]) & (fingerprints(x.flip(1))[0] != 0))
        True
    """
    bits = residual.detach().contiguous().view(_BITS[residual.element_size()]).flatten(1)
    weights = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    return (bits.long() * (2 * weights + 1)).sum(1)


def null_order(n_texts: int, n: int, kept: int, seed: int) -> Int[Tensor, "text pos"]:
    """Return for each text its positions in a random order, the kept first ones in place."""
    draws = torch.rand(n_texts, n, generator=torch.Generator().manual_seed(seed))
    draws[:, :kept] = torch.arange(kept) - float(kept)
    return draws.argsort(1)
