"""Running sums over sequences of what one block computes: scores, Gram maps, heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import (
    relative_error,
    repeat_heads,
    sum_query_groups,
    unmasked,
)
from nope_probe.hooks.layers.base_layer import Heads, Keys, Layer, Visible
from nope_probe.hooks.layers.protocols import Attachment, HookPoint
from nope_probe.hooks.layers.qk_reader import QKReader
from nope_probe.hooks.reading.stages import Stage, hook_name, vectors
from nope_probe.maps.folds import Part, State, head_products, product_parts, sum_parts


class Accumulator(ABC):
    """Running sums of one block, added to once per forward pass.

    A pass that runs out of memory has been counted by the blocks before the one that did; when its
    sequences are run again in smaller batches, `already_counted` tells these blocks to skip them.

    Attributes:
        totals: sums over sequences, one per fold; those of several processes add up.
        sum_dtype: the least precision of the totals.
        flags: booleans that the first sequence shows for all, such as which cells are visible.
        n_seen: how many sequences of this process are in the totals.
        reads: what it reads of attention: the `scores` (or weights) of every head, q and k before
            their `product`, or `nothing` that fused attention leaves out.
    """

    layer: Layer
    reads: Literal["scores", "product", "nothing"] = "scores"
    sum_dtype = torch.float64

    def __init__(self, n_folds: int) -> None:
        self.n_folds = n_folds
        self.totals: State = {}
        self.flags: State = {}
        self.n_seen = self.upto = 0
        self.fold_of: Tensor

    @abstractmethod
    def hooks(self) -> Iterable[Attachment]:
        """Return the hooks that read a forward pass, and last the one that adds it."""

    @abstractmethod
    def reset(self) -> None:
        """Drop what was read of a forward pass."""

    def read_product(self, q: Heads, k: Keys, visible: Visible) -> None:
        """Add what q and k of a forward pass with fused attention give."""
        raise NotImplementedError(f"{type(self).__name__} does not read q and k")

    def read_logits(  # noqa: B027  (most accumulators read hook points alone)
        self, logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"]
    ) -> None:
        """Read the logits of a pass that ran to the end; by default nothing is read of them."""

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


class GramAccumulator(Accumulator):
    """Sums inner products of one stage's vectors, per fold."""

    reads = "nothing"

    def __init__(self, stage: Stage, layer: Layer, n_folds: int) -> None:
        super().__init__(n_folds)
        self.stage, self.layer = stage, layer
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
            self.add(products=product_parts(x, x, self.fold_of, self.n_folds))
        self.reset()

    def reset(self) -> None:
        self.latest = None

    def fold_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold row_pos col_pos"]:
        """Return the mean Gram map of each fold."""
        return self.totals["products"].cpu() / counts[:, None, None]


