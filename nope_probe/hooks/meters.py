"""Running sums of one block's maps, updated inside the hook that sees the tensor.

Sums are kept in float64, one per fold; no batch's per-head map outlives its hook.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.layer import Layer
from nope_probe.hooks.stages import Stage, hook_name, vectors
from nope_probe.hooks.stream import Meter, Part
from nope_probe.hooks.tap import Installation, Tap


class GramMeter(Meter):
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
        if self.latest is not None and not self.sits_out:
            x = vectors(self.stage, self.layer, self.latest)
            self.add(products=product_parts(x, x, self.fold_of, self.n_folds))
        self.forget()

    def forget(self) -> None:
        self.latest = None

    def score_means(self, counts: Tensor) -> Tensor:
        """Divide the sums by the sequences per fold."""
        return self.totals["products"].cpu() / counts[:, None, None]


class ScoreMeter(Meter):
    """Sums one layer's scores over heads and sequences, per fold."""

    def __init__(self, layer: Layer, n_folds: int, routes: bool = False) -> None:
        super().__init__(n_folds)
        self.layer, self.routes = layer, routes
        self.tap = Tap(layer)
        self.point = layer.point("attn.hook_attn_scores")
        self.rewritten = False

    def hooks(self) -> Iterator[Installation]:
        """Give the hooks that read q and k, and the one that adds the scores."""
        self.rewritten = bool(self.point.fwd_hooks)
        yield from self.tap.hooks()
        yield self.point, self.update

    def update(self, scores: Tensor, hook: object) -> None:
        """Add one batch's scores, from q.k where that is seen to give them."""
        if not self.sits_out:
            if not self.facts:
                self.facts = self._look(scores)
            if self.routes and not self.facts["from_product"]:
                raise NotImplementedError(
                    f"the scores of layer {self.layer.index + 1} are not q.k: no mean route"
                )
            self.add(**self._parts(scores))
        self.forget()

    def forget(self) -> None:
        self.tap.seen.clear()

    def _parts(self, scores: Tensor) -> dict[str, list[Part]]:
        folds = self.fold_of, self.n_folds
        # One head's scores are there already; a product pays where it stands for many heads.
        pays = bool(self.facts["from_product"]) and self.layer.n_heads > 1
        if not (pays or self.routes):
            one_head = scores.shape[1] == 1
            over_heads = scores[:, 0] if one_head else scores.mean(dim=1, dtype=torch.float64)
            return {"scores": sum_parts(over_heads, *folds)}
        q, k = summed_over_groups(self.tap.read("q"), self.layer.n_kv_heads), self.tap.read("k")
        q, k, per_head = q.flatten(2), k.flatten(2), self.layer.scale / self.layer.n_heads
        parts = {"scores": product_parts(q * per_head, k, *folds)}
        if self.routes:
            parts |= {"q": sum_parts(q, *folds), "k": sum_parts(k, *folds)}
        return parts

    def _look(self, scores: Tensor) -> dict[str, Tensor]:
        """Find on the first sequence which cells are masked, and whether q.k gives the rest."""
        visible = unmasked(scores[0, 0])
        facts = {"visible": visible, "from_product": torch.tensor(False)}
        if self.rewritten and not self.routes:
            return facts  # another hook may rewrite the scores: they are read as they are
        product = self.layer.scores(self.tap.read("q")[:1], self.tap.read("k")[:1])
        error = (product - scores[:1])[..., visible].abs().max()
        relative = max(1e-5, 4 * torch.finfo(scores.dtype).eps)
        close = error <= relative * scores[:1, :, visible].abs().max()
        facts["from_product"] = torch.tensor(self.layer.soft_cap is None and bool(close))
        return facts

    def score_means(self, counts: Tensor) -> Tensor:
        """Divide the sums by the sequences per fold."""
        return self._masked(self.totals["scores"].cpu() / counts[:, None, None])

    def mean_route(self, counts: Tensor) -> Tensor:
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


class HeadMeter(Meter):
    """Sums one layer's scores over sequences, per fold and head: 8 bytes a cell are kept."""

    def __init__(self, layer: Layer, n_folds: int) -> None:
        super().__init__(n_folds)
        self.point = layer.point("attn.hook_attn_scores")

    def hooks(self) -> Iterator[Installation]:
        yield self.point, self.update

    def update(self, scores: Tensor, hook: object) -> None:
        if self.sits_out:
            return
        if not self.facts:
            self.facts = {"visible": unmasked(scores[0, 0])}
        # Sequence by sequence: n_folds sums of heads would take as much memory again.
        self.add(scores=list(zip(self.fold_of.tolist(), scores, strict=True)))

    def forget(self) -> None:
        """Do nothing: the scores are not kept."""

    def score_means(self, counts: Tensor) -> Tensor:
        if not self.totals:
            raise RuntimeError("no scores were seen")
        means = self.totals["scores"].cpu() / counts[:, None, None, None]
        return means.masked_fill_(~self.facts["visible"].cpu(), torch.nan)


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
    """Sum x_i.y_j over the sequences of each fold, as one matrix product per fold."""
    parts = product_parts(x, y, fold_of, n_folds)
    if isinstance(parts[0][0], slice):
        return parts[0][1]
    sums = parts[0][1].new_zeros(n_folds, x.shape[1], y.shape[1])
    for fold, product in parts:
        sums[fold] = product
    return sums


def product_parts(
    x: Float[Tensor, "batch row_pos width"],
    y: Float[Tensor, "batch col_pos width"],
    fold_of: Int[Tensor, " batch"],
    n_folds: int,
) -> list[Part]:
    """Sum x_i.y_j over the sequences of each fold that is there, as one matrix product per fold.

    Whole rounds of folds, dealt in order, take one batched product.
    """
    at_least_float32 = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(at_least_float32), y.to(at_least_float32)
    if dealt_in_rounds(fold_of, n_folds):
        left = rearrange(x, "(seq fold) pos width -> fold pos (seq width)", fold=n_folds)
        right = rearrange(y, "(seq fold) pos width -> fold (seq width) pos", fold=n_folds)
        return [(slice(None), left @ right)]
    parts: list[Part] = []
    for fold in fold_of.unique().tolist():
        ours = (fold_of == fold).nonzero().flatten().to(x.device)
        left = rearrange(x[ours], "seq pos width -> pos (seq width)")
        right = rearrange(y[ours], "seq pos width -> (seq width) pos")
        parts.append((fold, left @ right))
    return parts


def dealt_in_rounds(fold_of: Int[Tensor, " batch"], n_folds: int) -> bool:
    """Tell whether a batch holds whole rounds of the folds 0, 1, 2, ..., in order."""
    whole = len(fold_of) % n_folds == 0
    return whole and torch.equal(fold_of, torch.arange(len(fold_of)) % n_folds)


def sum_parts(
    x: Float[Tensor, "batch *rest"], fold_of: Int[Tensor, " batch"], n_folds: int
) -> list[Part]:
    """Sum over the sequences of each fold that is there."""
    at_least_float32 = torch.promote_types(x.dtype, torch.float32)
    if dealt_in_rounds(fold_of, n_folds):
        rounds = rearrange(x, "(seq fold) ... -> seq fold ...", fold=n_folds)
        return [(slice(None), rounds.sum(0, dtype=at_least_float32))]
    return [
        (fold, x[(fold_of == fold).to(x.device)].sum(0, dtype=at_least_float32))
        for fold in fold_of.unique().tolist()
    ]
