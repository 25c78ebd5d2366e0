"""Stream batches through a model for the sums that meters keep: in shares, resumable, in any size.

Each meter counts the sequences that are in its sums. A pass that ends early (too little memory, an
interruption) leaves some meters a batch ahead; they sit out what they have when it is run again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.tap import Enough, Installation, installed, run

State = dict[str, Tensor]
Part = tuple[int | slice, Tensor]  # which folds of a total, and what is added to them


class Meter(ABC):
    """Running sums of one block, added to once a pass.

    Attributes:
        totals: sums over sequences, float64, one per fold; those of several processes add up.
        facts: what was found on the first sequence and holds for all.
        absorbed: how many sequences of this process's share are in the totals.
    """

    def __init__(self, n_folds: int) -> None:
        self.n_folds = n_folds
        self.totals: State = {}
        self.facts: State = {}
        self.absorbed = self.upto = 0
        self.fold_of: Tensor

    @abstractmethod
    def hooks(self) -> Iterable[Installation]:
        """Give the hooks that read a pass, and the one that adds it, in this order."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of what was read of a pass."""

    def face(self, fold_of: Tensor, upto: int) -> None:
        """Take note of the pass that comes: its sequences' folds, and how many are in with it."""
        self.fold_of, self.upto = fold_of, upto

    @property
    def sits_out(self) -> bool:
        """Whether the sequences of this pass are in the totals already."""
        return self.upto <= self.absorbed

    def add(self, **parts: Sequence[Part]) -> None:
        """Add a pass to the totals, all of it or (where memory ends) nothing."""
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
        self.absorbed = self.upto

    def restore(self, state: State) -> None:
        """Go on from a state that `state_of` gave; from nothing, begin."""
        self.absorbed = int(state.get("absorbed", 0))
        for kind, kept in (("total.", self.totals), ("fact.", self.facts)):
            for name in [name for name in state if name.startswith(kind)]:
                kept[name.removeprefix(kind)] = state[name]


class Keeper:
    """Stands beside a stream: says which batches are this process's, and keeps its sums.

    This one takes all batches and keeps nothing.
    """

    rank = 0
    n_processes = 1

    def restore(self) -> State:
        """Give the state that was kept last; nothing at the start."""
        return {}

    def wants_to_stop(self) -> bool:
        """Tell, between two blocks, whether the pass should end now."""
        return False

    def keep(self, state: Callable[[], State], *, finished: bool) -> None:
        """Hear that a batch or the whole share is done, or that a pass ended on request."""

    def add_up(self, totals: Sequence[Tensor]) -> None:
        """Add up totals over processes, in place."""

    def halve(self, batch_size: int) -> None:
        """Hear that a batch did not fit into memory, and what size comes next."""


class _Halt(Exception):  # noqa: N818  (it ends a forward pass on request, it is no error)
    pass


def stream(
    model: Any,
    inputs: Tensor,
    meters: Sequence[Meter],
    *,
    end: tuple[int, str],
    batch_size: int,
    keeper: Keeper | None = None,
    on_batch: Callable[[int], object] | None = None,
    first: int = 0,
) -> None:
    """Run this process's share of the inputs, and add up what all processes' meters sum.

    A batch that does not fit into GPU memory is halved and run again; later ones stay small.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: token windows, or input vectors.
        meters: what sums.
        end: the block and its hook point after which a pass need not go on.
        batch_size: sequences per pass.
        keeper: who deals out batches and keeps sums; nobody by default.
        on_batch: called with the number of sequences done, after each batch.
        first: the number of the first sequence: number s belongs to fold s % n_folds.

    Raises:
        ValueError: if there are fewer batches than processes.
        torch.OutOfMemoryError: if a single sequence does not fit.
    """
    keeper = keeper or Keeper()
    share = shares(len(inputs), batch_size, keeper.rank, keeper.n_processes)
    _restore(meters, keeper.restore())
    work = _Work(model, meters, keeper, batch_size)
    with torch.inference_mode(), installed([*_readers(meters), *work.brakes(end)]):
        behind = 0
        for start, stop in share:
            if behind + stop - start > work.done:
                work.absorb(inputs[start:stop], first + start, behind)
                keeper.keep(lambda: state_of(meters), finished=False)
            behind += stop - start
            if on_batch is not None:
                on_batch(stop - start)
        keeper.keep(lambda: state_of(meters), finished=True)
        keeper.add_up([meter.totals[name] for meter in meters for name in sorted(meter.totals)])


