"""Stream what each component writes into the queries and keys of a reader, and their means.

The residual stream before a block is a sum: embeddings, each earlier head's output through W_O,
each earlier MLP. With the scales of norms kept as they were for each token, a reader's queries and
keys are the same sum of what each of these brings. Sums over sequences are kept per position and
writer; no residual stream is kept longer than a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attached_hooks import hooks_attached, hooks_detached
from nope_probe.hooks.layers.attention import (
    Attention,
    relative_error,
    repeat_heads,
    score_tolerance,
    sum_query_groups,
)
from nope_probe.hooks.layers.base_layer import Layer, Vectors, find_point
from nope_probe.hooks.layers.linear_maps import (
    NormMap,
    norm_between,
    projection_map,
)
from nope_probe.hooks.layers.model import (
    Given,
    Inputs,
    as_inputs,
    begins_alike,
    blocks_of,
    documents_of,
    layers_of,
    numbered_layers,
    position_point,
    run_forward,
    tapped,
    traits_of,
)
from nope_probe.hooks.layers.protocols import Attachment, HookedModel, HookPoint
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.streaming import StreamCheckpoint, stream
from nope_probe.maps.folds import Part, State, folds_of, product_parts, sum_parts
from nope_probe.maps.positions import PositionSums, ReaderSums, Turns

WriterKind = Literal["heads", "layers", "none"]
BLOCK_ROWS = 128  # queries whose attention to the first key is computed at once


def capture_positions(
    model: HookedModel,
    inputs: Given,
    *,
    layers: Sequence[int] | None = None,
    writers: WriterKind = "heads",
    per_head: bool = False,
    batch_size: int = 32,
    n_folds: int | None = None,
    documents: Int[Tensor, " seq"] | None = None,
    checkpoint: StreamCheckpoint | None = None,
) -> PositionSums:
    """Average the queries and keys of some layers at each position, and each writer's part of them.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: token sequences of equal length, or input vectors.
        layers: the readers' block numbers, from 0; all that attend by default.
        writers: whether heads write one by one, or a block's attention as a whole; `none` leaves
            out what each of them brings.
        per_head: whether queries are kept head by head; else they are summed over the heads that
            share a key head, which is all that the mean over heads needs.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt; by default 8, or as many as there are
            sequences (documents) if these are fewer.
        documents: the document of each sequence, whose sequences go to one fold.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Returns:
        Fold means on the CPU, float64.

    Raises:
        IndexError: for a layer that the model does not have.
        NotImplementedError: for a family whose residual stream, RoPE or projections have another
            form than a sum, pairs that turn, and linear maps between norms.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.reading.writers import capture_positions
        >>> sums = capture_positions(load("nope-tiny").model, torch.randint(9, (8, 7)), layers=[1])
        >>> sorted(sums.readers[1].keys)[:3]
        ['L0H0', 'L0H1', 'L0H2']
    """
    documents, inputs = documents_of(inputs, documents), as_inputs(model, inputs)
    readers = sorted(numbered_layers(model, layers), key=lambda layer: layer.index)
    fold_of = folds_of(len(inputs), n_folds, documents)
    counts = fold_of.bincount()
    first: list[FirstKeyAccumulator] = []
    if writers == "none":
        accumulators = [MeansAccumulator(model, layer, len(counts), per_head) for layer in readers]
    else:
        blocks = written_by_blocks(model, inputs[:1], readers[-1].index, writers)
        residual = Residual(model, blocks, learned_positions(model, inputs))
        accumulators = [
            ReaderAccumulator(model, layer, residual, inputs[:1], len(counts), per_head)
            for layer in readers
        ]
        first = [FirstKeyAccumulator(block, residual) for block in blocks if block.w_o is not None]
    stream(
        model,
        inputs,
        [*accumulators, *first],
        fold_of=fold_of,
        end=readers[-1].point("attn.hook_attn_scores"),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    return PositionSums(
        readers={each.layer.index: each.sums(counts) for each in accumulators},
        counts=counts,
        bos=begins_alike(inputs),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockWriting:
    """What one block adds to the residual stream.

    Attributes:
        index: the block's number.
        layer: the block, if its heads or its attention are writers; None where the block is one
            writer, since it does not attend or adds up otherwise.
        factor: what outputs of attention and MLP are multiplied with before they are added.
        post_norm: the norm behind W_O.
        w_o: of single heads; None where attention is one writer.
        b_o: what W_O adds whatever its input is.
    """

    index: int
    layer: Layer | None = None
    factor: float = 1.0
    post_norm: NormMap = field(default_factory=NormMap)
    w_o: Float[Tensor, "head d_value d_model"] | None = None
    b_o: Float[Tensor, " d_model"] | None = None
    has_mlp: bool = True

    @property
    def names(self) -> list[str]:
        """The names of the block's writers."""
        if self.layer is None:
            return [f"BLOCK{self.index}"]
        n_heads = 0 if self.w_o is None else len(self.w_o)
        heads = [f"L{self.index}H{head}" for head in range(n_heads)] or [f"ATTN{self.index}"]
        return [*heads, f"MLP{self.index}"] if self.has_mlp else heads


