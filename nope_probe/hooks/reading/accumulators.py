"""Running sums over sequences of one block's tensors: scores, Gram maps, heads."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention, Mask, repeat_heads, sum_query_groups
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.protocols import Attachment, HookPoint
from nope_probe.hooks.reading.stages import Stage, hook_name, vectors
from nope_probe.maps.folds import Part, State, head_products, product_parts, sum_parts
from nope_probe.maps.rows import QueryPositions, RowGroup, join_groups, row_groups


class Accumulator(ABC):
    """Running sums of one block, added to once per forward pass.

    If a pass runs out of memory in a block, the blocks before it have counted the batch. When its
    sequences are run again in smaller batches, `already_counted` tells these blocks to skip them.

    Attributes:
        totals: sums over sequences, one per fold; the totals of several processes add up.
        sum_dtype: the least precision of the totals.
        flags: booleans from the first sequence that hold for all, such as the visible cells.
        n_seen: how many sequences of this process are in the totals.
        reads_attention: whether it reads the inputs of attention.
    """

    layer: Layer
    reads_attention = False
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

    def reset(self) -> None:  # noqa: B027  (most accumulators add what they read at once)
        """Drop the tensors of a forward pass."""

    def read(self, attention: Attention) -> None:
        """Add the attention of one forward pass."""
        raise NotImplementedError(f"{type(self).__name__} does not read attention")

    def read_logits(  # noqa: B027  (most accumulators read hook points alone)
        self, logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"]
    ) -> None:
        """Read the logits of a pass that ran to the end; by default they are ignored."""

    def start_batch(self, fold_of: Int[Tensor, " batch"], upto: int) -> None:
        """Set the folds of the next batch, and how many sequences are counted with it."""
        self.fold_of, self.upto = fold_of, upto

    @property
    def already_counted(self) -> bool:
        """Whether the sequences of this batch are in the totals already."""
        return self.upto <= self.n_seen

    @property
    def names(self) -> list[str]:
        """The names of the totals, in an order that all processes share."""
        return sorted(self.totals)

    def add(self, **parts: Sequence[Part]) -> None:
        """Add a batch to the totals: all of it or, if memory runs out, nothing."""
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
            zeros = torch.zeros(self.n_folds, *shape, dtype=dtype, device=tensor.device)
            self.totals[name] = zeros
        self.totals[name] = self.totals[name].to(tensor.device)


class MapAccumulator(Accumulator):
    """Sums the rows of a map, for all queries or for chosen queries.

    Attributes:
        flags: `visible`: the cells of the rows that the model does not mask.
    """

    def __init__(self, layer: Layer, n_folds: int, query_positions: QueryPositions = None) -> None:
        super().__init__(n_folds)
        self.layer, self.query_positions = layer, query_positions

    @property
    def groups(self) -> list[RowGroup]:
        """The groups of rows that are added up together."""
        return row_groups(self.query_positions, self.flags["visible"].shape[-1])

    def see(self, mask: Mask) -> None:
        """Keep the cells of the rows that all heads see in the first sequence."""
        if "visible" in self.flags:
            return
        rows = slice(None) if self.query_positions is None else self.query_positions
        visible = mask.rows(rows)[0].all(0)
        if self.query_positions is not None:
            before = torch.arange(mask.n_keys) <= self.query_positions[:, None]
            visible = visible & before.to(visible.device)
        self.flags["visible"] = visible.clone()

    def joined(
        self, blocks: Iterable[Float[Tensor, "*batch row key_pos"]]
    ) -> Float[Tensor, "*batch row key_pos"]:
        """Return the map from its rows by groups, NaN where the model masks."""
        return join_groups(blocks, self.groups, self.flags["visible"].cpu())

    def means(
        self, name: str, counts: Int[Tensor, " fold"]
    ) -> Iterator[Float[Tensor, "fold row key_pos"]]:
        """Yield the fold means of a total by groups of rows, and forget the sums of each group."""
        for group in self.groups:
            yield self.totals.pop(name + group.name).cpu() / counts[:, None, None]


class GramAccumulator(MapAccumulator):
    """Sums inner products of one stage's vectors, per fold."""

    def __init__(
        self, stage: Stage, layer: Layer, n_folds: int, query_positions: QueryPositions = None
    ) -> None:
        super().__init__(layer, n_folds, query_positions)
        self.stage = stage
        self.latest: Tensor | None = None

    def hooks(self) -> Iterator[Attachment]:
        yield self.layer.point(hook_name(self.stage, self.layer)), self.keep
        yield self.layer.point("hook_resid_post"), self.update

    def keep(self, tensor: Tensor, hook: HookPoint) -> None:
        """Keep the stage's tensor of this pass."""
        # HookedTransformer fires ln1.hook_normalized three times a pass: keep, add once.
        self.latest = tensor

    def update(self, tensor: Tensor, hook: HookPoint) -> None:
        """Add the inner products of the tensor that was kept."""
        if self.latest is not None and not self.already_counted:
            x = vectors(self.stage, self.layer, self.latest)
            self.see(Mask.full(x.shape[1], x.shape[1], x.device))
            parts = {
                f"products{group.name}": product_parts(
                    x[:, group.queries], x[:, : group.stop], self.fold_of, self.n_folds
                )
                for group in self.groups
            }
            self.add(**parts)
        self.reset()

    def reset(self) -> None:
        self.latest = None

    def fold_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold row col_pos"]:
        """Return the mean Gram map of each fold, and forget the sums."""
        return self.joined(self.means("products", counts))