def shares(n_seqs: int, batch_size: int, rank: int, n_processes: int) -> list[tuple[int, int]]:
    """Deal out batches in turn: give those of one process as (start, stop).

    Raises:
        ValueError: if it gets none.
    """
    starts = range(rank * batch_size, n_seqs, n_processes * batch_size)
    if not starts:
        raise ValueError(
            f"{n_processes} processes, but {n_seqs} sequences in batches of {batch_size}"
        )
    return [(start, min(start + batch_size, n_seqs)) for start in starts]


def state_of(meters: Sequence[Meter]) -> State:
    """Give everything that a later process needs to go on."""
    state: State = {}
    for index, meter in enumerate(meters):
        state[f"{index}.absorbed"] = torch.tensor(meter.absorbed)
        state |= {f"{index}.total.{name}": each for name, each in meter.totals.items()}
        state |= {f"{index}.fact.{name}": each for name, each in meter.facts.items()}
    return state


def _restore(meters: Sequence[Meter], state: State) -> None:
    for index, meter in enumerate(meters):
        ours = f"{index}."
        own = {name.removeprefix(ours): t for name, t in state.items() if name.startswith(ours)}
        meter.restore(own)


def _readers(meters: Sequence[Meter]) -> Iterator[Installation]:
    for meter in meters:
        yield from meter.hooks()


class _Work:
    """Runs batches whole or in pieces, until every meter has absorbed them."""

    def __init__(
        self, model: Any, meters: Sequence[Meter], keeper: Keeper, batch_size: int
    ) -> None:
        self.model, self.meters, self.keeper, self.size = model, meters, keeper, batch_size

    @property
    def done(self) -> int:
        """How many sequences of the share every meter has absorbed."""
        return min(meter.absorbed for meter in self.meters)

    def brakes(self, end: tuple[int, str]) -> Iterator[Installation]:
        """Give the hooks that end a pass: on request after any block, and where all is seen."""
        layers = layers_of(self.model)[: end[0] + 1]
        for layer in layers[:-1]:
            yield layer.point("hook_resid_post"), self._stop_on_request
        yield layers[-1].point(end[1]), _stop

    def _stop_on_request(self, tensor: Tensor, hook: object) -> None:
        if self.keeper.wants_to_stop():
            raise _Halt

    def absorb(self, batch: Tensor, start: int, behind: int) -> None:
        """Absorb a batch, whose first sequence has number `start` and `behind` of the share."""
        while (done := max(self.done, behind)) < behind + len(batch):
            # Where a pass ended early, some meters are ahead: never run past where one stands.
            ahead = [meter.absorbed for meter in self.meters if meter.absorbed > done]
            upto = min([behind + len(batch), done + self.size, *ahead])
            numbers = torch.arange(start + done - behind, start + upto - behind)
            for meter in self.meters:
                meter.face(numbers % meter.n_folds, upto)
            self._run(batch[done - behind : upto - behind])

    def _run(self, piece: Tensor) -> None:
        does_not_fit = False
        try:
            run(self.model, piece)
        except torch.OutOfMemoryError:
            if len(piece) == 1:
                raise
            does_not_fit = True
        except _Halt:
            self.keeper.keep(lambda: state_of(self.meters), finished=False)
        if does_not_fit:  # only now do the error's frames let go of their tensors
            self._halve(len(piece))

    def _halve(self, size: int) -> None:
        for meter in self.meters:
            meter.forget()
        torch.cuda.empty_cache()
        self.size = size // 2
        self.keeper.halve(self.size)


def _stop(tensor: Tensor, hook: object) -> None:
    raise Enough