def written_by_blocks(
    model: HookedModel, inputs: Inputs, n_blocks: int, writers: WriterKind
) -> list[BlockWriting]:
    """Return how the first blocks write to the residual stream, as a short pass shows it."""
    attending = {layer.index: layer for layer in layers_of(model)}
    kept: dict[tuple[int, str], Tensor] = {}

    def keep(key: tuple[int, str], tensor: Tensor, hook: HookPoint) -> None:
        kept[key] = tensor.detach()

    names = ("attn.hook_z", "attn.o.hook_out", "hook_attn_out", "hook_mlp_out")
    hooks = [
        (point, partial(keep, (index, name)))
        for index, block in enumerate(blocks_of(model)[: n_blocks + 1])
        for name in ("hook_resid_pre", *names, "hook_resid_post")
        if (point := find_point(block, name)) is not None
    ]
    with torch.inference_mode(), tapped(model), hooks_attached(hooks):
        run_forward(model, inputs)
    return [
        _written_by_block(model, index, attending.get(index), kept, writers)
        for index in range(n_blocks)
    ]


def _written_by_block(
    model: HookedModel,
    index: int,
    layer: Layer | None,
    kept: Mapping[tuple[int, str], Tensor],
    writers: WriterKind,
) -> BlockWriting:
    after = kept.get((index + 1, "hook_resid_pre"), kept.get((index, "hook_resid_post")))
    assert after is not None
    added = after - kept[index, "hook_resid_pre"]
    attn, mlp = (kept.get((index, name)) for name in ("hook_attn_out", "hook_mlp_out"))
    if layer is None or attn is None or (mlp is None and not layer.attention_only):
        return BlockWriting(index=index)
    factor = scalar_between(attn if mlp is None else attn + mlp, added)
    if factor is None:
        return BlockWriting(index=index)
    written = partial(
        BlockWriting, index=index, layer=layer, factor=factor, has_mlp=mlp is not None
    )
    z, behind = kept.get((index, "attn.hook_z")), kept.get((index, "attn.o.hook_out"), attn)
    gain = scalar_between(behind, attn)  # of Granite's attention, the block's factor
    post_norm = norm_between(layer.block, behind, attn) if gain is None else NormMap()
    if writers == "layers" or z is None or post_norm is None or layer.why_not_replaced("w_o"):
        return written()
    w_o, behind = layer.weight_per_head("w_o") * (gain or 1.0), behind * (gain or 1.0)
    rest = behind - torch.einsum("bphd,hdm->bpm", by_head(z, w_o), w_o)
    b_o = rest.mean((0, 1))
    if relative_error(rest - b_o + behind, behind) > score_tolerance(added.dtype):
        return written()
    return written(w_o=w_o, b_o=b_o, post_norm=post_norm)


def learned_positions(model: HookedModel, inputs: Inputs) -> HookPoint | None:
    """Return the hook point of position embeddings; None where vectors are the whole input."""
    return None if inputs.is_floating_point() else position_point(model)


def scalar_between(x: Vectors, y: Vectors) -> float | None:
    """Return the number that makes y of x, 1 within rounding; None if there is none."""
    factor = float((x * y).sum() / x.square().sum().clamp_min(1e-30))
    if not relative_error(factor * x, y) <= score_tolerance(y.dtype):
        return None
    return 1.0 if abs(factor - 1) < 1e-5 else factor