class ScoreAccumulator(Accumulator):
    """Sums one layer's scores over heads and sequences, per fold.

    Where q.k gives the scores, their mean over heads and sequences is one matrix product.

    Attributes:
        flags: `visible`: which cells the model does not mask; `from_product`: whether scores are
            q.k times the scale.
    """

    reads = "product"

    def __init__(self, layer: Layer, n_folds: int, mean_term: bool = False) -> None:
        super().__init__(n_folds)
        self.layer, self.keeps_means = layer, mean_term
        self.reader = QKReader(layer)
        self.point = layer.point("attn.hook_attn_scores")
        self.may_be_rewritten = False

    def hooks(self) -> Iterator[Attachment]:
        self.may_be_rewritten = bool(self.point.fwd_hooks)
        yield from self.reader.hooks()
        yield self.point, self.update

    def update(self, scores: Tensor, hook: HookPoint) -> None:
        """Add one batch's scores.

        Raises:
            NotImplementedError: if the mean term is asked for and the scores are not q.k.
        """
        if not self.already_counted:
            self.flags = self.flags or self._flags(scores)
            if self.keeps_means and not self.flags["from_product"]:
                raise NotImplementedError(
                    f"the scores of L{self.layer.index} are not q.k: they have no mean term"
                )
            self.add(**self._parts(scores))
        self.reset()

    def read_product(self, q: Heads, k: Keys, visible: Visible) -> None:
        if not self.already_counted:
            from_product = torch.tensor(True, device=visible.device)
            self.flags = self.flags or {"visible": visible, "from_product": from_product}
            self.add(**self._product_parts(q, k))

    def reset(self) -> None:
        self.reader.reset()

    def _parts(
        self, scores: Float[Tensor, "batch head query_pos key_pos"]
    ) -> dict[str, list[Part]]:
        folds = self.fold_of, self.n_folds
        # One head's scores are there already: a product is faster only for the mean over several.
        is_faster = bool(self.flags["from_product"]) and self.layer.n_heads > 1
        if not (is_faster or self.keeps_means):
            one_head = scores.shape[1] == 1
            over_heads = scores[:, 0] if one_head else scores.mean(dim=1, dtype=torch.float64)
            return {"scores": sum_parts(over_heads, *folds)}
        return self._product_parts(self.reader.read("q"), self.reader.read("k"))

    def _product_parts(self, q: Heads, k: Keys) -> dict[str, list[Part]]:
        folds = self.fold_of, self.n_folds
        q = sum_query_groups(q, k.shape[2]).flatten(2)
        k, per_head = k.flatten(2), self.layer.scale / self.layer.n_heads
        parts = {"scores": product_parts(q * per_head, k, *folds)}
        if self.keeps_means:
            parts |= {"q": sum_parts(q, *folds), "k": sum_parts(k, *folds)}
        return parts

    def _flags(self, scores: Float[Tensor, "batch head query_pos key_pos"]) -> State:
        """Find on the first sequence which cells are masked, and whether q.k gives the rest."""
        visible = unmasked(scores[0]).all(0)  # in all heads, of which some may lose the mask
        if self.may_be_rewritten and not self.keeps_means:
            # Another hook may rewrite the scores of later sequences: they are read as they are.
            return {"visible": visible, "from_product": torch.tensor(False)}
        product = self.layer.scores(self.reader.read("q")[:1], self.reader.read("k")[:1])
        error = relative_error(product[..., visible], scores[:1][..., visible])
        is_close = error <= max(1e-5, 4 * torch.finfo(scores.dtype).eps)
        from_product = self.layer.soft_cap is None and is_close
        return {"visible": visible, "from_product": torch.tensor(from_product)}

    def fold_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold query_pos key_pos"]:
        """Return the mean scores of each fold, in nats; NaN where the model masks."""
        return self._masked(self.totals["scores"].cpu() / counts[:, None, None])

    def mean_term(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold query_pos key_pos"]:
        """Return M = (N qbar.kbar - S) / (N - 1), without bias in each fold."""
        scores, q, k = (self.totals[name].cpu() for name in ("scores", "q", "k"))
        n = counts[:, None, None].double()
        product = torch.einsum("fqw,fkw->fqk", q / n, k / n)
        product = product * (self.layer.scale / self.layer.n_heads)
        return self._masked((n * product - scores / n) / (n - 1))

    def key_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold pos width"]:
        """Return each position's mean key, key heads concatenated."""
        return self.totals["k"].cpu() / counts[:, None, None]

    def _masked(self, means: Tensor) -> Tensor:
        return means.masked_fill_(~self.flags["visible"].cpu(), torch.nan)


class HeadAccumulator(Accumulator):
    """Sums one layer's scores over sequences, per fold and head, at 4 bytes a cell.

    Sums of N terms in float32 are off by sqrt(N) 3e-8 of their RMS as a rule, N 6e-8 at most.
    """

    reads = "product"
    sum_dtype = torch.float32

    def __init__(self, layer: Layer, n_folds: int) -> None:
        super().__init__(n_folds)
        self.layer = layer
        self.point = layer.point("attn.hook_attn_scores")

    def hooks(self) -> Iterator[Attachment]:
        yield self.point, self.update

    def update(self, scores: Tensor, hook: HookPoint) -> None:
        """Add one batch's scores."""
        if self.already_counted:
            return
        self.flags = self.flags or {"visible": unmasked(scores[0]).all(0)}
        # Sequence by sequence: n_folds sums of heads would take as much memory again.
        self.add(scores=list(zip(self.fold_of.tolist(), scores, strict=True)))

    def read_product(self, q: Heads, k: Keys, visible: Visible) -> None:
        if self.already_counted:
            return
        self.flags = self.flags or {"visible": visible}
        left = q.to(torch.promote_types(q.dtype, self.sum_dtype))
        right = repeat_heads(k.to(left.dtype), self.layer.n_heads)
        shape = self.layer.n_heads, q.shape[1], q.shape[1]
        self._make_room("scores", 0, left.new_empty(1).expand(shape))
        # Added by the products themselves: no further tensor has these cells for every head.
        for total, product in head_products(self.totals["scores"], left, right, self.fold_of):
            total.baddbmm_(*product, alpha=self.layer.scale)
        self.n_seen = self.upto

    def reset(self) -> None:
        """Do nothing: scores are added as they are read."""

    def fold_means(
        self, counts: Int[Tensor, " fold"]
    ) -> Float[Tensor, "fold head query_pos key_pos"]:
        """Return the mean scores of each fold and head, in nats, and forget the sums.

        They are NaN where the model masks.
        """
        with torch.inference_mode():  # in place, since they are gigabytes
            sums = self.totals.pop("scores").cpu()
            means = sums.div_(counts[:, None, None, None].to(sums.dtype))
            return means.masked_fill_(~self.flags["visible"].cpu(), torch.nan)
