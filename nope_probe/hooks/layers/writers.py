"""The output of every component to the residual stream before a block.

The residual stream before a block is a sum of embeddings, the outputs of earlier heads through W_O
and the outputs of earlier MLPs. A short pass shows how every block writes. In later passes,
`Residual` keeps the outputs for the length of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import (
    Attention,
    HeadVectors,
    relative_error,
    repeat_heads,
    score_tolerance,
    upcast,
)
from nope_probe.hooks.layers.base_layer import Layer, Vectors, find_point
from nope_probe.hooks.layers.hook_points import (
    Attachment,
    HookedModel,
    HookPoint,
    hooks_detached,
)
from nope_probe.hooks.layers.linear_maps import (
    NormMap,
    norm_between,
)
from nope_probe.hooks.layers.model import (
    Inputs,
    block_point,
    blocks_of,
    layers_of,
    position_point,
    tapped,
)
from nope_probe.hooks.layers.passes import tensors_at
from nope_probe.removal import Writer

BLOCK_ROWS = 128  # queries whose attention to the first key is computed at once


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockWriting:
    """The way in which one block adds to the residual stream.

    Attributes:
        index: the block's number.
        layer: the block, if its heads or its attention are writers; None if the whole block is one
            writer, because it does not attend or is no sum of attention and MLP.
        factor: multiplies the outputs of attention and MLP before they are added.
        post_norm: the norm after W_O.
        w_o: W_O of single heads; None where attention is one writer.
        b_o: the bias of W_O.
    """

    index: int
    layer: Layer | None = None
    factor: float = 1.0
    post_norm: NormMap = field(default_factory=NormMap)
    w_o: Float[Tensor, "head d_value d_model"] | None = None
    b_o: Float[Tensor, " d_model"] | None = None
    has_mlp: bool = True

    def scales(self, z: HeadVectors, attn: Vectors) -> Float[Tensor, "batch pos"]:
        """Return every token's scale in the norm after W_O, given input and output."""
        if self.post_norm.weight is None:
            return attn.new_ones(attn.shape[:2])
        assert self.w_o is not None
        assert self.b_o is not None
        return self.post_norm.scales(torch.einsum("bphd,hdm->bpm", z, self.w_o) + self.b_o, attn)

    def head_output(self, head: int, z: Tensor, attn: Vectors) -> Vectors:
        """Return what a head adds to the output of attention, given W_O's input."""
        assert self.layer is not None
        assert self.w_o is not None
        z, attn = self.layer.by_head(upcast(z)), upcast(attn)
        scaled = z[:, :, head] * self.scales(z, attn)[..., None]
        return self.post_norm.linear(scaled @ self.w_o[head].to(scaled))

    @property
    def names(self) -> list[Writer]:
        """The block's writers."""
        if self.layer is None:
            return [Writer(f"BLOCK{self.index}")]
        n_heads = 0 if self.w_o is None else len(self.w_o)
        heads = [f"L{self.index}H{head}" for head in range(n_heads)] or [f"ATTN{self.index}"]
        return [*map(Writer, [*heads, f"MLP{self.index}"] if self.has_mlp else heads)]