def by_head(
    z: Float[Tensor, "batch pos *heads"], w_o: Float[Tensor, "head d_value d_model"]
) -> Float[Tensor, "batch pos head d_value"]:
    """Return z in heads as wide as those of W_O: a bridge divides those of MLA by another width."""
    return z.flatten(2).unflatten(-1, w_o.shape[:2]).to(w_o)


class Residual:
    """Keeps, for the length of a pass, what entered each block and what its attention made.

    Args:
        model: whose residual stream it is.
        blocks: how the blocks before the last reader write.
        positions: the hook point of learned position embeddings; None without them.
    """

    def __init__(
        self, model: HookedModel, blocks: Sequence[BlockWriting], positions: HookPoint | None
    ) -> None:
        self.model, self.blocks, self.positions = model, blocks, positions
        self.kept: dict[tuple[int, str], Tensor] = {}
        self.first: dict[int, Tensor] = {}

    def hooks(self) -> Iterator[Attachment]:
        """Return the hooks that keep what blocks write."""
        for index, block in enumerate(blocks_of(self.model)[: len(self.blocks) + 1]):
            point = find_point(block, "hook_resid_pre")
            assert point is not None
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
        """Keep a tensor of this pass."""
        self.kept[key] = tensor

    def clear(self) -> None:
        """Forget the last pass."""
        self.kept.clear()
        self.first.clear()

    def names(self, index: int) -> list[str]:
        """Return the names of the writers whose output `vectors` returns, in its order."""
        names = ["embed", *(["pos_embed"] if self.positions else [])]
        for block in self.blocks[:index]:
            names += [name for name in block.names if "H" not in name]
        return [*names, "bias"]

    def vectors(self, index: int) -> dict[str, Vectors]:
        """Return what was written before a block, but by single heads, by the writers' names."""
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
        """Return what a block's attention adds that no head writes: the biases of W_O and norm."""
        assert block.b_o is not None
        norm, b_o = block.post_norm, block.b_o.expand_as(self.kept[block.index, "x"])
        return block.factor * norm.outputs(b_o, self.post_scales(block))

    def heads(self, block: BlockWriting) -> Float[Tensor, "batch pos head d_value"]:
        """Return what enters a block's W_O, head by head."""
        assert block.w_o is not None
        return by_head(self.kept[block.index, "z"], block.w_o)

    def post_scales(self, block: BlockWriting) -> Float[Tensor, "batch pos"]:
        """Return the scale of the norm behind a block's W_O, for each token."""
        attn = self.kept[block.index, "attn"]
        if block.post_norm.weight is None:
            return attn.new_ones(attn.shape[:2])
        assert block.w_o is not None
        assert block.b_o is not None
        z = self.heads(block)
        return block.post_norm.scales(torch.einsum("bphd,hdm->bpm", z, block.w_o) + block.b_o, attn)


