"""Stream batches through a model and keep running mean maps; nothing is cached.

A map is updated inside the hook that sees its tensor, in float64 and one fold at a time: sequence s
belongs to fold s % n_folds by its global index, so that no result depends on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.layer import Enough, Layer, Tap, installed, layers_of, run
from nope_probe.hooks.stages import STAGES, Letter, Stage, available, hook_name, vectors

Inputs = Int[Tensor, "seq pos"] | Float[Tensor, "seq pos d_model"]


@dataclass(frozen=True, kw_only=True)
class ScoreMaps:
    """Mean attention scores, in nats.

    Attributes:
        folds: fold means; where the model masks a cell it is NaN (j > i, unless the mask is off).
        counts: sequences per fold.
        mean_route: per fold, an unbiased estimate of <E q_i, E k_j> times the scale, the part of a
            score that every sequence shares (a position has a mean vector of its own); or None.
        key_means: per fold, the mean key of each position, key heads concatenated; or None.
    """

    folds: Float[Tensor, "fold layer query_pos key_pos"]
    counts: Int[Tensor, " fold"]
    mean_route: Float[Tensor, "fold layer query_pos key_pos"] | None = None
    key_means: Float[Tensor, "fold layer pos width"] | None = None

    @property
    def mean(self) -> Float[Tensor, "layer query_pos key_pos"]:
        """The mean over all sequences, whatever fold they are in."""
        return pooled(self.folds, self.counts)


@dataclass(frozen=True, kw_only=True)
class StageMaps:
    """Gram maps of the paper's stages; (b) and (i) are score maps, in nats.

    Attributes:
        folds: fold means, per letter.
        counts: sequences per fold.
    """

    folds: dict[Letter, Float[Tensor, "fold row_pos col_pos"]]
    counts: Int[Tensor, " fold"]

    def mean(self, letter: Letter) -> Float[Tensor, "row_pos col_pos"]:
        """The mean over all sequences of one stage's map."""
        return pooled(self.folds[letter], self.counts)


def pooled(
    folds: Float[Tensor, "fold *map"], counts: Int[Tensor, " fold"]
) -> Float[Tensor, "*map"]:
    """Average fold means into the mean over all sequences."""
    weights = counts.to(folds.dtype) / counts.sum()
    return torch.einsum("f,f...->...", weights, folds)


def capture_scores(
    model: Any,
    inputs: Inputs,
    *,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    n_folds: int = 8,
    routes: bool = False,
    on_batch: Callable[[int], object] | None = None,
) -> ScoreMaps:
    """Average the attention scores of some layers over sequences and heads.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: token windows of equal length, or input vectors.
        layers: block numbers from 0; all by default.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals.
        routes: whether to keep the mean route too (needs 2 sequences per fold).
        on_batch: called with the number of sequences done after each batch.

    Returns:
        Fold means in nats, on the CPU.

    Example:
        >>> from nope_probe import load, capture_scores
        >>> model = load("parameter-free").model
        >>> capture_scores(model, torch.randn(16, 5, 64), n_folds=4).mean.shape
        torch.Size([4, 5, 5])
    """
    blocks = layers_of(model)
    chosen = list(range(len(blocks))) if layers is None else list(layers)
    if not chosen or not set(chosen) <= set(range(len(blocks))):
        raise IndexError(f"expected layers from 0 to {len(blocks) - 1}, got {chosen}")
    counts = fold_counts(len(inputs), n_folds)
    meters = [_ScoreMeter(blocks[index], n_folds, routes) for index in chosen]
    _stream(model, inputs, meters, batch_size, n_folds, last=max(chosen), on_batch=on_batch)
    return ScoreMaps(
        folds=torch.stack([meter.score_means(counts) for meter in meters], 1),
        counts=counts,
        mean_route=torch.stack([m.mean_route(counts) for m in meters], 1) if routes else None,
        key_means=torch.stack([m.key_means(counts) for m in meters], 1) if routes else None,
    )


def capture_stages(
    model: Any,
    inputs: Inputs,
    *,
    layer: int = 0,
    stages: Sequence[Letter] | None = None,
    batch_size: int = 32,
    n_folds: int = 8,
    on_batch: Callable[[int], object] | None = None,
) -> StageMaps:
    """Average the Gram maps of stages (a) to (i) around one block (the paper's Figure 3).

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: token windows of equal length, or input vectors.
        layer: the block under study, from 0.
        stages: letters; all that the block has by default.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals.
        on_batch: called with the number of sequences done after each batch.

    Raises:
        KeyError: if a stage is asked for that this block does not have.
    """
    blocks = layers_of(model)
    names = available(blocks, layer)
    letters = list(names) if stages is None else list(stages)
    missing = [letter for letter in letters if letter not in names]
    if missing:
        raise KeyError(f"block {layer} has the stages {' '.join(names)}, not {' '.join(missing)}")
    counts = fold_counts(len(inputs), n_folds)
    meters = {
        letter: _meter(STAGES[letter], blocks[layer + STAGES[letter].block], n_folds)
        for letter in letters
    }
    last = max(layer + STAGES[letter].block for letter in letters)
    _stream(model, inputs, list(meters.values()), batch_size, n_folds, last, on_batch)
    return StageMaps(folds={s: m.score_means(counts) for s, m in meters.items()}, counts=counts)


