"""Stream batches through a model and keep running mean maps; nothing is cached.

A map is updated inside the hook that sees its tensor, in float64 and one fold at a time: sequence s
belongs to fold s % n_folds by its global index, so that no result depends on the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.accumulators import (
    Accumulator,
    GramAccumulator,
    HeadAccumulator,
    ScoreAccumulator,
    State,
)
from nope_probe.hooks.folds import fold_counts, interleaved_folds, pooled
from nope_probe.hooks.layer import Layer, layers_of
from nope_probe.hooks.names import LETTERS, Letter
from nope_probe.hooks.stages import STAGES, Stage, available
from nope_probe.hooks.streaming import Inputs, StreamCheckpoint, restore, state_of, stream


@dataclass(frozen=True, kw_only=True)
class ScoreMaps:
    """Mean attention scores, in nats.

    Attributes:
        folds: fold means; where the model masks a cell it is NaN (j > i, unless the mask is off).
        visible: which cells the model does not mask.
        counts: sequences per fold.
        mean_term: per fold, an unbiased estimate of <E q_i, E k_j> times the scale, the part of a
            score that every sequence shares (a position has a mean vector of its own); or None.
        key_means: per fold, the mean key of each position, key heads concatenated; or None.
        per_head: the same fold means for each query head; or None.
    """

    folds: Float[Tensor, "fold layer query_pos key_pos"]
    visible: Bool[Tensor, "layer query_pos key_pos"]
    counts: Int[Tensor, " fold"]
    mean_term: Float[Tensor, "fold layer query_pos key_pos"] | None = None
    key_means: Float[Tensor, "fold layer pos width"] | None = None
    per_head: Float[Tensor, "fold layer head query_pos key_pos"] | None = None

    @property
    def mean(self) -> Float[Tensor, "layer query_pos key_pos"]:
        """The mean over all sequences, whatever fold they are in."""
        return pooled(self.folds, self.counts)

    def to_tensors(self) -> State:
        """Return the maps by name; `ScoreMaps(**tensors)` takes them back."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StageMaps:
    """Gram maps of the paper's stages; (b) and (i) are score maps, in nats.

    Attributes:
        folds: fold means, per letter.
        visible: of score maps, which cells the model does not mask.
        counts: sequences per fold.
    """

    folds: dict[Letter, Float[Tensor, "fold row_pos col_pos"]]
    visible: dict[Letter, Bool[Tensor, "query_pos key_pos"]]
    counts: Int[Tensor, " fold"]

    def mean(self, letter: Letter) -> Float[Tensor, "row_pos col_pos"]:
        """The mean over all sequences of one stage's map."""
        return pooled(self.folds[letter], self.counts)

    def to_tensors(self) -> State:
        """Return the maps by name, for `from_tensors`."""
        folds = {f"folds/{letter}": each for letter, each in self.folds.items()}
        visible = {f"visible/{letter}": each for letter, each in self.visible.items()}
        return {"counts": self.counts, **folds, **visible}

    @classmethod
    def from_tensors(cls, tensors: State) -> StageMaps:
        """Return the maps that `to_tensors` gave."""
        folds, visible = (
            {
                letter: tensors[f"{kind}/{letter}"]
                for letter in LETTERS
                if f"{kind}/{letter}" in tensors
            }
            for kind in ("folds", "visible")
        )
        return cls(folds=folds, visible=visible, counts=tensors["counts"])