POINTS = {  # that carry the outputs of writers, in the order in which they fire
    "embed": "hook_resid_pre",
    "pos_embed": "hook_resid_pre",
    "HEAD": "hook_attn_out",
    "ATTN": "hook_attn_out",
    "MLP": "hook_mlp_out",
    "BLOCK": "hook_resid_post",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Outlet:
    """The hook point that carries the outputs of some writers of a block.

    Attributes:
        model: the model.
        writers: the writers.
        block: the way in which the block writes; needed for heads.
        positions: the hook point of learned position embeddings in the residual stream, if any.
    """

    model: HookedModel
    writers: Sequence[Writer]
    block: BlockWriting | None = None
    positions: HookPoint | None = None

    @property
    def index(self) -> int:
        """The number of the block."""
        return self.writers[0].block

    @property
    def point(self) -> HookPoint:
        """The hook point."""
        return block_point(self.model, self.index, POINTS[self.writers[0].kind])

    def points_before(self) -> dict[str, HookPoint]:
        """Return the earlier hook points whose tensors `output` needs, by the tensors' names."""
        kind = self.writers[0].kind
        if POINTS[kind] == "hook_resid_pre":
            return {} if self.positions is None else {"pos": self.positions}
        names = {"HEAD": {"z": "attn.hook_z"}, "BLOCK": {"x": "hook_resid_pre"}}.get(kind, {})
        return {key: block_point(self.model, self.index, name) for key, name in names.items()}

    def output(self, writer: Writer, tensor: Vectors, kept: Mapping[str, Tensor]) -> Vectors:
        """Return a writer's output, before the block's factor.

        Args:
            writer: one of the writers.
            tensor: that of the hook point.
            kept: the tensors of the points before, by name.
        """
        if writer.head is not None:
            assert self.block is not None
            return self.block.head_output(writer.head, kept["z"], tensor)
        if writer.kind == "BLOCK":
            return tensor - kept["x"]
        if writer == "pos_embed":
            return kept["pos"].expand_as(tensor)
        return tensor - kept["pos"] if "pos" in kept else tensor


def outlets_of(
    model: HookedModel,
    writers: Iterable[Writer],
    blocks: Mapping[int, BlockWriting],
    *,
    of_tokens: bool,
) -> list[Outlet]:
    """Return the outlets of writers, in the order in which a model runs them.

    Args:
        model: a HookedTransformer or TransformerBridge.
        writers: the writers.
        blocks: by their numbers, those of heads.
        of_tokens: whether tokens are run; vectors have no position embeddings.
    """
    points = [*dict.fromkeys(POINTS.values())]
    by_place: dict[tuple[int, int], list[Writer]] = {}
    for writer in writers:
        place = writer.block, points.index(POINTS[writer.kind])
        by_place.setdefault(place, []).append(writer)
    positions = position_point(model) if of_tokens else None
    outlet = partial(Outlet, model=model, positions=positions)
    return [outlet(writers=by_place[at], block=blocks.get(at[0])) for at in sorted(by_place)]


def written_by_blocks(model: HookedModel, inputs: Inputs, n_blocks: int) -> list[BlockWriting]:
    """Return the writing of the first blocks to the residual stream, from a short pass."""
    attending = {layer.index: layer for layer in layers_of(model)}
    names = ("attn.hook_z", "attn.o.hook_out", "hook_attn_out", "hook_mlp_out")
    points = {
        (index, name): point
        for index, block in enumerate(blocks_of(model)[: n_blocks + 1])
        for name in ("hook_resid_pre", *names, "hook_resid_post")
        if (point := find_point(block, name)) is not None
    }
    with tapped(model):
        kept = tensors_at(model, inputs, points)
    return [_written_by_block(index, attending.get(index), kept) for index in range(n_blocks)]


def _written_by_block(
    index: int, layer: Layer | None, kept: Mapping[tuple[int, str], Tensor]
) -> BlockWriting:
    after = kept.get((index + 1, "hook_resid_pre"), kept.get((index, "hook_resid_post")))
    assert after is not None
    tolerance, kept = score_tolerance(after.dtype), {key: upcast(x) for key, x in kept.items()}
    added = upcast(after) - kept[index, "hook_resid_pre"]
    # Half precision rounds a stream that is far above what is added to it.
    rounded = torch.finfo(after.dtype).eps * upcast(after).abs()
    attn, mlp = (kept.get((index, name)) for name in ("hook_attn_out", "hook_mlp_out"))
    if layer is None or attn is None or (mlp is None and not layer.attention_only):
        return BlockWriting(index=index)
    factor = scalar_between(attn if mlp is None else attn + mlp, added, tolerance, rounded)
    if factor is None:
        return BlockWriting(index=index)
    writing = BlockWriting(index=index, layer=layer, factor=factor, has_mlp=mlp is not None)
    z, behind = kept.get((index, "attn.hook_z")), kept.get((index, "attn.o.hook_out"), attn)
    gain = scalar_between(behind, attn, tolerance)  # in Granite's attention, the block's factor
    post_norm = norm_between(layer.block, behind, attn, tolerance) if gain is None else NormMap()
    if z is None or post_norm is None or layer.why_not_replaced("w_o"):
        return writing
    w_o, behind = upcast(layer.weight_per_head("w_o")) * (gain or 1.0), behind * (gain or 1.0)
    rest = behind - torch.einsum("bphd,hdm->bpm", layer.by_head(z), w_o)
    b_o = rest.mean((0, 1))
    if relative_error(rest - b_o + behind, behind) > tolerance:
        return writing
    return replace(writing, w_o=w_o, b_o=b_o, post_norm=post_norm)


def norm_before(model: HookedModel, layer: Layer, inputs: Inputs) -> NormMap:
    """Return the norm between the residual stream and a block's queries and keys.

    Raises:
        NotImplementedError: if there is more than a norm between them.
    """
    points = {"x": layer.point("hook_resid_pre"), "y": layer.point(layer.norm_point("ln1"))}
    with torch.inference_mode(), hooks_detached(model), tapped(model):
        kept = tensors_at(model, inputs, points)
        tolerance, x = score_tolerance(kept["x"].dtype), upcast(kept["x"])
        norm = norm_between(layer.block, x, layer.norm_output("ln1", kept["y"]).to(x), tolerance)
    if norm is None:
        raise NotImplementedError(
            f"between the residual stream and the attention of L{layer.index} is more than a norm"
        )
    return norm


def learned_positions(model: HookedModel, inputs: Inputs) -> HookPoint | None:
    """Return the hook point of position embeddings in the residual stream, or None.

    There are none for input vectors.
    """
    return None if inputs.is_floating_point() else position_point(model)


def scalar_between(
    x: Vectors, y: Vectors, tolerance: float, rounded: Vectors | float = 0.0
) -> float | None:
    """Return the number c with y = c x, exactly 1 within rounding; None without such a number.

    Args:
        x: vectors.
        y: vectors.
        tolerance: the relative error up to which y and c x count as equal.
        rounded: a further rounding error that each number of y may have.
    """
    factor = float((x * y).sum() / x.square().sum().clamp_min(1e-30))
    difference = (factor * x - y).abs() - rounded
    if not relative_error(y + difference.clamp_min(0), y) <= tolerance:
        return None
    return 1.0 if abs(factor - 1) < tolerance / 10 else factor


def blocks_that_write(
    model: HookedModel, writers: Sequence[str], inputs: Inputs | None = None
) -> dict[int, BlockWriting]:
    """Return the blocks of some writers, by their numbers.

    Args:
        model: a HookedTransformer or TransformerBridge.
        writers: names such as `L1H0`, `MLP1` or `embed`.
        inputs: a sequence on which blocks are run; by default arbitrary tokens.

    Raises:
        UserError: for a writer that the model does not have; the message lists its writers.
    """
    if not writers:
        return {}
    if inputs is None:
        inputs = torch.arange(1, 17)[None, : model.cfg.n_ctx].remainder(model.cfg.d_vocab)
    by_head = written_by_blocks(model, inputs, len(blocks_of(model)))
    by_layer = [replace(block, w_o=None) for block in by_head]
    known = [Writer("embed")]
    if learned_positions(model, inputs) is not None:
        known.append(Writer("pos_embed"))
    known += dict.fromkeys(name for block in (*by_head, *by_layer) for name in block.names)
    unknown = [writer for writer in writers if writer not in known]
    if unknown:
        kinds: dict[str, list[Writer]] = {}
        for name in known:
            kinds.setdefault(name.kind, []).append(name)
        has = [f"{same[0]} to {same[-1]}" if len(same) > 1 else same[0] for same in kinds.values()]
        raise UserError(
            f"{unknown[0]} writes nothing in this model; the components that do are "
            f"{', '.join(has)}"
        )
    return {number: by_head[number] for number in (Writer(name).block for name in writers)}


@dataclass(eq=False)
class Residual:
    """Keeps the inputs of blocks and the outputs of their attention for the length of a pass.

    Attributes:
        model: the model.
        blocks: the writing of the blocks before the last reader.
        positions: the hook point of learned position embeddings; None without them.
        moved_to: the position whose z is split by the tokens that heads moved it from; None for the
            first key's share of z at every position.
        kept: the tensors of the last pass, by block and name.
        moved: by block, the shares of z that heads moved in the last pass.
    """

    model: HookedModel
    blocks: Sequence[BlockWriting]
    positions: HookPoint | None
    moved_to: int | None = None
    kept: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    moved: dict[int, Tensor] = field(default_factory=dict)

    def hooks(self) -> Iterator[Attachment]:
        """Return the hooks that keep the blocks' outputs."""
        for index in range(min(len(self.blocks) + 1, len(blocks_of(self.model)))):
            point = block_point(self.model, index, "hook_resid_pre")
            yield point, partial(self.keep, (index, "x"))
        for writing in self.blocks:
            layer = writing.layer
            if layer is not None:
                yield layer.point("hook_attn_out"), partial(self.keep, (writing.index, "attn"))
            if layer is not None and writing.w_o is not None:
                yield layer.point("attn.hook_z"), partial(self.keep, (writing.index, "z"))
        if self.positions is not None:
            yield self.positions, partial(self.keep, (0, "pos"))

    def keep(self, key: tuple[int, str], tensor: Tensor, hook: HookPoint) -> None:
        """Keep a tensor of this pass; sums of its parts are not rounded to half precision."""
        self.kept[key] = upcast(tensor)

    def keep_moved(self, index: int, attention: Attention) -> dict[str, Tensor]:
        """Keep what the heads of a block moved: weights times values, without any sums."""
        to, values = self.moved_to, upcast(attention.v)
        if to is None:
            values = values[:, :1]
            weights = []
            for start in range(0, attention.q.shape[1], BLOCK_ROWS):
                pattern = attention.pattern(slice(start, start + BLOCK_ROWS), masked=None)
                # A copy: a view would keep the attention of all blocks in memory.
                weights.append(pattern[..., 0].clone())
            weight = torch.cat(weights, -1)
        else:
            weight = attention.pattern(slice(to, to + 1), masked=None)[:, :, 0]
        shares = rearrange(weight, "batch head pos -> batch pos head 1")
        self.moved[index] = shares * repeat_heads(values, attention.n_heads)
        return {}

    def clear(self) -> None:
        """Forget the last pass."""
        self.kept.clear()
        self.moved.clear()

    def names(self, index: int) -> list[str]:
        """Return the names of the writers whose output `vectors` returns, in its order."""
        names = ["embed", *(["pos_embed"] if self.positions else [])]
        for block in self.blocks[:index]:
            names += [name for name in block.names if name.head is None]
        return [*names, "bias"]

    def vectors(self, index: int) -> dict[str, Vectors]:
        """Return the outputs of all writers before a block except single heads, by name."""
        kept, before = self.kept, self.blocks[:index]
        written: dict[str, Vectors] = {"embed": kept[0, "x"]}
        if (0, "pos") in kept:
            written["pos_embed"] = kept[0, "pos"].expand_as(kept[0, "x"])
            written["embed"] = written["embed"] - written["pos_embed"]
        constants = torch.zeros_like(kept[0, "x"])
        for block in before:
            added = kept[block.index + 1, "x"] - kept[block.index, "x"]
            if block.layer is None:
                written[block.names[0]] = added
                continue
            attn = kept[block.index, "attn"] * block.factor
            if block.w_o is None:
                written[block.names[0]] = attn
            else:
                constants = constants + self._constant(block)
            if block.has_mlp:
                written[block.names[-1]] = added - attn
        return written | {"bias": constants}

    def _constant(self, block: BlockWriting) -> Vectors:
        """Return the part of attention's output from the biases of W_O and norm, not from heads."""
        assert block.b_o is not None
        norm, b_o = block.post_norm, block.b_o.expand_as(self.kept[block.index, "x"])
        return block.factor * norm.outputs(b_o, self.post_scales(block))

    def heads(self, block: BlockWriting) -> Float[Tensor, "batch pos head d_value"]:
        """Return the input of a block's W_O, head by head."""
        assert block.layer is not None
        return block.layer.by_head(self.kept[block.index, "z"])

    def post_scales(self, block: BlockWriting) -> Float[Tensor, "batch pos"]:
        """Return every token's scale in the norm after a block's W_O; computed once per pass."""
        key = block.index, "scales"
        if key not in self.kept:
            self.kept[key] = block.scales(self.heads(block), self.kept[block.index, "attn"])
        return self.kept[key]