class ScoreSums:
    """Sum scores per fold over batches that a caller makes as it goes, and never holds at once.

    Sequence s of the whole stream goes to fold s % n_folds, however it is cut into batches.

    Example:
        >>> sums = ScoreSums(build(parameter_free(n_layers=2, d_model=8)), n_folds=2)
        >>> for _ in range(3):
        ...     sums.add(torch.randn(16, 5, 8))
        >>> sums.means().shape
        torch.Size([2, 2, 5, 5])
    """

    def __init__(self, model: Any, n_folds: int) -> None:
        self.model, self.n_folds, self.n_seqs = model, n_folds, 0
        self.meters = [_ScoreMeter(layer, n_folds) for layer in layers_of(model)]

    def add(self, batch: Inputs) -> None:
        """Run one batch through the model and add its scores."""
        last = len(self.meters) - 1
        _stream(
            self.model, batch, self.meters, len(batch), self.n_folds, last, None, first=self.n_seqs
        )
        self.n_seqs += len(batch)

    @property
    def counts(self) -> Int[Tensor, " fold"]:
        """Sequences per fold so far."""
        return fold_counts(self.n_seqs, self.n_folds)

    def means(self) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """Give the fold means so far, in nats; NaN where the model masks."""
        return torch.stack([meter.score_means(self.counts) for meter in self.meters], 1)


def fold_counts(n_seqs: int, n_folds: int) -> Int[Tensor, " fold"]:
    """Count the sequences s < n_seqs with s % n_folds == f, for each fold f.

    Raises:
        ValueError: if a fold would stay empty.
    """
    if not 1 <= n_folds <= n_seqs:
        raise ValueError(f"expected from 1 to {n_seqs} folds for {n_seqs} sequences, got {n_folds}")
    return torch.bincount(torch.arange(n_seqs) % n_folds, minlength=n_folds)


class _GramMeter:
    """Sums inner products of one stage's vectors, per fold."""

    def __init__(self, stage: Stage, layer: Layer, n_folds: int) -> None:
        self.stage, self.layer, self.n_folds = stage, layer, n_folds
        self.sums: Tensor
        self.latest: Tensor
        self.fold_of: Tensor

    def hooks(self) -> Iterator[tuple[Any, Any]]:
        yield self.layer.point(hook_name(self.stage, self.layer)), self.update
        yield self.layer.point("hook_resid_post"), self.flush

    def update(self, tensor: Tensor, hook: object) -> None:
        # HookedTransformer fires ln1.hook_normalized three times a pass: keep, add once.
        self.latest = tensor

    def flush(self, tensor: Tensor, hook: object) -> None:
        x = vectors(self.stage, self.layer, self.latest)
        add(self, "sums", fold_products(x, x, self.fold_of, self.n_folds))

    def score_means(self, counts: Tensor) -> Tensor:
        return self.sums.cpu() / counts[:, None, None]


class _ScoreMeter:
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
        self.rewritten = bool(self.point.fwd_hooks)
        yield from self.tap.hooks()
        yield self.point, self.update

    def update(self, scores: Tensor, hook: object) -> None:
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
        return self._masked(self.sums / counts.to(self.sums.device)[:, None, None])

    def mean_route(self, counts: Tensor) -> Tensor:
        """M = (N qbar.kbar - S) / (N - 1), without bias in each fold."""
        n = counts.to(self.sums.device)[:, None, None].double()
        product = torch.einsum("fqw,fkw->fqk", self.q_sums / n, self.k_sums / n)
        product = product * (self.layer.scale / self.layer.n_heads)
        return self._masked((n * product - self.sums / n) / (n - 1))

    def key_means(self, counts: Tensor) -> Tensor:
        return (self.k_sums / counts.to(self.k_sums.device)[:, None, None]).cpu()

    def _masked(self, means: Tensor) -> Tensor:
        return means.masked_fill(~self.visible, torch.nan).cpu()


def _meter(stage: Stage, layer: Layer, n_folds: int) -> _GramMeter | _ScoreMeter:
    return _ScoreMeter(layer, n_folds) if stage.scores else _GramMeter(stage, layer, n_folds)


def _stream(
    model: Any,
    inputs: Inputs,
    meters: Sequence[_GramMeter | _ScoreMeter],
    batch_size: int,
    n_folds: int,
    last: int,
    on_batch: Callable[[int], object] | None,
    first: int = 0,
) -> None:
    def stop(tensor: Tensor, hook: object) -> None:
        raise Enough

    hooks = [pair for meter in meters for pair in meter.hooks()]
    only_scores = all(isinstance(meter, _ScoreMeter) for meter in meters)
    end = "attn.hook_attn_scores" if only_scores else "hook_resid_post"
    hooks.append((layers_of(model)[last].point(end), stop))
    with torch.inference_mode(), installed(hooks):
        for start in range(0, len(inputs), batch_size):
            batch = inputs[start : start + batch_size]
            fold_of = torch.arange(first + start, first + start + len(batch)) % n_folds
            for meter in meters:
                meter.fold_of = fold_of
            run(model, batch)
            if on_batch is not None:
                on_batch(len(batch))


def unmasked(scores: Float[Tensor, "query_pos key_pos"]) -> Bool[Tensor, "query_pos key_pos"]:
    """Tell which cells a model masked: -inf on HookedTransformer, finfo.min on bridges."""
    return scores > torch.finfo(scores.dtype).min / 2


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


def add(meter: _GramMeter | _ScoreMeter, name: str, new: Tensor) -> None:
    """Add to a meter's running total in float64, or start it."""
    total = getattr(meter, name, None)
    setattr(meter, name, new.double() if total is None else total.add_(new))