def capture_scores(
    model: Any,
    inputs: Inputs,
    *,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    n_folds: int = 8,
    mean_term: bool = False,
    per_head: bool = False,
    checkpoint: StreamCheckpoint | None = None,
) -> ScoreMaps:
    """Average the attention scores of some layers over sequences and heads.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: token windows of equal length, or input vectors.
        layers: block numbers from 0; all by default.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals.
        mean_term: whether to keep the mean term too (needs 2 sequences per fold).
        per_head: whether to keep each head's map too (n_heads times the memory).
        checkpoint: deals out batches to processes and saves sums; see `stream`.

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
    accumulators = [ScoreAccumulator(blocks[index], n_folds, mean_term) for index in chosen]
    heads = [HeadAccumulator(blocks[index], n_folds) for index in chosen] if per_head else []
    both: list[Accumulator] = [*accumulators, *heads]
    stream(
        model,
        inputs,
        both,
        fold_of=interleaved_folds(len(inputs), n_folds),
        end=_end(both, max(chosen)),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    n = len(chosen)
    return ScoreMaps(
        mean_term=_by_layer((m.mean_term(counts) for m in accumulators), n) if mean_term else None,
        key_means=_by_layer((m.key_means(counts) for m in accumulators), n) if mean_term else None,
        per_head=_by_layer((m.score_means(counts) for m in _used_up(heads)), n) if heads else None,
        visible=torch.stack([m.facts["visible"].cpu() for m in accumulators]),
        folds=_by_layer((m.score_means(counts) for m in _used_up(accumulators)), n),
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
    checkpoint: StreamCheckpoint | None = None,
) -> StageMaps:
    """Average the Gram maps of stages (a) to (i) around one block (the paper's Figure 3).

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: token windows of equal length, or input vectors.
        layer: the block under study, from 0.
        stages: letters; all that the block has by default.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Raises:
        KeyError: if a stage is asked for that this block does not have.

    Example:
        >>> from nope_probe import capture_stages, load
        >>> maps = capture_stages(load("parameter-free").model, torch.randn(16, 5, 64), layer=1)
        >>> maps.mean("a").shape
        torch.Size([5, 5])
    """
    blocks = layers_of(model)
    names = available(blocks, layer)
    letters = list(names) if stages is None else list(stages)
    missing = [letter for letter in letters if letter not in names]
    if missing:
        raise KeyError(f"block {layer} has the stages {' '.join(names)}, not {' '.join(missing)}")
    counts = fold_counts(len(inputs), n_folds)
    accumulators = {
        letter: _accumulator(STAGES[letter], blocks[layer + STAGES[letter].block], n_folds)
        for letter in letters
    }
    last = max(layer + STAGES[letter].block for letter in letters)
    all_accumulators = list(accumulators.values())
    stream(
        model,
        inputs,
        all_accumulators,
        fold_of=interleaved_folds(len(inputs), n_folds),
        end=_end(all_accumulators, last),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    return StageMaps(
        folds={letter: each.score_means(counts) for letter, each in accumulators.items()},
        visible={
            letter: each.facts["visible"].cpu()
            for letter, each in accumulators.items()
            if "visible" in each.facts
        },
        counts=counts,
    )


class ScoreSums:
    """Sum scores per fold over batches that a caller makes as it goes, and never holds at once.

    Sequence s of the whole stream goes to fold s % n_folds, however it is cut into batches.

    Example:
        >>> from nope_probe.models.parameter_free import build, parameter_free
        >>> sums = ScoreSums(build(parameter_free(n_layers=2, d_model=8)), n_folds=2)
        >>> for _ in range(3):
        ...     sums.add(torch.randn(16, 5, 8))
        >>> sums.means().shape
        torch.Size([2, 2, 5, 5])
    """

    def __init__(self, model: Any, n_folds: int) -> None:
        self.model, self.n_folds, self.n_seqs = model, n_folds, 0
        self.accumulators = [ScoreAccumulator(layer, n_folds) for layer in layers_of(model)]

    def add(self, batch: Inputs) -> None:
        """Run one batch through the model and add its scores."""
        last = len(self.accumulators) - 1
        stream(
            self.model,
            batch,
            self.accumulators,
            fold_of=interleaved_folds(len(batch), self.n_folds, first=self.n_seqs),
            end=_end(self.accumulators, last),
            batch_size=len(batch),
        )
        self.n_seqs += len(batch)

    @property
    def counts(self) -> Int[Tensor, " fold"]:
        """Sequences per fold so far."""
        return fold_counts(self.n_seqs, self.n_folds)

    def state(self) -> State:
        """Return what `restore` takes."""
        return state_of(self.accumulators)

    def restore(self, state: State, n_seqs: int) -> None:
        """Set the sums to a state that was taken after n_seqs sequences."""
        restore(self.accumulators, state)
        self.n_seqs = n_seqs

    def means(self) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """Give the fold means so far, in nats; NaN where the model masks."""
        return torch.stack(
            [accumulator.score_means(self.counts) for accumulator in self.accumulators], 1
        )


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


def _used_up(accumulators: Sequence[Accumulator]) -> Iterator[Any]:
    """Give accumulators one by one, and let go of the sums of those that are done with."""
    for accumulator in accumulators:
        yield accumulator
        accumulator.totals.clear()


def _accumulator(stage: Stage, layer: Layer, n_folds: int) -> GramAccumulator | ScoreAccumulator:
    return (
        ScoreAccumulator(layer, n_folds) if stage.scores else GramAccumulator(stage, layer, n_folds)
    )


def _end(accumulators: Sequence[Accumulator], last: int) -> tuple[int, str]:
    """Say where a pass need not go on: at the last scores, or (for its output) behind the block."""
    only_scores = not any(isinstance(accumulator, GramAccumulator) for accumulator in accumulators)
    return last, "attn.hook_attn_scores" if only_scores else "hook_resid_post"
