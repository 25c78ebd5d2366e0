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
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.base_layer import Vectors
from nope_probe.hooks.layers.hook_points import HookedModel, HookPoint, PlacedHook, first, last
from nope_probe.hooks.layers.model import block_point
from nope_probe.hooks.layers.writers import Outlet, blocks_that_write, outlets_of
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.folds import TensorRecord, halves_of
from nope_probe.removal import Writer

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanOutput(TensorRecord):
    """A component's mean output at each position, over the texts of each half.

    Outputs of massive norm stay out of the mean: a delimiter that a block marks as it marks the
    first token is one text in a hundred and a thousand times as large.

    Attributes:
        mean: over the outputs that count; 0 where none does.
        counts: how many outputs count at each position.
        limits: the largest norm of an output that counts, at each position.
        factor: multiplies an output before it is added to the residual stream.
    """

    mean: Float[Tensor, "half pos d_model"]
    counts: Float[Tensor, "half pos"]
    limits: Float[Tensor, " pos"]
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenPositions(TensorRecord):
    """The position that components write, and the texts that show it.

    Attributes:
        outputs: the mean outputs, by the name of the component.
        texts: the `fingerprints` of the texts.
        halves: the half of each text, 0 or 1; see `maps.folds.halves_of`.
        kept_positions: how many first positions keep the outputs.
        of_tokens: whether the texts are tokens, to whose embeddings a model may add positions.
        order: of the null, the positions of each text in the order in which they are averaged.
    """

    outputs: dict[str, MeanOutput]
    texts: Int[Tensor, " text"]
    halves: Int[Tensor, " text"]
    kept_positions: int
    of_tokens: bool = True
    order: Int[Tensor, "text pos"] | None = None

    @property
    def n_left_out(self) -> int:
        """How many outputs stay out of the means because of their norm."""
        n, n_pos = len(self.texts), next(iter(self.outputs.values())).counts.shape[1]
        return sum(n * n_pos - int(of.counts.sum()) for of in self.outputs.values())

    def size(self, name: str) -> float:
        """Return the norm of the position that a component writes, over all positions."""
        of_all = self.outputs[name].mean[:1]  # a single text, which is none of the texts
        return float(self.written(name, of_all, torch.tensor([-1])).norm())

    def seen(self, output: Vectors, text: Int[Tensor, " batch"]) -> Vectors:
        """Return the texts' outputs at the positions at which they enter the means."""
        if self.order is None:
            return output
        order = self.order.to(output.device)[text.clamp(min=0)]
        return output.gather(1, order[..., None].expand_as(output))

    def written(
        self, name: str, output: Vectors, text: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the position that a component writes into each text.

        The mean is over the other texts of the text's half; over all texts if the text is new.

        Args:
            name: of the component.
            output: its output.
            text: the numbers of the texts; a negative number belongs to none.
        """
        of, kept = self.outputs[name], self.kept_positions
        seen, halves = self.seen(output.float(), text), self.halves.to(text)
        own = (seen.norm(dim=-1) <= of.limits.to(seen)) & (text >= 0)[:, None]
        is_used = (halves[text, None] == torch.arange(2).to(text)) | (text < 0)[:, None]
        counts = is_used.to(seen) @ of.counts.to(seen)
        sums = (of.mean * of.counts[..., None]).to(seen)
        total = torch.einsum("th,hpd->tpd", is_used.to(seen), sums)
        total -= seen.masked_fill(~own[..., None], 0.0)
        mean = total / (counts - own.to(seen)).clamp(min=1)[..., None]
        written = mean - mean[:, kept:].mean(1, keepdim=True)
        written[:, :kept] = 0
        return written


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
    blocks = blocks_that_write(model, heads)
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
        is_same = fingerprints(tensor)[:, None] == self.known.to(tensor.device)
        self.numbers = torch.where(is_same.any(1), is_same.int().argmax(1), -1)


def fingerprints(residual: Float[Tensor, "batch pos d_model"]) -> Int[Tensor, " batch"]:
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


class ActiveAblation(NamedTuple):
    """An ablation that is in effect, and the positions that it removes, if any."""

    ablation: Ablation
    positions: WrittenPositions | None


ABLATED: WeakKeyDictionary[HookedModel, ActiveAblation] = WeakKeyDictionary()


def estimated_on_halves(model: HookedModel, fold_of: Int[Tensor, " seq"]) -> bool:
    """Return whether a model loses what was estimated on the texts of each half of these folds.

    Fewer than 4 folds have no products across halves.

    Raises:
        UserError: where the texts were cut into other halves.
    """
    positions = ABLATED[model].positions if model in ABLATED else None
    if positions is None or fold_of.max() < 3 or len(positions.halves) != len(fold_of):
        return False
    if not positions.halves.equal(halves_of(fold_of)):
        raise UserError(
            "removed position was measured on other halves of the texts than those of the folds: "
            "pass Sequences with the capture's documents, and an even number of folds"
        )
    return True
