"""Stream batches through a model for the sums that accumulators keep.

Batches are dealt in turn to the processes that share a run, and the processes' totals are added up
at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from nope_probe.errors import UserError
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint, hooks_attached
from nope_probe.hooks.layers.model import Given, Inputs, as_inputs, documents_of, tapped
from nope_probe.hooks.layers.objects import Model, model_of
from nope_probe.hooks.layers.passes import logits_of, run_forward
from nope_probe.hooks.layers.reference import validate_weights
from nope_probe.hooks.layers.tap import StopForward, Tap, taps_read
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.maps.folds import State, folds_of, under


class Stream:
    """A stream of batches, in one of the processes that share it.

    The stream says which batches the process runs, and hears of each between two batches. This
    class runs all batches; `nope_probe.run.checkpoint` has a subclass that counts them on a
    progress bar, ends at a signal, and adds up the sums of several processes.

    Attributes:
        rank: the number of this process, from 0.
        n_processes: how many processes share the stream.
    """

    rank = 0
    n_processes = 1

    def advance(self, n_seqs: int) -> None:
        """Note that a batch was run; may end the stream."""

    def all_reduce(self, totals: Sequence[Tensor]) -> None:
        """Replace totals by their sums over the processes, in place."""

    def batch_halved(self, batch_size: int) -> None:
        """Note that a batch did not fit into memory, and the size of the next batches."""


def stream(
    model: HookedModel,
    inputs: Inputs,
    accumulators: Sequence[Accumulator],
    fold_of: Int[Tensor, " seq"],
    batch_size: int,
    checkpoint: Stream | None = None,
) -> None:
    """Run this process's batches, and add up the totals of all processes.

    A forward pass stops where the accumulators have read the last block.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: token sequences of equal length, or input vectors.
        accumulators: the running sums.
        fold_of: the fold of each sequence.
        batch_size: sequences per forward pass; halved if a batch does not fit into GPU memory.
        checkpoint: deals out batches; by default, all are run.

    Raises:
        UserError: for batches of no sequences, or fewer batches than processes; after it, for a
            weight that is no number, and that made a total none.
        torch.OutOfMemoryError: if a single sequence does not fit.
    """
    checkpoint = checkpoint or Stream()
    batches = batches_of(len(inputs), batch_size, checkpoint.rank, checkpoint.n_processes)
    done, size = max(accumulator.n_seen for accumulator in accumulators), batch_size
    with torch.inference_mode(), _reading(model, accumulators):
        for start, stop in batches:
            behind = start  # the sequences that were run
            while behind < stop:
                rows = slice(behind, min(behind + size, stop))
                n_seqs = rows.stop - behind
                for accumulator in accumulators:
                    accumulator.start_batch(fold_of[rows], done + n_seqs)
                if run_batch(model, inputs[rows], accumulators):
                    behind, done = rows.stop, done + n_seqs
                    continue
                # The error, whose frames hold tensors, is gone. The blocks that came before it have
                # counted the batch already; their accumulators skip its pieces.
                for accumulator in accumulators:
                    accumulator.reset()
                torch.cuda.empty_cache()
                size = n_seqs // 2
                checkpoint.batch_halved(size)
            checkpoint.advance(stop - start)
        # Sorted by name: an order that all processes share.
        totals = [entry.totals[name] for entry in accumulators for name in sorted(entry.totals)]
        checkpoint.all_reduce(totals)
    if not all(total.sum().isfinite() for total in totals):
        validate_weights(cast(nn.Module, model))


def dealt(
    model: Model,
    given: Given,
    n_folds: int | None = None,
    documents: Int[Tensor, " seq"] | None = None,
) -> tuple[HookedModel, Inputs, Int[Tensor, " seq"]]:
    """Return the hooked model and the inputs that a caller gave, and the fold of each sequence.

    Args:
        model: in any form that `load` takes in memory, or what it returns.
        given: the inputs, in any form that `capture_scores` takes.
        n_folds: how many folds; see `folds_of`.
        documents: the document of each sequence; by default the documents of `Sequences`.

    Raises:
        UserError: for what is no model, or for inputs that it does not take, or for an empty fold.
    """
    model, documents = model_of(model), documents_of(given, documents)
    inputs = as_inputs(model, given)
    return model, inputs, folds_of(len(inputs), n_folds, documents)


def batches_of(n_seqs: int, batch_size: int, rank: int, n_processes: int) -> list[tuple[int, int]]:
    """Return the batches of one process as (start, stop), dealt out in turn.

    Raises:
        UserError: if the process gets no batch, or a batch has no sequences.
    """
    if batch_size < 1:
        raise UserError(f"expected batches of 1 sequence or more, got {batch_size}")
    starts = range(rank * batch_size, n_seqs, n_processes * batch_size)
    if not starts:
        raise UserError(
            f"{n_processes} processes, but {n_seqs} sequences in batches of {batch_size}"
        )
    return [(start, min(start + batch_size, n_seqs)) for start in starts]


def state_of(accumulators: Sequence[Accumulator]) -> State:
    """Return what accumulators keep, as tensors; see `restore`."""
    state: State = {}
    for index, accumulator in enumerate(accumulators):
        state |= {f"{index}.total.{name}": total for name, total in accumulator.totals.items()}
        # Copies: accumulators of a layer may share a tensor, and safetensors keeps no tensor twice.
        flags = {name: flag.clone() for name, flag in accumulator.flags.items()}
        state |= {f"{index}.flag.{name}": flag for name, flag in flags.items()}
    return state


def restore(accumulators: Sequence[Accumulator], state: State) -> None:
    """Set accumulators to a state of `state_of`."""
    for index, accumulator in enumerate(accumulators):
        for kind, values in (("total", accumulator.totals), ("flag", accumulator.flags)):
            values |= under(state, f"{index}.{kind}.")


def run_batch(model: HookedModel, batch: Inputs, accumulators: Sequence[Accumulator]) -> bool:
    """Run a batch; return whether it fits into GPU memory.

    Raises:
        torch.OutOfMemoryError: if a single sequence does not fit.
    """
    try:
        if not any(accumulator.reads_logits for accumulator in accumulators):
            run_forward(model, batch)
            return True
        logits = logits_of(model, batch)
        for accumulator in accumulators:
            accumulator.read_logits(logits, batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
        return False
    return True


@contextmanager
def _reading(model: HookedModel, accumulators: Sequence[Accumulator]) -> Iterator[None]:
    """Let accumulators read forward passes, which stop after the last block that they read."""
    hooks: list[Attachment] = [pair for accumulator in accumulators for pair in accumulator.hooks()]
    with tapped(model):
        stopping = list[Tap]()
        if not any(accumulator.reads_logits for accumulator in accumulators):
            last = max(accumulators, key=lambda of: (of.layer.index, not of.reads_attention))
            if last.reads_attention:
                stopping.append(last.layer.tap)
            else:
                hooks.append((last.layer.point("hook_resid_post"), _stop))
        readers = [
            (accumulator.layer.tap, accumulator.read)
            for accumulator in accumulators
            if accumulator.reads_attention
        ]
        with taps_read(readers, stopping), hooks_attached(hooks):
            yield


def _stop(tensor: Tensor, hook: HookPoint) -> None:
    raise StopForward
