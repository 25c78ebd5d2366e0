"""Stream batches through a model and keep running mean maps; nothing is cached.

A map is updated inside the hook that sees its tensor, in float64 and one fold at a time: sequence s
belongs to fold s % n_folds by its global index, so that no result depends on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layer import Layer, layers_of
from nope_probe.hooks.meters import GramMeter, HeadMeter, ScoreMeter
from nope_probe.hooks.stages import STAGES, Letter, Stage, available
from nope_probe.hooks.stream import Keeper, Meter, stream

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
        per_head: the same fold means for each query head; or None.
    """

    folds: Float[Tensor, "fold layer query_pos key_pos"]
    counts: Int[Tensor, " fold"]
    mean_route: Float[Tensor, "fold layer query_pos key_pos"] | None = None
    key_means: Float[Tensor, "fold layer pos width"] | None = None
    per_head: Float[Tensor, "fold layer head query_pos key_pos"] | None = None

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
    per_head: bool = False,
    on_batch: Callable[[int], object] | None = None,
    keeper: Keeper | None = None,
) -> ScoreMaps:
    """Average the attention scores of some layers over sequences and heads.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: token windows of equal length, or input vectors.
        layers: block numbers from 0; all by default.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals.
        routes: whether to keep the mean route too (needs 2 sequences per fold).
        per_head: whether to keep each head's map too (n_heads times the memory).
        on_batch: called with the number of sequences done after each batch.
        keeper: deals out batches to processes and keeps sums on the way; nobody by default.

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
    meters = [ScoreMeter(blocks[index], n_folds, routes) for index in chosen]
    heads = [HeadMeter(blocks[index], n_folds) for index in chosen] if per_head else []
    both: list[Meter] = [*meters, *heads]
    stream(
        model,
        inputs,
        both,
        end=_end(both, max(chosen)),
        batch_size=batch_size,
        keeper=keeper,
        on_batch=on_batch,
    )
    n = len(chosen)
    return ScoreMaps(
        mean_route=_by_layer((m.mean_route(counts) for m in meters), n) if routes else None,
        key_means=_by_layer((m.key_means(counts) for m in meters), n) if routes else None,
        per_head=_by_layer((m.score_means(counts) for m in _used_up(heads)), n) if heads else None,
        folds=_by_layer((m.score_means(counts) for m in _used_up(meters)), n),
        counts=counts,
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
    all_meters = list(meters.values())
    end = _end(all_meters, last)
    stream(model, inputs, all_meters, end=end, batch_size=batch_size, on_batch=on_batch)
    return StageMaps(folds={s: m.score_means(counts) for s, m in meters.items()}, counts=counts)


class ScoreSums:
    """Sum scores per fold over batches that a caller makes as it goes, and never holds at once.

    Sequence s of the whole stream goes to fold s % n_folds, however it is cut into batches.

    Example:
        >>> from nope_probe.models import build, parameter_free
        >>> sums = ScoreSums(build(parameter_free(n_layers=2, d_model=8)), n_folds=2)
        >>> for _ in range(3):
        ...     sums.add(torch.randn(16, 5, 8))
        >>> sums.means().shape
        torch.Size([2, 2, 5, 5])
    """

    def __init__(self, model: Any, n_folds: int) -> None:
        self.model, self.n_folds, self.n_seqs = model, n_folds, 0
        self.meters = [ScoreMeter(layer, n_folds) for layer in layers_of(model)]

    def add(self, batch: Inputs) -> None:
        """Run one batch through the model and add its scores."""
        last = len(self.meters) - 1
        stream(
            self.model,
            batch,
            self.meters,
            end=_end(self.meters, last),
            batch_size=len(batch),
            first=self.n_seqs,
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


def _by_layer(
    maps: Iterator[Float[Tensor, "fold *map"]], n_layers: int
) -> Float[Tensor, "fold layer *map"]:
    """Put layers side by side, each made only when its place is there."""
    first = next(maps)
    together = first.new_empty(len(first), n_layers, *first.shape[1:])
    together[:, 0] = first
    for layer, each in enumerate(maps, 1):
        together[:, layer] = each
    return together


def _used_up(meters: Sequence[Meter]) -> Iterator[Any]:
    """Give meters one by one, and let go of the sums of those that are done with."""
    for meter in meters:
        yield meter
        meter.totals.clear()


def _meter(stage: Stage, layer: Layer, n_folds: int) -> GramMeter | ScoreMeter:
    return ScoreMeter(layer, n_folds) if stage.scores else GramMeter(stage, layer, n_folds)


def _end(meters: Sequence[Meter], last: int) -> tuple[int, str]:
    """Say where a pass need not go on: at the last scores, or (for its output) behind the block."""
    only_scores = not any(isinstance(meter, GramMeter) for meter in meters)
    return last, "attn.hook_attn_scores" if only_scores else "hook_resid_post"
