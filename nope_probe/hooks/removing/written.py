"""Written position, taken out of a model that stays causal.

Without position encoding a causal model still knows where a token stands, because its blocks write
positions into the residual stream. What a block's attention or MLP adds at a position, on average
over texts, less the mean of that over positions, is its written position. The removal subtracts it
from every block's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.base_layer import Vectors
from nope_probe.hooks.layers.hook_points import HookedModel, HookGroup, HookPoint, first, last
from nope_probe.hooks.layers.model import block_point, blocks_of
from nope_probe.hooks.removing.components import Removal
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import BlockPositions, Calibration, WrittenPosition
from nope_probe.removal import Writer

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
POINTS = {
    "HEAD": "hook_attn_out",
    "ATTN": "hook_attn_out",
    "MLP": "hook_mlp_out",
    "BLOCK": "hook_resid_post",
}


class Position(Removal):
    """A writer's mean output at each position becomes its mean over positions."""

    kind = "position"

    @classmethod
    def groups(
        cls, model: HookedModel, ablation: Ablation, calibration: Calibration | None
    ) -> Iterator[HookGroup]:
        for writer in ablation.condition.writers:
            assert calibration is not None
            yield from without_position(model, writer, calibration.positions[writer])


def without_position(
    model: HookedModel, writer: Writer, written: WrittenPosition, reader: int | None = None
) -> Iterator[HookGroup]:
    """Yield the hooks that take a component's position out of the residual stream.

    Args:
        model: a HookedTransformer or TransformerBridge.
        writer: the component.
        written: the position to remove.
        reader: the only block whose input loses the position; by default the component's output
            loses it, and so do all later blocks.
    """
    name = "hook_resid_pre" if reader is not None else POINTS.get(writer.kind, "hook_resid_pre")
    number, n = writer.block if reader is None else reader, written.vectors.shape[1]
    factor, texts = 1.0 if reader is not None else written.factor, Texts(written.texts)
    entry, point = (block_point(model, *of) for of in ((0, "hook_resid_pre"), (number, name)))

    def subtract(tensor: Vectors, hook: HookPoint) -> Vectors:
        check_length(tensor, n, f"the position of {writer}")
        if point is entry:
            texts.recognise(tensor, hook)
        return tensor - (written.of_texts(texts.numbers) / factor).to(tensor)

    yield HookGroup(blocks_of(model)[number], [first(point, subtract)])
    if point is not entry:
        yield HookGroup(blocks_of(model)[0], [last(entry, texts.recognise)])


def check_length(tensor: Vectors, n: int, what: str) -> None:
    """Check that sequences are as long as those on which a position was measured.

    Raises:
        UserError: naming both lengths.
    """
    if tensor.shape[1] != n:
        raise UserError(
            f"sequences of {tensor.shape[1]} tokens, but {what} was calibrated on sequences of "
            f"{n}: pass calibrate(model, tokens) of that length"
        )


class WrittenPositions(Removal):
    """The position that blocks write is taken out of what each of them adds."""

    kind = "written"

    @classmethod
    def groups(
        cls, model: HookedModel, ablation: Ablation, calibration: Calibration | None
    ) -> Iterator[HookGroup]:
        for name in ablation.condition:
            if name.kind == cls.kind:
                assert calibration is not None
                positions = calibration.written[name]
                recognised = Texts(positions.texts)
                point = block_point(model, 0, "hook_resid_pre")
                yield HookGroup(blocks_of(model)[0], [last(point, recognised.recognise)])
                yield from without_written(model, positions, positions.outputs, recognised)


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


def without_written(
    model: HookedModel, positions: BlockPositions, names: Iterable[str], texts: Texts
) -> Iterator[HookGroup]:
    """Yield the hooks that take written positions out of the outputs of some components."""
    for name in names:
        writer, before = Writer(name), list[Tensor]()
        point = block_point(model, writer.block, POINTS[writer.kind])
        subtract = partial(_subtract, positions, name, texts, before)
        hooks = [first(point, subtract)]
        if writer.kind == "BLOCK":
            entry = block_point(model, writer.block, "hook_resid_pre")
            hooks.append(last(entry, partial(_keep, before)))
        yield HookGroup(blocks_of(model)[writer.block], hooks)


def _keep(before: list[Tensor], tensor: Vectors, hook: HookPoint) -> None:
    before[:] = [tensor]


def _subtract(
    positions: BlockPositions,
    name: str,
    texts: Texts,
    before: list[Tensor],
    tensor: Vectors,
    hook: HookPoint,
) -> Vectors:
    """Return an output less the written position; of a block that is no sum, of what it adds."""
    check_length(tensor, len(positions.outputs[name].limits), "the written position")
    output = tensor - before.pop() if before else tensor
    return tensor - positions.written(name, output, texts.numbers).to(tensor.dtype)


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
