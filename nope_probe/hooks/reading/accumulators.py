"""Running sums over sequences of what one block computes: scores, Gram maps, heads."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention, repeat_heads, sum_query_groups
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.protocols import Attachment, HookPoint
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
        reads_attention: whether it reads what attention is computed from.
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
        """Return the hooks that read a forward pass, and last the one that adds it."""
        return ()

    def reset(self) -> None:  # noqa: B027  (most accumulators add what they read at once)
        """Drop what was read of a forward pass."""

    def read(self, attention: Attention) -> None:
        """Add what attention is computed from in one forward pass."""
        raise NotImplementedError(f"{type(self).__name__} does not read attention")

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
        flags: `visible`: which cells the model does not mask; `scale`: the factor between the sum
            of q.k over heads and the mean of their scores.
    """

    reads_attention = True

    def __init__(self, layer: Layer, n_folds: int, mean_term: bool = False) -> None:
        super().__init__(n_folds)
        self.layer, self.keeps_means = layer, mean_term

    def read(self, attention: Attention) -> None:
        """Add one batch's scores.

        Raises:
            NotImplementedError: if the mean term is asked for and the scores are not q.k.
        """
        if self.already_counted:
            return
        scale = attention.scale / attention.n_heads
        self.flags = self.flags or {
            "visible": attention.visible_to_all.clone(),
            "scale": torch.tensor(scale, dtype=torch.float64),
        }
        folds = self.fold_of, self.n_folds
        if not (attention.is_product or self.keeps_means):
            over_heads = attention.scores().mean(dim=1, dtype=torch.float64)
            self.add(scores=sum_parts(over_heads, *folds))
            return
        if not attention.equals_product():
            raise NotImplementedError(
                f"the scores of L{self.layer.index} are not q.k: they have no mean term"
            )
        q = sum_query_groups(attention.q, attention.k.shape[2]).flatten(2)
        k = attention.k.flatten(2)
        parts = {"scores": product_parts(q * scale, k, *folds)}
        if self.keeps_means:
            parts |= {"q": sum_parts(q, *folds), "k": sum_parts(k, *folds)}
        self.add(**parts)

    def fold_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold query_pos key_pos"]:
        """Return the mean scores of each fold, in nats; NaN where the model masks."""
        return self._masked(self.totals["scores"].cpu() / counts[:, None, None])

    def mean_term(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold query_pos key_pos"]:
        """Return M = (N qbar.kbar - S) / (N - 1), without bias in each fold."""
        scores, q, k = (self.totals[name].cpu() for name in ("scores", "q", "k"))
        n = counts[:, None, None].double()
        product = torch.einsum("fqw,fkw->fqk", q / n, k / n)
        product = product * self.flags["scale"].cpu()
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

    reads_attention = True
    sum_dtype = torch.float32

    def __init__(self, layer: Layer, n_folds: int) -> None:
        super().__init__(n_folds)
        self.layer = layer

    def read(self, attention: Attention) -> None:
        """Add one batch's scores."""
        if self.already_counted:
            return
        self.flags = self.flags or {"visible": attention.visible_to_all.clone()}
        if not attention.is_product:
            # Sequence by sequence: n_folds sums of heads would take as much memory again.
            self.add(scores=list(zip(self.fold_of.tolist(), attention.scores(), strict=True)))
            return
        q, n_heads = attention.q, attention.n_heads
        left = q.to(torch.promote_types(q.dtype, self.sum_dtype))
        right = repeat_heads(attention.k.to(left.dtype), n_heads)
        self._make_room("scores", 0, left.new_empty(1).expand(n_heads, q.shape[1], q.shape[1]))
        # Added by the products themselves: no further tensor has these cells for every head.
        for total, product in head_products(self.totals["scores"], left, right, self.fold_of):
            total.baddbmm_(*product, alpha=attention.scale)
        self.n_seen = self.upto

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
