"""Running sums over sequences of one block's tensors: scores, Gram maps of stages, heads.

The stages (a) to (i) of the paper's Figure 3 follow one block from its normed input to the next
block's attention scores. A stage says where to read a letter: the block (this or the next), the
hook point, and whether the point carries vectors, whose Gram map is taken, or scores, which are a
map already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import (
    Attention,
    AttentionMask,
    Scores,
    repeat_heads,
    sum_query_groups,
)
from nope_probe.hooks.layers.base_layer import Layer, NormName
from nope_probe.hooks.layers.hook_points import Attachment, HookPoint
from nope_probe.maps.folds import FoldSum, State, head_products, product_parts, sum_parts
from nope_probe.maps.rows import GROUP_ROWS, QueryPositions, RowGroup, join_groups
from nope_probe.stages import Letter


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One letter of Figure 3 (`stages.STAGE_WORDS` says what it holds).

    Attributes:
        block: 0 for the block under study, 1 for the one after it.
        point: the hook point's name within the block; or
        norm: the norm whose output the stage is; the kind of model decides how it is read.
        scores: whether the hook point carries scores (a map) and not vectors.
    """

    block: Literal[0, 1] = 0
    point: str = ""
    norm: NormName | None = None
    scores: bool = False


_SCORES = "attn.hook_attn_scores"
STAGES: dict[Letter, Stage] = {
    "a": Stage(norm="ln1"),
    "b": Stage(point=_SCORES, scores=True),
    "c": Stage(point="attn.hook_z"),
    "d": Stage(point="hook_attn_out"),
    "e": Stage(point="hook_resid_mid"),
    "f": Stage(norm="ln2"),
    "g": Stage(point="hook_resid_post"),
    "h": Stage(norm="ln1", block=1),
    "i": Stage(point=_SCORES, scores=True, block=1),
}


def available(layers: Mapping[int, Layer], index: int) -> list[Letter]:
    """Return the stages that the block `index` has.

    The last block has (a) to (g). A block without a second norm has no (f). A block without
    `hook_resid_mid` (attention only, or attention and MLP in parallel) has no (e) either: in an
    attention-only block, (e) would equal (g).

    Args:
        layers: the blocks that attend, by number.
        index: a block's number.

    Raises:
        UserError: if the model has no such block, or the block does not attend.
    """
    if index not in layers:
        if not 0 <= index < max(layers):
            raise UserError(f"expected a block from 0 to {max(layers)}, got {index}")
        raise UserError(f"L{index} does not attend; the layers that do are {[*layers]}")
    letters = list[Letter]()
    for letter, stage in STAGES.items():
        layer = layers.get(index + stage.block)
        is_left_out = letter in ("e", "f") and _why_no_middle(layers[index])
        if layer is not None and layer.has(hook_name(stage, layer)) and not is_left_out:
            letters.append(letter)
    return letters


def absent_stages(layers: Mapping[int, Layer], index: int, n_layers: int) -> dict[Letter, str]:
    """Return the reason for every stage that the block `index`, of n_layers, lacks."""
    has, block = available(layers, index), layers[index]
    is_last = index == n_layers - 1
    why = f"L{index} is the last layer" if is_last else f"L{index + 1} does not attend"
    return {
        letter: why if stage.block else _why_no_middle(block) or "this block has no such stage"
        for letter, stage in STAGES.items()
        if letter not in has
    }


def _why_no_middle(block: Layer) -> str | None:
    """Return the reason why a block has no (e) and (f) as in the paper; None if it may have them.

    A bridge has a norm of an MLP even where it has no MLP.
    """
    if block.attention_only:
        return "no FFN: the block ends with attention, at (g)"
    if block.parallel:
        return "attention and FFN run in parallel"
    has_post_norm = block.has("ln1_post.hook_out") or block.has("ln2_post.hook_out")
    return "there are norms after attention and FFN" if has_post_norm else None


