"""ScoreSums: mean scores over batches that a caller makes as it goes, and never holds at once."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.accumulators import ScoreAccumulator, State
from nope_probe.hooks.folds import fold_counts, interleaved_folds
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs
from nope_probe.hooks.protocols import HookedModel
from nope_probe.hooks.streaming import restore, state_of, stream


class ScoreSums:
    """Sums every layer's scores per fold, one batch at a time.

    Sequence s of the whole stream goes to fold s % n_folds, however it is cut into batches.

    Example:
        >>> from nope_probe.models.parameter_free import build, parameter_free
        >>> sums = ScoreSums(build(parameter_free(n_layers=2, d_model=8)), n_folds=2)
        >>> for _ in range(3):
        ...     sums.add(torch.randn(16, 5, 8))
        >>> sums.means().shape
        torch.Size([2, 2, 5, 5])
    """

    def __init__(self, model: HookedModel, n_folds: int) -> None:
        self.model, self.n_folds, self.n_seqs = model, n_folds, 0
        self.accumulators = [ScoreAccumulator(layer, n_folds) for layer in layers_of(model)]

    def add(self, batch: Inputs) -> None:
        """Run one batch through the model and add its scores."""
        stream(
            self.model,
            batch,
            self.accumulators,
            fold_of=interleaved_folds(len(batch), self.n_folds, first=self.n_seqs),
            end=self.accumulators[-1].point,
            batch_size=len(batch),
        )
        self.n_seqs += len(batch)

    @property
    def counts(self) -> Int[Tensor, " fold"]:
        """Sequences per fold so far."""
        return fold_counts(self.n_seqs, self.n_folds)

    def state(self) -> State:
        """Return the sums as tensors, for `restore`."""
        return state_of(self.accumulators)

    def restore(self, state: State, n_seqs: int) -> None:
        """Set the sums to a state that was taken after n_seqs sequences."""
        restore(self.accumulators, state)
        self.n_seqs = n_seqs

    def means(self) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """Return the fold means so far, in nats; NaN where the model masks."""
        return torch.stack([each.fold_means(self.counts) for each in self.accumulators], 1)
