"""Running sums of one block's maps, updated inside the hook that sees the tensor.

Sums are kept in float64, one per fold; no batch's per-head map outlives its hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.layer import Layer
from nope_probe.hooks.stages import Stage, hook_name, vectors
from nope_probe.hooks.tap import Tap


class GramMeter:
    """Sums inner products of one stage's vectors, per fold."""

    def __init__(self, stage: Stage, layer: Layer, n_folds: int) -> None:
        self.stage, self.layer, self.n_folds = stage, layer, n_folds
        self.sums: Tensor
        self.latest: Tensor
        self.fold_of: Tensor

    def hooks(self) -> Iterator[tuple[Any, Any]]:
        """Give the hooks that keep the stage's tensor and add it when the block is done."""
        yield self.layer.point(hook_name(self.stage, self.layer)), self.update
        yield self.layer.point("hook_resid_post"), self.flush

    def update(self, tensor: Tensor, hook: object) -> None:
        """Keep the tensor of this pass."""
        # HookedTransformer fires ln1.hook_normalized three times a pass: keep, add once.
        self.latest = tensor

    def flush(self, tensor: Tensor, hook: object) -> None:
        """Add the inner products of the tensor that was kept."""
        x = vectors(self.stage, self.layer, self.latest)
        add(self, "sums", fold_products(x, x, self.fold_of, self.n_folds))

    def score_means(self, counts: Tensor) -> Tensor:
        """Divide the sums by the sequences per fold."""
        return self.sums.cpu() / counts[:, None, None]


class ScoreMeter:
    """Sums one layer's scores over heads and sequences, per fold."""

    def __init__(self, layer: Layer, n_folds: int, routes: bool = False) -> None:
        self.layer, self.n_folds, self.routes = layer, n_folds, routes
        self.tap = Tap(layer)
        self.point = layer.point("attn.hook_attn_scores")
        self.looked = self.from_product = self.rewritten = False
        self.visible: Tensor
        self.sums: Tensor
        self.q_sums: Tensor
        self.k_sums: Tensor
        self.fold_of: Tensor

    def hooks(self) -> Iterator[tuple[Any, Any]]:
        """Give the hooks that read q and k, and the one that adds the scores."""
        self.rewritten = bool(self.point.fwd_hooks)
        yield from self.tap.hooks()
        yield self.point, self.update

    def update(self, scores: Tensor, hook: object) -> None:
        """Add one batch's scores, from q.k where that is seen to give them."""
        if not self.looked:
            self._look(scores)
        # One head's scores are there already; a product pays where it stands for many heads.
        if self.routes or (self.from_product and self.layer.n_heads > 1):
            q, k = summed_over_groups(self.tap.read("q"), self.layer.n_kv_heads), self.tap.read("k")
            per_head = self.layer.scale / self.layer.n_heads
            new = fold_products(q.flatten(2) * per_head, k.flatten(2), self.fold_of, self.n_folds)
        else:
            one_head = scores.shape[1] == 1
            over_heads = scores[:, 0] if one_head else scores.mean(dim=1, dtype=torch.float64)
            new = fold_sums(over_heads, self.fold_of, self.n_folds)
        add(self, "sums", new)
        if self.routes:
            add(self, "q_sums", fold_sums(q.flatten(2), self.fold_of, self.n_folds))
            add(self, "k_sums", fold_sums(k.flatten(2), self.fold_of, self.n_folds))

    def _look(self, scores: Tensor) -> None:
        """Find on the first sequence which cells are masked, and whether q.k gives the rest."""
        self.looked, self.visible = True, unmasked(scores[0, 0])
        if self.rewritten and not self.routes:
            return  # another hook may rewrite the scores: they are read as they are
        product = self.layer.scores(self.tap.read("q")[:1], self.tap.read("k")[:1])
        error = (product - scores[:1])[..., self.visible].abs().max()
        relative = max(1e-5, 4 * torch.finfo(scores.dtype).eps)
        close = error <= relative * scores[:1, :, self.visible].abs().max()
        self.from_product = self.layer.soft_cap is None and bool(close)
        if self.routes and not self.from_product:
            raise NotImplementedError(
                f"the scores of layer {self.layer.index + 1} are not q.k: they have no mean route"
            )

    def score_means(self, counts: Tensor) -> Tensor:
        """Divide the sums by the sequences per fold."""
        return self._masked(self.sums / counts.to(self.sums.device)[:, None, None])

    def mean_route(self, counts: Tensor) -> Tensor:
        """M = (N qbar.kbar - S) / (N - 1), without bias in each fold."""
        n = counts.to(self.sums.device)[:, None, None].double()
        product = torch.einsum("fqw,fkw->fqk", self.q_sums / n, self.k_sums / n)
        product = product * (self.layer.scale / self.layer.n_heads)
        return self._masked((n * product - self.sums / n) / (n - 1))

    def key_means(self, counts: Tensor) -> Tensor:
        """Give each position's mean key, key heads concatenated."""
        return (self.k_sums / counts.to(self.k_sums.device)[:, None, None]).cpu()

    def _masked(self, means: Tensor) -> Tensor:
        return means.masked_fill(~self.visible, torch.nan).cpu()