class ScoreAccumulator(MapAccumulator):
    """Sums one layer's scores over heads and sequences, per fold.

    Where q.k gives the scores, their mean over heads and sequences is one matrix product.

    Attributes:
        flags: `visible`: the cells that the model does not mask; `scale`: the factor between the
            sum of q.k over heads and the mean of their scores.
    """

    reads_attention = True

    def __init__(
        self,
        layer: Layer,
        n_folds: int,
        mean_term: bool = False,
        query_positions: QueryPositions = None,
    ) -> None:
        super().__init__(layer, n_folds, query_positions)
        self.keeps_means = mean_term

    def read(self, attention: Attention) -> None:
        """Add one batch's scores.

        Raises:
            NotImplementedError: for the mean term of scores that are not q.k.
        """
        if self.already_counted:
            return
        scale = attention.scale / attention.n_heads
        self.see(attention.mask)
        self.flags.setdefault("scale", torch.tensor(scale, dtype=torch.float64))
        folds, parts = (self.fold_of, self.n_folds), dict[str, list[Part]]()
        if not (attention.is_product or self.keeps_means):
            for group in self.groups:
                scores = attention.scores(group.queries)[..., : group.stop]
                over_heads = scores.mean(dim=1, dtype=torch.float64)
                parts[f"scores{group.name}"] = sum_parts(over_heads, *folds)
            self.add(**parts)
            return
        if not attention.equals_product():
            raise NotImplementedError(
                f"the scores of L{self.layer.index} are not q.k: they have no mean term"
            )
        q = sum_query_groups(attention.q, attention.k.shape[2]).flatten(2)
        k = attention.k.flatten(2)
        for group in self.groups:
            rows = q[:, group.queries] * scale
            parts[f"scores{group.name}"] = product_parts(rows, k[:, : group.stop], *folds)
        if self.keeps_means:
            parts |= {"q": sum_parts(q, *folds), "k": sum_parts(k, *folds)}
        self.add(**parts)

    def fold_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold row key_pos"]:
        """Return the mean scores of each fold, in nats, and forget the sums.

        They are NaN where the model masks.
        """
        return self.joined(self.means("scores", counts))

    def mean_term(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold row key_pos"]:
        """Return M = (N qbar.kbar - S) / (N - 1), without bias in each fold.

        Call this before `key_means` and `fold_means`: they forget the sums of keys and scores, and
        the mean term needs both.
        """
        return self.joined(self._mean_terms(counts))

    def _mean_terms(
        self, counts: Int[Tensor, " fold"]
    ) -> Iterator[Float[Tensor, "fold row key_pos"]]:
        n, scale = counts[:, None, None].double(), self.flags["scale"].cpu()
        q, k = (self.totals[name].cpu() / n for name in ("q", "k"))
        for group in self.groups:
            scores = self.totals[f"scores{group.name}"].cpu()
            product = torch.einsum("fqw,fkw->fqk", q[:, group.queries], k[:, : group.stop])
            yield (n * (product * scale) - scores / n) / (n - 1)

    def key_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold pos width"]:
        """Return each position's mean key, key heads concatenated, and forget the sum."""
        return self.totals.pop("k").cpu() / counts[:, None, None]


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
        self.see(attention.mask)
        if not attention.is_product:
            # A sequence at a time: n_folds sums of heads would take as much memory again.
            parts = dict[str, list[Part]]()
            for group in self.groups:
                scores = attention.scores(group.queries)[..., : group.stop]
                of_group = list(zip(self.fold_of.tolist(), scores, strict=True))
                parts[f"scores{group.name}"] = of_group
            self.add(**parts)
            return
        q, n_heads = attention.q, attention.n_heads
        left = q.to(torch.promote_types(q.dtype, self.sum_dtype))
        right = repeat_heads(attention.k.to(left.dtype), n_heads)
        for group in self.groups:
            rows, keys, name = left[:, group.queries], right[:, : group.stop], f"scores{group.name}"
            shape = n_heads, rows.shape[1], group.stop
            self._make_room(name, 0, left.new_empty(1).expand(shape))
            # The products add in place: no further tensor holds these cells for every head.
            for total, product in head_products(self.totals[name], rows, keys, self.fold_of):
                total.baddbmm_(*product, alpha=attention.scale)
        self.n_seen = self.upto

    def fold_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold head row key_pos"]:
        """Return the mean scores of each fold and head, in nats, and forget the sums.

        They are NaN where the model masks.
        """
        with torch.inference_mode():  # in place, since they are gigabytes
            return self.joined(self._means(counts))

    def _means(
        self, counts: Int[Tensor, " fold"]
    ) -> Iterator[Float[Tensor, "fold head row key_pos"]]:
        for group in self.groups:
            sums = self.totals.pop(f"scores{group.name}").cpu()
            yield sums.div_(counts[:, None, None, None].to(sums.dtype))