class FirstKeyAccumulator(Accumulator):
    """Keeps what each head of a writing block gets from the first key; it sums nothing itself."""

    reads_attention = True

    def __init__(self, block: BlockWriting, residual: Residual) -> None:
        super().__init__(n_folds=1)
        assert block.layer is not None
        self.layer, self.residual = block.layer, residual

    def read(self, attention: Attention) -> None:
        """Keep the first key's share of z: its weight times its value."""
        weights = []
        for start in range(0, attention.q.shape[1], BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            scores = attention.scores(rows)
            visible = attention.visible[..., rows, :].expand_as(scores)
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
            weights.append(attention.pattern(scores)[..., 0])
        first = repeat_heads(attention.v[:, :1], attention.n_heads)
        weight = rearrange(torch.cat(weights, -1), "batch head pos -> batch pos head 1")
        self.residual.first[self.layer.index] = weight * first
        self.n_seen = self.upto


class MeansAccumulator(Accumulator):
    """Sums one layer's queries, keys and scores per fold.

    Args:
        model: the model.
        layer: the reader.
        n_folds: how many folds.
        per_head: whether queries and scores are kept head by head.
    """

    reads_attention = True

    def __init__(self, model: HookedModel, layer: Layer, n_folds: int, per_head: bool) -> None:
        super().__init__(n_folds)
        self.layer, self.per_head = layer, per_head
        self.rotary = traits_of(model)[layer.index].rotary

    def read(self, attention: Attention) -> None:
        """Add one batch.

        Raises:
            NotImplementedError: for scores that hooks made something else of than q.k.
        """
        if self.already_counted:
            return
        if attention.hooked is not None and not attention.equals_product():
            raise NotImplementedError(
                f"the scores of L{self.layer.index} are not q.k: they have no positional terms"
            )
        self.flags = self.flags or self._flags_of(attention)
        self.add(**self.parts(attention))

    def parts(self, attention: Attention) -> dict[str, list[Part]]:
        """Return what one batch adds to the totals."""
        folds, q, k = (self.fold_of, self.n_folds), attention.q, attention.k
        if not self.per_head:
            q = sum_query_groups(q, k.shape[2])
        return {
            "q": sum_parts(q, *folds),
            "k": sum_parts(k, *folds),
            "scores": self._score_parts(attention, q),
        }

    def _flags_of(self, attention: Attention) -> State:
        flags = {"visible": attention.visible_to_all.clone()}
        if self.per_head:
            flags["visible"] = attention.visible_per_head.clone()
        flags["scale"] = torch.tensor(attention.scale, dtype=torch.float64)
        if attention.bias is not None:
            bias = attention.bias[0].double()
            flags["bias"] = bias if self.per_head else bias.mean(0)
        rope, angles = self.layer.tap.rope, attention.angles
        if self.rotary is None or angles is None:
            return flags
        if self.rotary.pairs is None:
            raise NotImplementedError(
                f"which coordinates RoPE turns together in L{self.layer.index} was not recognised"
            )
        angles = angles if rope is None else rope.straightened(angles)
        cos, sin = (each[0].double() / self.rotary.factor for each in self.rotary.turns(angles))
        return flags | {"cos": cos.clone(), "sin": sin.clone()}

    @property
    def turns(self) -> Turns | None:
        """How RoPE turns the layer's queries and keys."""
        if self.rotary is None or self.rotary.pairs is None or "cos" not in self.flags:
            return None
        cos, sin = self.flags["cos"].cpu(), self.flags["sin"].cpu()
        return Turns(pairs=self.rotary.pairs, cos=cos, sin=sin)

    def _score_parts(self, attention: Attention, q: Tensor) -> list[Part]:
        """Return the sums of q.k times the scale, over heads or of each."""
        if not self.per_head:
            scale = attention.scale / attention.n_heads
            return product_parts(
                q.flatten(2) * scale, attention.k.flatten(2), self.fold_of, self.n_folds
            )
        k = repeat_heads(attention.k, attention.n_heads)
        return [
            (fold, torch.einsum("bqhd,bkhd->hqk", q[rows], k[rows]) * attention.scale)
            for fold, rows in self._folds()
        ]

    def _folds(self) -> Iterator[tuple[int, Bool[Tensor, " batch"]]]:
        for fold in self.fold_of.unique().tolist():
            yield fold, self.fold_of == fold

    def means(self, counts: Int[Tensor, " fold"]) -> dict[str, Tensor]:
        """Return the totals as fold means, q and k before RoPE."""
        means = {
            name: total.double().cpu() / counts.view(-1, *[1] * (total.ndim - 1))
            for name, total in self.totals.items()
        }
        turns = self.turns
        if turns is not None:
            means |= {name: turns.turned_back(means[name]) for name in ("q", "k")}
        return means

    def sums(self, counts: Int[Tensor, " fold"]) -> ReaderSums:
        """Return fold means."""
        means, scale = self.means(counts), float(self.flags["scale"])
        return ReaderSums(
            q=means["q"],
            k=means["k"],
            scores=means["scores"].masked_fill(~self.flags["visible"].cpu(), torch.nan),
            bias=self.flags["bias"].cpu() if "bias" in self.flags else None,
            scale=scale if self.per_head else scale / self.layer.n_heads,
            turns=self.turns,
        )


class ReaderAccumulator(MeansAccumulator):
    """Sums what each writer brings to one layer's queries and keys too.

    Args:
        model: the model.
        layer: the reader.
        residual: keeps what the blocks before it write.
        inputs: a sequence on which the reader's norm is recognised.
        n_folds: how many folds.
        per_head: whether queries and scores are kept head by head.

    Raises:
        NotImplementedError: where queries and keys are no linear map between norms.
    """

    def __init__(
        self,
        model: HookedModel,
        layer: Layer,
        residual: Residual,
        inputs: Inputs,
        n_folds: int,
        per_head: bool,
    ) -> None:
        super().__init__(model, layer, n_folds, per_head)
        self.residual = residual
        self.projection = projection_map(model, layer)
        if not per_head:
            self.projection = self.projection.with_grouped_queries(layer.n_kv_heads)
        self.norm = norm_before(model, layer, inputs)
        self.weight = torch.einsum(
            "mn,nhd->mhd",
            self.norm.linear(torch.eye(layer.d_model, dtype=torch.float64)),
            self.projection.weight,
        )
        self.through_w_o = {
            block.index: torch.einsum(
                "hvm,mkd->hvkd", block.post_norm.linear(block.w_o.double().cpu()), self.weight
            )
            for block in residual.blocks[: layer.index]
            if block.w_o is not None
        }
        self.owns_hooks = layer.index == len(residual.blocks)  # one reader's hooks serve all
        self.y: Tensor | None = None

    def start_batch(self, fold_of: Int[Tensor, " batch"], upto: int) -> None:
        super().start_batch(fold_of, upto)
        self.residual.clear()

    def hooks(self) -> Iterator[Attachment]:
        if self.owns_hooks:
            yield from self.residual.hooks()
        yield self.layer.point(self.layer.norm_point("ln1")), self.keep_input

    def keep_input(self, tensor: Tensor, hook: HookPoint) -> None:
        """Keep the normed input of this pass."""
        self.y = tensor

    def reset(self) -> None:
        self.y = None
        self.residual.clear()

    def parts(self, attention: Attention) -> dict[str, list[Part]]:
        assert self.y is not None
        index = self.layer.index
        x = self.residual.kept[index, "x"]
        y = self.layer.norm_output("ln1", self.y).to(x.dtype)
        gains = self._gains(attention, y)
        scaled = gains * rearrange(self.norm.scales(x, y), "batch pos -> batch pos 1 1")
        vectors = torch.stack(list(self.residual.vectors(index).values()), 2)
        parts = super().parts(attention)
        parts |= {
            "gains": sum_parts(gains, self.fold_of, self.n_folds),
            "vectors": self._brought(vectors, scaled, self.weight[None]),
        }
        for block in self.residual.blocks[:index]:
            if block.w_o is not None:
                post = self.residual.post_scales(block) * block.factor
                own = scaled * rearrange(post, "batch pos -> batch pos 1 1")
                weight, z = self.through_w_o[block.index], self.residual.heads(block)
                parts[f"heads{block.index}"] = self._brought(z, own, weight)
                first = self.residual.first[block.index]
                parts[f"first{block.index}"] = self._brought(first, own, weight)
        return parts

    def _gains(
        self, attention: Attention, y: Vectors
    ) -> Float[Tensor, "batch pos one_or_head part"]:
        """Return the scales of the norms inside attention."""
        if not self.projection.parts:
            return y.new_ones(*y.shape[:2], 1, 1)
        heads = torch.cat((attention.q, repeat_heads(attention.k, attention.k.shape[2])), 2)
        turns = self.turns
        return self.projection.gains(y, heads if turns is None else turns.turned_back(heads))

    def _brought(
        self,
        x: Float[Tensor, "batch pos writer width"],
        gains: Float[Tensor, "batch pos one_or_head part"],
        weight: Float[Tensor, "one_or_writer width head d_head"],
    ) -> list[Part]:
        """Return the sums of what writers bring to queries and keys: x times gains, through W.

        Where all heads have one gain, W is left for the end: it then meets each sum once.
        """
        parts: list[Part] = []
        for fold, rows in self._folds():
            sums = torch.einsum("bphr,bpwx->hrpwx", gains[rows], x[rows].to(gains))
            if not self.projection.parts:
                parts.append((fold, sums[0, 0]))
                continue
            own = weight.to(gains).expand(x.shape[2], -1, -1, -1)
            brought = sums.new_empty(*sums.shape[2:4], *weight.shape[2:])
            for head in range(weight.shape[2]):
                for index, part in enumerate(self.projection.parts):
                    through = own[:, :, head][..., part]
                    brought[:, :, head, part] = torch.einsum(
                        "pwx,wxd->pwd", sums[head, index], through
                    )
            parts.append((fold, brought))
        return parts

    def _through(
        self,
        means: Float[Tensor, "fold pos writer *rest"],
        weight: Float[Tensor, "one_or_writer width head d_head"],
    ) -> Float[Tensor, "fold pos writer head d_head"]:
        """Return what writers bring, from fold means of `_brought`."""
        if self.projection.parts:
            return means
        own = weight.expand(means.shape[2], -1, -1, -1)
        return torch.einsum("fpwx,wxhd->fpwhd", means, own)

    def sums(self, counts: Int[Tensor, " fold"]) -> ReaderSums:
        """Return fold means.

        Raises:
            NotImplementedError: if what writers bring does not add up to queries and keys.
        """
        own, means = super().sums(counts), self.means(counts)
        names = self.residual.names(self.layer.index)
        vectors = self._through(means["vectors"], self.weight[None])
        brought = dict(zip(names, vectors.unbind(2), strict=True))
        first: dict[str, Tensor] = {}
        brought["bias"] = brought["bias"] + self._constants(means["gains"])
        for block in self.residual.blocks[: self.layer.index]:
            if block.w_o is not None:
                weight = self.through_w_o[block.index]
                heads, firsts = (
                    self._through(means[f"{kind}{block.index}"], weight).unbind(2)
                    for kind in ("heads", "first")
                )
                brought |= zip(block.names, heads, strict=False)
                first |= zip(block.names, firsts, strict=False)
        n_kv = own.k.shape[2]
        n = self.layer.n_heads if self.per_head or self.projection.parts else n_kv
        queries = {name: self._queries(x[:, :, :n], n_kv) for name, x in brought.items()}
        keys = {name: x[:, :, n:] for name, x in brought.items()}
        for whole, written in ((own.q, queries), (own.k, keys)):
            error = relative_error(sum(written.values(), torch.zeros_like(whole)), whole)
            if not error <= 10 * score_tolerance(torch.float32):
                raise NotImplementedError(
                    f"what is written does not add up to the queries and keys of "
                    f"L{self.layer.index} (relative error {error:.1e})"
                )
        return replace(
            own,
            queries=queries,
            keys=keys,
            first_queries={name: self._queries(x[:, :, :n], n_kv) for name, x in first.items()},
            first_keys={name: x[:, :, n:] for name, x in first.items()},
        )

    def _queries(self, x: Float[Tensor, "fold pos head d_head"], n_kv_heads: int) -> Tensor:
        return x if self.per_head else sum_query_groups(x, n_kv_heads)

    def _constants(
        self, gains: Float[Tensor, "fold pos one_or_head part"]
    ) -> Float[Tensor, "fold pos head d_head"]:
        """Return what the biases of the reader's own norm and projections bring."""
        own, projection = self.norm.bias, self.projection
        bias = projection.bias
        if own is not None:
            bias = bias + torch.einsum("m,mhd->hd", own.double().cpu(), projection.weight)
        return projection.spread(gains) * bias + projection.constant


def norm_before(model: HookedModel, layer: Layer, inputs: Inputs) -> NormMap:
    """Return the norm between the residual stream and a block's queries and keys.

    Raises:
        NotImplementedError: if there is another thing than a norm between them.
    """
    kept: dict[str, Tensor] = {}
    names = "hook_resid_pre", layer.norm_point("ln1")
    layer.point("attn.hook_attn_scores")

    def keep(name: str, tensor: Tensor, hook: HookPoint) -> None:
        kept[name] = tensor.detach()

    with torch.inference_mode(), hooks_detached(model):
        with tapped(model), hooks_attached([(layer.point(n), partial(keep, n)) for n in names]):
            run_forward(model, inputs)
        x = kept[names[0]]
        y = layer.norm_output("ln1", kept[names[1]]).to(x.dtype)
        norm = norm_between(layer.block, x, y)
    if norm is None:
        raise NotImplementedError(
            f"between the residual stream and the attention of L{layer.index} is more than a norm"
        )
    return norm