class HeadMeter:
    """Sums one layer's scores over sequences, per fold and head: 8 bytes a cell are kept."""

    def __init__(self, layer: Layer, n_folds: int) -> None:
        self.n_folds = n_folds
        self.point = layer.point("attn.hook_attn_scores")
        self.sums: Tensor | None = None
        self.visible: Tensor
        self.fold_of: Tensor

    def hooks(self) -> Iterator[tuple[Any, Any]]:
        yield self.point, self.update

    def update(self, scores: Tensor, hook: object) -> None:
        if self.sums is None:
            shape = (self.n_folds, *scores.shape[1:])
            self.sums = torch.zeros(shape, dtype=torch.float64, device=scores.device)
            self.visible = unmasked(scores[0, 0])
        for fold in self.fold_of.unique().tolist():
            ours = (self.fold_of == fold).to(scores.device)
            self.sums[fold] += scores[ours].sum(0, dtype=torch.float64)

    def score_means(self, counts: Tensor) -> Tensor:
        if self.sums is None:
            raise RuntimeError("no scores were seen")
        means = self.sums / counts.to(self.sums.device)[:, None, None, None]
        return means.masked_fill(~self.visible, torch.nan).cpu()


def unmasked(scores: Float[Tensor, "query_pos key_pos"]) -> Bool[Tensor, "query_pos key_pos"]:
    """Tell which cells a model left open.

    Masked ones are -inf on HookedTransformer and finfo.min on bridges. A NaN is open: it must show.
    """
    return ~(scores <= torch.finfo(scores.dtype).min / 2)


def summed_over_groups(
    q: Float[Tensor, "batch pos head d_head"], n_kv_heads: int
) -> Float[Tensor, "batch pos kv_head d_head"]:
    """Sum the queries that share a key head: the sum of their scores is one inner product."""
    return reduce(
        q, "batch pos (kv_head group) d_head -> batch pos kv_head d_head", "sum", kv_head=n_kv_heads
    )


def fold_products(
    x: Float[Tensor, "batch row_pos width"],
    y: Float[Tensor, "batch col_pos width"],
    fold_of: Int[Tensor, " batch"],
    n_folds: int,
) -> Float[Tensor, "fold row_pos col_pos"]:
    """Sum x_i.y_j over the sequences of each fold, as one matrix product per fold.

    Whole rounds of folds, dealt in order, take one batched product.
    """
    at_least_float32 = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(at_least_float32), y.to(at_least_float32)
    if dealt_in_rounds(fold_of, n_folds):
        left = rearrange(x, "(seq fold) pos width -> fold pos (seq width)", fold=n_folds)
        right = rearrange(y, "(seq fold) pos width -> fold (seq width) pos", fold=n_folds)
        return left @ right
    products = []
    for fold in range(n_folds):
        ours = (fold_of == fold).nonzero().flatten().to(x.device)
        left = rearrange(x[ours], "seq pos width -> pos (seq width)")
        right = rearrange(y[ours], "seq pos width -> (seq width) pos")
        products.append(left @ right)
    return torch.stack(products)


def dealt_in_rounds(fold_of: Int[Tensor, " batch"], n_folds: int) -> bool:
    """Tell whether a batch holds whole rounds of the folds 0, 1, 2, ..., in order."""
    whole = len(fold_of) % n_folds == 0
    return whole and torch.equal(fold_of, torch.arange(len(fold_of)) % n_folds)


def fold_sums(
    x: Float[Tensor, "batch *rest"], fold_of: Int[Tensor, " batch"], n_folds: int
) -> Float[Tensor, "fold *rest"]:
    """Sum over the sequences of each fold."""
    if dealt_in_rounds(fold_of, n_folds):
        rounds = rearrange(x, "(seq fold) ... -> seq fold ...", fold=n_folds)
        return rounds.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).double()
    zeros = torch.zeros(n_folds, *x.shape[1:], dtype=torch.float64, device=x.device)
    return zeros.index_add_(0, fold_of.to(x.device), x.double())


def add(meter: GramMeter | ScoreMeter, name: str, new: Tensor) -> None:
    """Add to a meter's running total in float64, or start it."""
    total = getattr(meter, name, None)
    setattr(meter, name, new.double() if total is None else total.add_(new))
