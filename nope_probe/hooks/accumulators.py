"""Running sums over sequences of what one block computes: scores, Gram maps, heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nope_probe.hooks.folds import Part, product_parts, sum_parts
from nope_probe.hooks.forward import Installation
from nope_probe.hooks.layer import Layer, summed_over_groups, unmasked
from nope_probe.hooks.qk_reader import QKReader
from nope_probe.hooks.stages import Stage, hook_name, vectors

State = dict[str, Tensor]


class Accumulator(ABC):
    """Running sums of one block, added to once per forward pass.

    A pass that runs out of memory has been counted by the blocks before the one that did; when its
    sequences are run again in smaller batches, `already_counted` tells these blocks to skip them.

    Attributes:
        totals: sums over sequences, float64, one per fold; those of several processes add up.
        facts: what the first sequence shows and holds for all, such as which cells are masked.
        n_seen: how many sequences of this process are in the totals.
    """

    def __init__(self, n_folds: int) -> None:
        self.n_folds = n_folds
        self.totals: State = {}
        self.facts: State = {}
        self.n_seen = self.upto = 0
        self.fold_of: Tensor

    @abstractmethod
    def hooks(self) -> Iterable[Installation]:
        """Return the hooks that read a forward pass, and last the one that adds it."""

    @abstractmethod
    def reset(self) -> None:
        """Drop what was read of a forward pass."""

    def start_batch(self, fold_of: Tensor, upto: int) -> None:
        """Note the folds of the next batch, and how many sequences are counted with it."""
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
            if name not in self.totals:
                where, tensor = some[0]
                shape = tensor.shape[1:] if isinstance(where, slice) else tensor.shape
                zeros = torch.zeros(self.n_folds, *shape, dtype=torch.float64, device=tensor.device)
                self.totals[name] = zeros
            self.totals[name] = self.totals[name].to(some[0][1].device)  # a restored one's is not
        for name, some in parts.items():
            for where, tensor in some:
                self.totals[name][where].add_(tensor)
        self.n_seen = self.upto


class GramAccumulator(Accumulator):
    """Sums inner products of one stage's vectors, per fold."""

    def __init__(self, stage: Stage, layer: Layer, n_folds: int) -> None:
        super().__init__(n_folds)
        self.stage, self.layer = stage, layer
        self.latest: Tensor | None = None

    def hooks(self) -> Iterator[Installation]:
        """Give the hooks that keep the stage's tensor and add it when the block is done."""
        yield self.layer.point(hook_name(self.stage, self.layer)), self.update
        yield self.layer.point("hook_resid_post"), self.flush

    def update(self, tensor: Tensor, hook: object) -> None:
        """Keep the tensor of this pass."""
        # HookedTransformer fires ln1.hook_normalized three times a pass: keep, add once.
        self.latest = tensor

    def flush(self, tensor: Tensor, hook: object) -> None:
        """Add the inner products of the tensor that was kept."""
        if self.latest is not None and not self.already_counted:
            x = vectors(self.stage, self.layer, self.latest)
            self.add(products=product_parts(x, x, self.fold_of, self.n_folds))
        self.reset()

    def reset(self) -> None:
        self.latest = None

    def score_means(self, counts: Tensor) -> Tensor:
        """Divide the sums by the sequences per fold."""
        return self.totals["products"].cpu() / counts[:, None, None]