def hook_name(stage: Stage, layer: Layer) -> str:
    """Return the name of the hook point that carries a stage in this block."""
    return stage.point if stage.norm is None else layer.norm_point(stage.norm)


def vectors(stage: Stage, layer: Layer, tensor: Tensor) -> Float[Tensor, "batch pos width"]:
    """Return one vector per position from the tensor at a stage's hook point.

    Heads are concatenated, as in the published figure (the mean over heads in its caption is this
    map divided by the number of heads). Norms include their learned weight.
    """
    if stage.norm is not None:
        return layer.norm_output(stage.norm, tensor)
    if tensor.ndim == 4:
        return rearrange(tensor, "batch pos head d_head -> batch pos (head d_head)")
    return tensor


class Accumulator:
    """Running sums of one block, added to once per forward pass.

    If a pass runs out of memory in a block, the blocks before it have counted the batch. When its
    sequences are run again in smaller batches, `add` leaves them out of these blocks' totals.

    Attributes:
        totals: sums over sequences, one per fold; the totals of several processes add up.
        sum_dtype: the least precision of the totals.
        flags: booleans from the first sequence that hold for all, such as the visible cells.
        n_seen: how many sequences of this process are in the totals.
        reads_attention: whether it reads the inputs of attention, no later tensor of the block.
        reads_logits: whether it reads the logits of a pass that runs to the end.
    """

    layer: Layer
    reads_attention = False
    reads_logits = False
    sum_dtype = torch.float64

    def __init__(self, n_folds: int) -> None:
        self.n_folds = n_folds
        self.totals: State = {}
        self.flags: State = {}
        self.n_seen = self.upto = 0
        self.fold_of: Tensor

    def hooks(self) -> Iterable[Attachment]:
        """Return the hooks that read a forward pass; the last hook adds it to the totals."""
        return ()

    def reset(self) -> None:
        """Drop the tensors of a forward pass; most accumulators add what they read at once."""

    def read(self, attention: Attention) -> None:
        """Add the attention of one forward pass; by default it is ignored."""

    def read_logits(
        self, logits: Float[Tensor, "batch logit_pos d_vocab"], tokens: Int[Tensor, "batch pos"]
    ) -> None:
        """Read the logits of a pass that ran to the end; by default they are ignored."""

    def start_batch(self, fold_of: Int[Tensor, " batch"], upto: int) -> None:
        """Set the folds of the next batch, and how many sequences are counted with it."""
        self.fold_of, self.upto = fold_of, upto
        self.reset()

    @property
    def already_counted(self) -> bool:
        """Whether the sequences of this batch are in the totals already."""
        return self.upto <= self.n_seen

    def add(self, **parts: Sequence[FoldSum]) -> None:
        """Add a batch to the totals, once: all of it or, if memory runs out, nothing."""
        if self.already_counted:
            return
        for name, some in parts.items():
            self._make_room(name, *some[0])
        for name, some in parts.items():
            for where, tensor in some:
                self.totals[name][where].add_(tensor)
        self.n_seen = self.upto

    def _make_room(self, name: str, where: int | slice, tensor: Tensor) -> None:
        """Start a total at 0, or move a restored one to its device."""
        if name not in self.totals:
            shape = tensor.shape[1:] if isinstance(where, slice) else tensor.shape
            dtype = torch.promote_types(self.sum_dtype, tensor.dtype)
            with torch.inference_mode(False):  # so that means can be made of them in place
                zeros = torch.zeros(self.n_folds, *shape, dtype=dtype, device=tensor.device)
            self.totals[name] = zeros
        self.totals[name] = self.totals[name].to(tensor.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """How sums are cut: by folds of the sequences, by the queries with rows, at the first keys.

    Attributes:
        counts: sequences per fold.
        queries: the queries of the rows; None where all have rows.
        skip_keys: how many keys count as first, for sums that separate these.
        kept_positions: how many first positions means over positions leave out.
        coordinates: by block, the coordinates of q and k whose part of the scores is summed; None
            for whole scores.
    """

    counts: Int[Tensor, " fold"]
    queries: QueryPositions = None
    skip_keys: int = 0
    kept_positions: int = 0
    coordinates: Mapping[int, Int[Tensor, " coordinate"]] | None = None

    @property
    def rows(self) -> Int[Tensor, " row"] | slice:
        """The index of the rows among all queries."""
        return slice(None) if self.queries is None else self.queries


class MapAccumulator(Accumulator):
    """Sums the rows of a map, for all queries or for chosen queries.

    Attributes:
        cut: the folds, and the queries with rows.
        flags: `visible`: the cells of the rows that the model does not mask.
    """

    def __init__(self, layer: Layer, cut: Cut) -> None:
        super().__init__(len(cut.counts))
        self.layer, self.cut = layer, cut

    @property
    def groups(self) -> list[RowGroup]:
        """The groups of rows: a single group of all queries, or a group per 64 chosen ones.

        Groups of chosen rows leave out the keys after their last query, which saves memory.
        """
        if self.cut.queries is None:
            n = self.flags["visible"].shape[-1]
            return [RowGroup(name="", queries=slice(None), stop=n)]
        return [
            RowGroup(name=str(index), queries=queries, stop=int(queries[-1]) + 1)
            for index, queries in enumerate(self.cut.queries.split(GROUP_ROWS))
        ]

    def part_of(self, attention: Attention) -> Attention:
        """Return the attention, with the part of its scores that is summed."""
        chosen = self.cut.coordinates
        return attention if chosen is None else attention.among(chosen[self.layer.index])

    def see(self, mask: AttentionMask) -> None:
        """Keep the cells of the rows that all heads see in the first sequence."""
        if "visible" in self.flags:
            return
        visible = mask.rows(self.cut.rows)[0].all(0)
        if self.cut.queries is not None:
            before = torch.arange(mask.n_keys) <= self.cut.queries[:, None]
            visible = visible & before.to(visible.device)
        self.flags["visible"] = visible.clone()

    def products(
        self, x: Float[Tensor, "batch pos width"], y: Float[Tensor, "batch pos width"]
    ) -> dict[str, list[FoldSum]]:
        """Return the sums of x_i.y_j over a batch, by groups of rows i."""
        return {
            f"map{group.name}": product_parts(
                x[:, group.queries], y[:, : group.stop], self.fold_of, self.n_folds
            )
            for group in self.groups
        }

    def scores_by_group(self, attention: Attention) -> Iterator[tuple[str, Scores]]:
        """Yield a batch's scores by groups of rows, with the name of their sums."""
        for group in self.groups:
            yield f"map{group.name}", attention.scores(group.queries)[..., : group.stop]

    def joined(
        self, blocks: Iterable[Float[Tensor, "*batch row key_pos"]]
    ) -> Float[Tensor, "*batch row key_pos"]:
        """Return the map from its rows by groups, NaN where the model masks."""
        return join_groups(blocks, self.groups, self.flags["visible"].cpu())

    def all_means(self) -> dict[str, Float[Tensor, "fold *map"]]:
        """Return the fold means by name, maps NaN where the model masks, and forget the sums."""
        return {"map": self.joined(self.means("map"))}

    def means(self, name: str) -> Iterator[Float[Tensor, "fold *head_row_key"]]:
        """Yield the fold means of a total by groups of rows, and forget the sums of each group.

        They are made in place, because the maps of heads are gigabytes.
        """
        for group in self.groups:
            total = self.totals.pop(name + group.name).cpu()
            yield total.div_(self.cut.counts.view(-1, *[1] * (total.ndim - 1)))


class GramAccumulator(MapAccumulator):
    """Sums inner products of one stage's vectors, per fold."""

    def __init__(self, stage: Stage, layer: Layer, cut: Cut) -> None:
        super().__init__(layer, cut)
        self.stage, self.latest = stage, list[Tensor]()
        self.reads_attention = stage.norm == "ln1"  # so that a pass can end there

    def hooks(self) -> Iterator[Attachment]:
        yield self.layer.point(hook_name(self.stage, self.layer)), self.keep
        if not self.reads_attention:
            yield self.layer.point("hook_resid_post"), lambda tensor, hook: self.read()

    def keep(self, tensor: Tensor, hook: HookPoint) -> None:
        """Keep the stage's tensor: inside attention, products may be those of the tap."""
        # HookedTransformer fires ln1.hook_normalized three times a pass.
        self.latest = [tensor]

    def read(self, attention: Attention | None = None) -> None:
        """Add the inner products of the tensor that was kept."""
        for tensor in self.latest:
            x = vectors(self.stage, self.layer, tensor)
            self.see(AttentionMask.full(x.shape[1], x.shape[1], x.device))
            self.add(**self.products(x, x))
        self.reset()

    def reset(self) -> None:
        self.latest.clear()


class ScoreAccumulator(MapAccumulator):
    """Sums one layer's scores over heads and sequences, per fold.

    Where q.k gives the scores, their mean over heads and sequences is one matrix product.

    Attributes:
        flags: `visible`: the cells that the model does not mask.
    """

    reads_attention = True

    def read(self, attention: Attention) -> None:
        """Add one batch's scores."""
        attention, scale = self.part_of(attention), attention.scale / attention.n_heads
        self.see(attention.mask)
        if not attention.is_product:
            folds, parts = (self.fold_of, self.n_folds), {}
            for name, scores in self.scores_by_group(attention):
                parts[name] = sum_parts(scores.mean(dim=1, dtype=torch.float64), *folds)
            self.add(**parts)
            return
        q = sum_query_groups(attention.q, attention.k.shape[2]).flatten(2)
        k = attention.k.flatten(2)
        self.add(**self.products(q * scale, k))


class HeadAccumulator(MapAccumulator):
    """Sums one layer's scores over sequences, per fold and head, at 4 bytes a cell.

    Sums of N terms in float32 are off by sqrt(N) 3e-8 of their RMS as a rule, N 6e-8 at most.
    """

    reads_attention = True
    sum_dtype = torch.float32

    def read(self, attention: Attention) -> None:
        """Add one batch's scores."""
        if self.already_counted:
            return
        attention = self.part_of(attention)
        self.see(attention.mask)
        if not attention.is_product:
            # A sequence at a time: n_folds sums of heads would take as much memory again.
            parts = {
                name: list(zip(self.fold_of.tolist(), scores, strict=True))
                for name, scores in self.scores_by_group(attention)
            }
            self.add(**parts)
            return
        q, n_heads = attention.q, attention.n_heads
        left = q.to(torch.promote_types(q.dtype, self.sum_dtype))
        right = repeat_heads(attention.k.to(left.dtype), n_heads)
        for group in self.groups:
            rows, keys, name = left[:, group.queries], right[:, : group.stop], f"map{group.name}"
            shape = n_heads, rows.shape[1], group.stop
            self._make_room(name, 0, left.new_empty(1).expand(shape))
            # The products add in place: no further tensor holds these cells for every head.
            for total, product in head_products(self.totals[name], rows, keys, self.fold_of):
                total.baddbmm_(*product, alpha=attention.scale)
        self.n_seen = self.upto


def stacked_means(sums: Sequence[MapAccumulator]) -> dict[str, Float[Tensor, "fold layer *map"]]:
    """Return the fold means of all layers by name, and forget their sums.

    One layer's maps at a time are in memory next to the result. They are NaN in layers without a
    total that others have.
    """
    stacked: dict[str, Tensor] = {}
    for place, of_layer in enumerate(sums):
        for name, mean in of_layer.all_means().items():
            if name not in stacked:
                shape = len(mean), len(sums), *mean.shape[1:]
                stacked[name] = mean.new_full(shape, torch.nan)
            stacked[name][:, place] = mean
            del mean  # before the next map is made
    return stacked
