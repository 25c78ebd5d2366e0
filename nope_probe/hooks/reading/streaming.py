"""Stream batches through a model for the sums that accumulators keep.

A stream is saved, stopped and resumed between two batches, because every accumulator has counted
the same sequences there. Batches are dealt in turn to the processes that share a run, and the
processes' totals are added up at the end. With a `ResidualCache`, a pass starts where it first
differs from an earlier pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from nope_probe.hooks.layers.hook_points import (
    Attachment,
    HookedModel,
    HookPoint,
    hooks_attached,
    methods_replaced,
)
from nope_probe.hooks.layers.model import (
    Inputs,
    block_point,
    blocks_of,
    logits_of,
    run_forward,
    tapped,
)
from nope_probe.hooks.layers.tap import StopForward, taps_read
from nope_probe.hooks.layers.threads import used_alone
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.removing.block_ablation import foreign_hooks, removed_before
from nope_probe.maps.folds import State, under


class StreamCheckpoint:
    """Decides which batches of a stream a process runs, and when its sums are saved.

    This class runs all batches and saves nothing; `nope_probe.runtime.checkpoint` has a subclass
    that saves.

    Attributes:
        rank: the number of this process, from 0.
        n_processes: how many processes share the stream.
    """

    rank = 0
    n_processes = 1

    def restore(self) -> State:
        """Return the last saved state; empty at the start."""
        return {}

    def is_due(self) -> bool:
        """Return whether to save now; called after every batch that was run."""
        return False

    def save(self, state: State) -> None:
        """Save the state of the stream."""

    def advance(self, n_seqs: int) -> None:
        """Note that a batch was run or restored; may end the stream."""

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
    checkpoint: StreamCheckpoint | None = None,
    residuals: ResidualCache | None = None,
) -> None:
    """Run this process's batches, and add up the totals of all processes.

    A forward pass stops where the accumulators have read the last block.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: token sequences of equal length, or input vectors.
        accumulators: the running sums.
        fold_of: the fold of each sequence.
        batch_size: sequences per forward pass; halved if a batch does not fit into GPU memory.
        checkpoint: deals out batches and saves sums; by default, all batches are run and nothing
            is saved.
        residuals: residual streams of earlier passes over the same inputs, from which passes may
            start if the model has no other hooks; none by default.

    Raises:
        ValueError: for batches of no sequences, or fewer batches than processes.
        torch.OutOfMemoryError: if a single sequence does not fit.
    """
    checkpoint = checkpoint or StreamCheckpoint()
    batches = batches_of(len(inputs), batch_size, checkpoint.rank, checkpoint.n_processes)
    restore(accumulators, checkpoint.restore())
    residuals = residuals or ResidualCache(max_bytes=0)
    done, restored = 0, accumulators[0].n_seen
    with used_alone(model), torch.inference_mode(), ExitStack() as stack:
        runner = BatchRunner(model, accumulators, checkpoint, batch_size, residuals)
        stack.enter_context(_reading(model, accumulators))
        for start, stop in batches:
            if done >= restored:
                runner.run(inputs[start:stop], fold_of[start:stop], done)
                if checkpoint.is_due():
                    checkpoint.save(state_of(accumulators))
            done += stop - start
            checkpoint.advance(stop - start)
        if checkpoint.n_processes > 1:  # a kill during the wait for other processes loses nothing
            checkpoint.save(state_of(accumulators))
        # Sorted by name: an order that all processes share.
        checkpoint.all_reduce(
            [entry.totals[name] for entry in accumulators for name in sorted(entry.totals)]
        )


def batches_of(n_seqs: int, batch_size: int, rank: int, n_processes: int) -> list[tuple[int, int]]:
    """Return the batches of one process as (start, stop), dealt out in turn.

    Raises:
        ValueError: if the process gets no batch, or a batch has no sequences.
    """
    if batch_size < 1:
        raise ValueError(f"expected batches of 1 sequence or more, got {batch_size}")
    starts = range(rank * batch_size, n_seqs, n_processes * batch_size)
    if not starts:
        raise ValueError(
            f"{n_processes} processes, but {n_seqs} sequences in batches of {batch_size}"
        )
    return [(start, min(start + batch_size, n_seqs)) for start in starts]


def state_of(accumulators: Sequence[Accumulator]) -> State:
    """Return the state from which a later process resumes, taken between two batches."""
    state: State = {"n_seen": torch.tensor(accumulators[0].n_seen)}
    for index, accumulator in enumerate(accumulators):
        state |= {f"{index}.total.{name}": tensor for name, tensor in accumulator.totals.items()}
        # Copies: accumulators of a layer may share a tensor, and safetensors keeps no tensor twice.
        state |= {
            f"{index}.flag.{name}": tensor.clone() for name, tensor in accumulator.flags.items()
        }
    return state


def restore(accumulators: Sequence[Accumulator], state: State) -> None:
    """Set accumulators to a state of `state_of`; an empty state starts the counts anew."""
    for index, accumulator in enumerate(accumulators):
        for kind, values in (("total", accumulator.totals), ("flag", accumulator.flags)):
            values |= under(state, f"{index}.{kind}.")
        accumulator.n_seen = int(state.get("n_seen", 0))


class BatchRunner:
    """Runs batches. If a batch does not fit into GPU memory, it and later batches are halved."""

    def __init__(
        self,
        model: HookedModel,
        accumulators: Sequence[Accumulator],
        checkpoint: StreamCheckpoint,
        batch_size: int,
        residuals: ResidualCache,
    ) -> None:
        self.model, self.accumulators, self.checkpoint = model, accumulators, checkpoint
        self.batch_size, self.residuals = batch_size, residuals
        self.may_skip = residuals.max_bytes > 0 and may_skip_blocks(model)

    def run(self, batch: Inputs, fold_of: Int[Tensor, " seq"], done: int) -> None:
        """Run a batch before which `done` sequences of this process were run."""
        if len(batch) > self.batch_size:
            size = self.batch_size
            for piece, folds in zip(batch.split(size), fold_of.split(size), strict=True):
                self.run(piece, folds, done)
                done += len(piece)
            return
        for accumulator in self.accumulators:
            accumulator.start_batch(fold_of, done + len(batch))
        try:
            self._run_once(batch)
            return
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        self._halve(len(batch))
        self.run(batch, fold_of, done)

    def _run_once(self, batch: Inputs) -> None:
        if any(accumulator.reads_logits for accumulator in self.accumulators):
            last = len(blocks_of(self.model)) - 1
            # A condition's losses are read once, so only the intact model's streams are kept.
            intact = [d for d in range(1, last + 1) if not removed_before(self.model, d)]
            with self.residuals.shared(self.model, batch, [last], self.may_skip, intact):
                logits = logits_of(self.model, batch)
            for accumulator in self.accumulators:
                accumulator.read_logits(logits, batch)
            return
        layers = sorted({accumulator.depth for accumulator in self.accumulators})
        with self.residuals.shared(self.model, batch, layers, self.may_skip):
            run_forward(self.model, batch)

    def _halve(self, size: int) -> None:
        # Called when the error, whose frames hold tensors, is gone. The blocks that came before
        # the error have counted the batch already; their accumulators skip its pieces.
        for accumulator in self.accumulators:
            accumulator.reset()
        self.residuals.clear()
        torch.cuda.empty_cache()
        self.batch_size = size // 2
        self.checkpoint.batch_halved(self.batch_size)


@contextmanager
def _reading(model: HookedModel, accumulators: Sequence[Accumulator]) -> Iterator[None]:
    """Let accumulators read forward passes, which stop after the last block that they read."""
    end = None
    if not any(accumulator.reads_logits for accumulator in accumulators):
        depth, past_attention = max(
            (accumulator.depth, not accumulator.reads_attention) for accumulator in accumulators
        )
        name = "hook_resid_post" if past_attention else "attn.hook_attn_scores"
        end = block_point(model, depth, name)
    hooks: list[Attachment] = [pair for accumulator in accumulators for pair in accumulator.hooks()]
    with tapped(model) as layers:
        # The scores' hook point fires only if it has hooks, so the tap itself ends the pass.
        last = [layer.tap for layer in layers if layer.tap.scores_point is end]
        if not last and end is not None:
            hooks.append((end, _stop))
        readers = [
            (accumulator.layer.tap, accumulator.read)
            for accumulator in accumulators
            if accumulator.reads_attention
        ]
        with taps_read(readers, last), hooks_attached(hooks):
            yield


def _stop(tensor: Tensor, hook: HookPoint) -> None:
    raise StopForward


GIGABYTE = 10**9


class ResidualCache:
    """Outputs of blocks, kept for later passes that are equal up to these blocks.

    Passes over the same batch have the same residual stream up to the first block where their
    removals differ. Outputs that do not fit are computed again, so results never depend on the
    cache's size. The weights must not change while a cache is in use.

    Attributes:
        max_bytes: bytes that may be kept, on the model's device; 0 keeps nothing.
        n_bytes: bytes that are kept.
        n_needed: layer passes (one block, one batch) without the cache.
        n_run: layer passes that were run.
    """

    def __init__(self, max_bytes: int = GIGABYTE) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self.n_needed = self.n_run = 0
        # The batch is kept beside a block's output, so that no other tensor gets its address.
        self._outputs: dict[Hashable, tuple[Inputs, Any]] = {}

    def clear(self) -> None:
        """Drop all residual streams: no later pass can begin with them."""
        self._outputs.clear()
        self.n_bytes = 0

    @contextmanager
    def shared(
        self,
        model: HookedModel,
        batch: Inputs,
        layers: Sequence[int],
        may_share: bool,
        keep: Sequence[int] | None = None,
    ) -> Iterator[None]:
        """Start the pass inside as late as possible, and keep the inputs of some blocks.

        Args:
            model: a HookedTransformer or TransformerBridge, ablated or not.
            batch: the tokens or vectors of the pass, a part of tensors that stay as they are.
            layers: the blocks that are read, in order; the pass ends in the last.
            may_share: whether the pass may skip the blocks before them, whose hooks then stay idle.
            keep: the blocks whose inputs are kept; by default the blocks that are read.
        """
        shares = may_share and self.max_bytes > 0
        start = self._deepest(model, batch, layers[0]) if shares else 0
        self.n_needed += layers[-1] + 1
        self.n_run += layers[-1] + 1 - start
        blocks = blocks_of(model)[: layers[-1]]
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        if start:
            _, output = self._outputs[_key(model, batch, start)]
            forwards = dict.fromkeys(blocks[:start], lambda *_, **__: output)
        for depth in (layers if keep is None else keep) if shares else ():
            if depth > start:
                forwards[blocks[depth - 1]] = self._keeping(model, batch, depth, blocks[depth - 1])
        with ExitStack() as stack:
            for block, forward in forwards.items():
                stack.enter_context(methods_replaced(block, forward=forward))
            yield

    def _deepest(self, model: HookedModel, batch: Inputs, layer: int) -> int:
        """Return the last block up to a layer whose input is kept; 0 without such a block."""
        kept = (d for d in range(layer, 0, -1) if _key(model, batch, d) in self._outputs)
        return next(kept, 0)

    def _keeping(
        self, model: HookedModel, batch: Inputs, depth: int, block: nn.Module
    ) -> Callable[..., Any]:
        """Return a block's forward pass, which keeps its output if there is room."""
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            residual = cast(Tensor, output[0] if isinstance(output, tuple) else output)
            size = residual.numel() * residual.element_size()
            key = _key(model, batch, depth)
            if key not in self._outputs and self.n_bytes + size <= self.max_bytes:
                self._outputs[key] = batch, output
                self.n_bytes += size
            return output

        return run


def may_skip_blocks(model: HookedModel) -> bool:
    """Return whether a model has no hooks, of any kind, but those of an ablation in effect."""
    return not foreign_hooks(model)


def _key(model: HookedModel, batch: Inputs, depth: int) -> Hashable:
    return batch.data_ptr(), batch.shape, batch.dtype, depth, removed_before(model, depth)