class ScoreAccumulator(Accumulator):
    """Sums one layer's scores over heads and sequences, per fold."""

    def __init__(self, layer: Layer, n_folds: int, mean_term: bool = False) -> None:
        super().__init__(n_folds)
        self.layer, self.keeps_means = layer, mean_term
        self.reader = QKReader(layer)
        self.point = layer.point("attn.hook_attn_scores")
        self.rewritten = False

    def hooks(self) -> Iterator[Installation]:
        """Give the hooks that read q and k, and the one that adds the scores."""
        self.rewritten = bool(self.point.fwd_hooks)
        yield from self.reader.hooks()
        yield self.point, self.update

    def update(self, scores: Tensor, hook: object) -> None:
        """Add one batch's scores, from q.k where that is seen to give them."""
        if not self.already_counted:
            if not self.facts:
                self.facts = self._look(scores)
            if self.keeps_means and not self.facts["from_product"]:
                raise NotImplementedError(
                    f"the scores of L{self.layer.index} are not q.k: they have no mean term"
                )
            self.add(**self._parts(scores))
        self.reset()

    def reset(self) -> None:
        self.reader.seen.clear()

    def _parts(self, scores: Tensor) -> dict[str, list[Part]]:
        folds = self.fold_of, self.n_folds
        # One head's scores are there already; a product pays where it stands for many heads.
        pays = bool(self.facts["from_product"]) and self.layer.n_heads > 1
        if not (pays or self.keeps_means):
            one_head = scores.shape[1] == 1
            over_heads = scores[:, 0] if one_head else scores.mean(dim=1, dtype=torch.float64)
            return {"scores": sum_parts(over_heads, *folds)}
        q, k = (
            summed_over_groups(self.reader.read("q"), self.layer.n_kv_heads),
            self.reader.read("k"),
        )
        q, k, per_head = q.flatten(2), k.flatten(2), self.layer.scale / self.layer.n_heads
        parts = {"scores": product_parts(q * per_head, k, *folds)}
        if self.keeps_means:
            parts |= {"q": sum_parts(q, *folds), "k": sum_parts(k, *folds)}
        return parts

    def _look(self, scores: Tensor) -> dict[str, Tensor]:
        """Find on the first sequence which cells are masked, and whether q.k gives the rest."""
        visible = unmasked(scores[0, 0])
        facts = {"visible": visible, "from_product": torch.tensor(False)}
        if self.rewritten and not self.keeps_means:
            return facts  # another hook may rewrite the scores: they are read as they are
        product = self.layer.scores(self.reader.read("q")[:1], self.reader.read("k")[:1])
        error = (product - scores[:1])[..., visible].abs().max()
        relative = max(1e-5, 4 * torch.finfo(scores.dtype).eps)
        close = error <= relative * scores[:1, :, visible].abs().max()
        facts["from_product"] = torch.tensor(self.layer.soft_cap is None and bool(close))
        return facts

    def score_means(self, counts: Tensor) -> Tensor:
        """Divide the sums by the sequences per fold."""
        return self._masked(self.totals["scores"].cpu() / counts[:, None, None])

    def mean_term(self, counts: Tensor) -> Tensor:
        """M = (N qbar.kbar - S) / (N - 1), without bias in each fold."""
        scores, q, k = (self.totals[name].cpu() for name in ("scores", "q", "k"))
        n = counts[:, None, None].double()
        product = torch.einsum("fqw,fkw->fqk", q / n, k / n)
        product = product * (self.layer.scale / self.layer.n_heads)
        return self._masked((n * product - scores / n) / (n - 1))

    def key_means(self, counts: Tensor) -> Tensor:
        """Give each position's mean key, key heads concatenated."""
        return self.totals["k"].cpu() / counts[:, None, None]

    def _masked(self, means: Tensor) -> Tensor:
        return means.masked_fill_(~self.facts["visible"].cpu(), torch.nan)


class HeadAccumulator(Accumulator):
    """Sums one layer's scores over sequences, per fold and head: 8 bytes a cell are kept."""

    def __init__(self, layer: Layer, n_folds: int) -> None:
        super().__init__(n_folds)
        self.point = layer.point("attn.hook_attn_scores")

    def hooks(self) -> Iterator[Installation]:
        yield self.point, self.update

    def update(self, scores: Tensor, hook: object) -> None:
        if self.already_counted:
            return
        if not self.facts:
            self.facts = {"visible": unmasked(scores[0, 0])}
        # Sequence by sequence: n_folds sums of heads would take as much memory again.
        self.add(scores=list(zip(self.fold_of.tolist(), scores, strict=True)))

    def reset(self) -> None:
        """Do nothing: the scores are not kept."""

    def score_means(self, counts: Tensor) -> Tensor:
        if not self.totals:
            raise RuntimeError("no scores were seen")
        means = self.totals["scores"].cpu() / counts[:, None, None, None]
        return means.masked_fill_(~self.facts["visible"].cpu(), torch.nan)
