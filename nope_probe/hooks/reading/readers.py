"""Mean queries and keys of readers, and each writer's part of them, in a stream of batches.

With every token's norm scales kept fixed, a reader's queries and keys are the sum of the writers'
parts. Sums over sequences are kept per position and writer; no residual stream is kept longer than
a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import (
    Attention,
    relative_error,
    repeat_heads,
    sum_query_groups,
    upcast,
)
from nope_probe.hooks.layers.base_layer import Layer, Vectors
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel
from nope_probe.hooks.layers.linear_maps import projection_map
from nope_probe.hooks.layers.model import (
    Given,
    Inputs,
    begins_alike,
    numbered_layers,
    skip_keys_of,
)
from nope_probe.hooks.layers.passes import traits_of
from nope_probe.hooks.layers.writers import (
    Residual,
    learned_positions,
    norm_before,
    written_by_blocks,
)
from nope_probe.hooks.reading.accumulators import Accumulator, Cut
from nope_probe.hooks.reading.attention import HeadSums
from nope_probe.hooks.reading.streaming import Stream, dealt, stream
from nope_probe.maps.folds import FoldSum, State, product_parts, sum_parts
from nope_probe.maps.positions import NO_ROTATION, PositionSums, ReaderSums, Rotation
from nope_probe.maps.rows import chosen_rows, rows_of

# The relative error up to which writers' parts add up to queries and keys: of float32 and float64,
# and, in half precision, for each number that is rounded between the residual stream and scores.
MOST_ERROR, ROUNDINGS = 1e-3, 8
WriterKind = Literal["heads", "layers"]


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
    query_rows: int | None = None,
    kept_positions: int | None = None,
    moved_to: int | None = None,
    checkpoint: Stream | None = None,
) -> PositionSums:
    """Average the queries and keys of some layers at each position, and each writer's part of them.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: token sequences of equal length, or input vectors.
        layers: the readers' block numbers, from 0; all that attend by default.
        writers: whether single heads are writers, or a block's attention as a whole.
        per_head: whether queries are kept head by head; else they are summed over the heads that
            share a key head, which suffices for the mean over heads.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt; by default 8, or as many as there are
            sequences (documents) if these are fewer.
        documents: the document of each sequence, whose sequences go to one fold.
        query_rows: how many rows the maps of scores have; see `capture_scores`.
        kept_positions: how many first positions means over positions leave out; by default 1 if all
            sequences begin with the same token, else 0.
        moved_to: a position. `first_queries` and `first_keys` then have what each head moved to it,
            at the position of the token that the head moved it from; by default they have what each
            head moved from the first key, at the position that the head moved it to.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Returns:
        Fold means on the CPU, float64.

    Raises:
        UserError: for a layer that the model does not have.
        NotImplementedError: for a family whose residual stream is no sum, whose RoPE turns no
            pairs, or whose projections are no linear maps between norms.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.reading.readers import capture_positions
        >>> sums = capture_positions(load("nope-tiny").model, torch.randint(9, (8, 7)), layers=[1])
        >>> sorted(sums.readers[1].keys)[:3]
        ['L0H0', 'L0H1', 'L0H2']
    """
    model, inputs, fold_of = dealt(model, inputs, n_folds, documents)
    readers = sorted(numbered_layers(model, layers), key=lambda layer: layer.index)
    # What is written where all sequences begin with the same token marks the token, no position.
    kept = int(begins_alike(inputs)) if kept_positions is None else kept_positions
    queries = chosen_rows(inputs.shape[1], query_rows)
    cut = Cut(counts=fold_of.bincount(), queries=queries, kept_positions=kept)
    blocks = written_by_blocks(model, inputs[:1], readers[-1].index)
    if writers == "layers":
        blocks = [replace(block, w_o=None) for block in blocks]
    residual = Residual(model, blocks, learned_positions(model, inputs), moved_to)
    accumulators = [
        ReaderAccumulator(model, layer, cut, per_head, residual, inputs[:1]) for layer in readers
    ]
    moved = [
        HeadSums(block.layer, 1, partial(residual.keep_moved, block.index))
        for block in blocks
        if block.layer is not None and block.w_o is not None
    ]
    stream(model, inputs, [*accumulators, *moved], fold_of, batch_size, checkpoint)
    return PositionSums(
        readers={accumulator.layer.index: accumulator.sums() for accumulator in accumulators},
        counts=cut.counts,
        bos=begins_alike(inputs),
        skip_keys=skip_keys_of(inputs),
        kept_positions=kept,
    )


class ReaderAccumulator(Accumulator):
    """Sums one layer's queries, keys and scores per fold, and each writer's part of these.

    Args:
        model: the model.
        layer: the reader.
        cut: the folds, the queries of the rows of scores, and how many first positions means over
            positions leave out.
        per_head: whether queries and scores are kept head by head.
        residual: keeps the outputs of the blocks before the reader.
        inputs: a sequence on which the reader's norm is recognised.

    Raises:
        NotImplementedError: if queries and keys are no linear map between norms.
    """

    reads_attention = True

    def __init__(
        self,
        model: HookedModel,
        layer: Layer,
        cut: Cut,
        per_head: bool,
        residual: Residual,
        inputs: Inputs,
    ) -> None:
        super().__init__(len(cut.counts))
        self.layer, self.cut, self.per_head, self.residual = layer, cut, per_head, residual
        self.rotary, self.rotation = traits_of(model)[layer.index].rotary, NO_ROTATION
        self.tolerance = max(MOST_ERROR, ROUNDINGS * torch.finfo(layer.dtype).eps)
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
        # The bias of the norm, through W_Q and W_K, and the biases of these.
        self.bias, bias = self.projection.bias, self.norm.bias
        if bias is not None:
            through = torch.einsum("m,mhd->hd", bias.double().cpu(), self.projection.weight)
            self.bias = self.bias + through

    def hooks(self) -> Iterator[Attachment]:
        if self.layer.index == len(self.residual.blocks):  # one reader's hooks serve all
            yield from self.residual.hooks()
        normed = self.layer.point(self.layer.norm_point("ln1"))
        yield normed, partial(self.residual.keep, (self.layer.index, "normed"))

    def reset(self) -> None:
        self.residual.clear()

    def read(self, attention: Attention) -> None:
        """Add one batch, and check the first.

        Raises:
            NotImplementedError: for scores that hooks have changed from q.k, or if the writers'
                parts do not add up to queries and keys.
        """
        is_first, attention = not self.totals, self._with_shared_keys(attention)
        if attention.hooked is not None and not attention.equals_product():
            raise NotImplementedError(
                f"the scores of L{self.layer.index} are not q.k: they have no positional terms"
            )
        if is_first:
            self._see(attention)
        self.add(**self.parts(attention))
        if is_first:
            fold = int(self.fold_of[0])
            n_seqs = (self.fold_of == fold).sum().cpu()[None]
            rows = slice(fold, fold + 1)
            self._sums(((name, total[rows]) for name, total in self.totals.items()), n_seqs)

    def _see(self, attention: Attention) -> None:
        """Keep what the first sequence shows of all: visible cells, scale, bias and rotation."""
        visible, bias = attention.mask.rows(self.cut.rows)[0].cpu(), attention.bias
        self.visible = visible if self.per_head else visible.all(0)
        self.scale = attention.scale if self.per_head else attention.scale / attention.n_heads
        self.score_bias: Tensor | None = None
        if bias is not None:
            bias, n_heads = bias[0, :, self.cut.rows].double().cpu(), attention.n_heads
            self.score_bias = bias.expand(n_heads, -1, -1) if self.per_head else bias.mean(0)
        rope, angles = self.layer.tap.edits.rope, attention.angles
        if self.rotary is None or angles is None:
            return
        if self.rotary.pairs is None:
            raise NotImplementedError(
                f"RoPE's pairs of coordinates in L{self.layer.index} were not recognised"
            )
        rotation = self.rotary.at(angles if rope is None else rope.straightened(angles))
        cos, sin = (x[0].double().cpu() for x in (rotation.cos, rotation.sin))
        self.rotation = Rotation(pairs=self.rotary.pairs, cos=cos, sin=sin)

    def _score_parts(self, attention: Attention, q: Tensor) -> list[FoldSum]:
        """Return the sums of q.k times the scale, over heads or per head."""
        q = q[:, self.cut.rows]
        if not self.per_head:
            q = q * (attention.scale / attention.n_heads)
            return product_parts(q.flatten(2), attention.k.flatten(2), self.fold_of, self.n_folds)
        k = repeat_heads(attention.k, attention.n_heads)
        return [
            (fold, torch.einsum("bqhd,bkhd->hqk", q[rows], k[rows]) * attention.scale)
            for fold, rows in self._folds()
        ]

    def _folds(self) -> Iterator[tuple[int, Bool[Tensor, " batch"]]]:
        for fold in self.fold_of.unique().tolist():
            yield fold, self.fold_of == fold

    def _with_shared_keys(self, attention: Attention) -> Attention:
        """Return attention with the key heads of W_K, of which an ablation may have made copies.

        Raises:
            NotImplementedError: if the heads that share a key head have different keys.
        """
        n_kv, n = self.projection.n_kv_heads, attention.k.shape[2]
        shared = attention.k[:, :, :: n // n_kv]
        if n > n_kv and not torch.equal(repeat_heads(shared, n), attention.k):
            raise NotImplementedError(
                f"the keys of L{self.layer.index} are not those of its W_K: query heads that share "
                "a key head have different keys"
            )
        return replace(attention, k=shared)

    def parts(self, attention: Attention) -> dict[str, list[FoldSum]]:
        """Return one batch's parts of the totals."""
        folds, q, k = (self.fold_of, self.n_folds), attention.q, attention.k
        if not self.per_head:
            q = sum_query_groups(q, k.shape[2])
        index, kept = self.layer.index, self.residual.kept
        x = kept[index, "x"]
        y = self.layer.norm_output("ln1", kept[index, "normed"]).to(x.dtype)
        gains = self._gains(attention, y)
        scaled = gains * rearrange(self.norm.scales(x, y), "batch pos -> batch pos 1 1")
        vectors = torch.stack(list(self.residual.vectors(index).values()), 2)
        parts = {
            "q": sum_parts(q, *folds),
            "k": sum_parts(k, *folds),
            "scores": self._score_parts(attention, q),
            "gains": sum_parts(gains, *folds),
            "scales": sum_parts(scaled, *folds),
            "stream": sum_parts(x, *folds),
            "vectors": self._brought(vectors, scaled, self.weight[None]),
        }
        for writing, weight in self.through_w_o.items():
            block = self.residual.blocks[writing]
            post = self.residual.post_scales(block) * block.factor
            written = scaled * rearrange(post, "batch pos -> batch pos 1 1")
            parts[f"heads{writing}"] = self._brought(self.residual.heads(block), written, weight)
            to = self.residual.moved_to
            reaching = written if to is None else written[:, [to]].expand_as(written)
            parts[f"first{writing}"] = self._brought(self.residual.moved[writing], reaching, weight)
        return parts

    def _gains(
        self, attention: Attention, y: Vectors
    ) -> Float[Tensor, "batch pos one_or_head part"]:
        """Return the scales of the norms inside attention."""
        if not self.projection.parts:
            return y.new_ones(*y.shape[:2], 1, 1)
        heads = self.rotation.turned_back(upcast(torch.cat((attention.q, attention.k), 2)))
        return self.projection.gains(y, heads, self.tolerance)

    def _brought(
        self,
        x: Float[Tensor, "batch pos writer width"],
        gains: Float[Tensor, "batch pos one_or_head part"],
        weight: Float[Tensor, "one_or_writer width head d_head"],
    ) -> list[FoldSum]:
        """Return the sums of the writers' parts of queries and keys: x times gains, through W.

        Where all heads share a gain, W multiplies the sums at the end instead of every batch.
        """
        parts: list[FoldSum] = []
        for fold, rows in self._folds():
            sums = torch.einsum("bphr,bpwx->hrpwx", gains[rows], x[rows].to(gains))
            if not self.projection.parts:
                parts.append((fold, sums[0, 0]))
                continue
            weights = weight.to(gains).expand(x.shape[2], -1, -1, -1)
            brought = sums.new_empty(*sums.shape[2:4], *weight.shape[2:])
            for head in range(weight.shape[2]):
                for index, part in enumerate(self.projection.parts):
                    through = weights[:, :, head][..., part]
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
        """Return the writers' parts, from fold means of `_brought`."""
        if self.projection.parts:
            return means
        weights = weight.expand(means.shape[2], -1, -1, -1)
        return torch.einsum("fpwx,wxhd->fpwhd", means, weights)

    def sums(self) -> ReaderSums:
        """Return fold means, of q and k before RoPE, and forget the sums."""
        totals = ((name, self.totals.pop(name)) for name in list(self.totals))
        return self._sums(totals, self.cut.counts)

    def _sums(
        self, totals: Iterable[tuple[str, Tensor]], n_seqs: Int[Tensor, " fold"]
    ) -> ReaderSums:
        """Return the reader's sums and the writers' parts, from the totals over so many sequences.

        Raises:
            NotImplementedError: if the writers' parts do not add up to queries and keys.
        """
        means = {
            name: total.double().cpu() / n_seqs.view(-1, *[1] * (total.ndim - 1))
            for name, total in totals
        }
        mean_q, mean_k = (self.rotation.turned_back(means[name]) for name in ("q", "k"))
        scores = means.pop("scores")
        rows = rows_of(scores.shape[-2], self.cut.queries)
        if scores.shape[-2] < scores.shape[-1]:
            scores = scores.float()  # as all maps of chosen rows
        names = self.residual.names(self.layer.index)
        vectors = self._through(means.pop("vectors"), self.weight[None])
        brought = dict(zip(names, vectors.unbind(2), strict=True))
        first: dict[str, Tensor] = {}
        for index, weight in self.through_w_o.items():
            for kind, written in (("heads", brought), ("first", first)):
                vectors = self._through(means.pop(f"{kind}{index}"), weight)
                written |= zip(self.residual.blocks[index].names, vectors.unbind(2), strict=False)
        gain = self.projection.spread(means["gains"])
        brought["bias"] = brought["bias"] + (gain * self.bias + self.projection.constant)
        n_kv = mean_k.shape[2]
        queries, keys = self._sides(brought, n_kv)
        first_queries, first_keys = self._sides(first, n_kv)
        norm_queries, norm_keys = self._sides({"norm": self._of_norm(means)}, n_kv)
        for whole, written in ((mean_q, queries), (mean_k, keys)):
            error = relative_error(sum(written.values(), torch.zeros_like(whole)), whole)
            if not error <= self.tolerance:
                raise NotImplementedError(
                    f"the writers' parts do not add up to the queries and keys of "
                    f"L{self.layer.index} (relative error {error:.1e})"
                )
        return ReaderSums(
            q=mean_q,
            k=mean_k,
            scores=scores.masked_fill(~self.visible, torch.nan),
            bias=self.score_bias,
            scale=self.scale,
            rotation=self.rotation,
            query_positions=rows.clone(),  # every reader is saved by itself
            queries=queries,
            keys=keys,
            first_queries=first_queries,
            first_keys=first_keys,
            norm_queries=norm_queries["norm"],
            norm_keys=norm_keys["norm"],
        )

    def _sides(self, vectors: State, n_kv: int) -> tuple[State, State]:
        """Return vectors as queries and as keys, from the heads of both in one row."""
        n = self.layer.n_heads if self.per_head or self.projection.parts else n_kv
        queries = {name: x[:, :, :n] for name, x in vectors.items()}
        if not self.per_head:
            queries = {name: sum_query_groups(x, n_kv) for name, x in queries.items()}
        return queries, {name: x[:, :, n:] for name, x in vectors.items()}

    def _of_norm(self, means: State) -> Float[Tensor, "fold pos head d_head"]:
        """Return the queries and keys that norms make of vectors that know nothing of position.

        At each position, the mean scale of the norms multiplies the residual stream's mean over
        positions, and the mean scale of inner norms the constants before them.
        """
        stream = means["stream"][:, self.cut.kept_positions :].mean(1)
        through = torch.einsum("fm,mhd->fhd", stream, self.weight)[:, None]
        scale, gain = (self.projection.spread(means[name]) for name in ("scales", "gains"))
        return scale * through + gain * self.bias
