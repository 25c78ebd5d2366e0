"""Passes that begin at a block: what comes before it is computed once for many ablations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.hooks.layers.base_layer import Vectors
from nope_probe.hooks.layers.hook_points import (
    HookedModel,
    HookPoint,
    OfThread,
    hooks_attached,
    replaced_in_this_thread,
)
from nope_probe.hooks.layers.model import (
    Inputs,
    block_point,
    blocks_of,
    layers_of,
    logits_of,
    modules_of,
    run_forward,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """The residual stream of sequences before some blocks, for passes that begin there.

    Attributes:
        residuals: [seq, pos, d_model] by the number of the block.
        n_outputs: how many values a block returns; 0 for the residual stream alone.
    """

    residuals: Mapping[int, Vectors]
    n_outputs: int

    @classmethod
    def joined(cls, batches: Sequence[Entry]) -> Entry:
        """Return the residual streams of several batches as those of one."""
        first, *_ = batches
        numbers = first.residuals
        joined = {n: torch.cat([batch.residuals[n] for batch in batches]) for n in numbers}
        return cls(residuals=joined, n_outputs=first.n_outputs)


def run_to_enter(
    model: HookedModel, tokens: Int[Tensor, "batch pos"], numbers: Iterable[int]
) -> tuple[Entry, Float[Tensor, "batch logit_pos d_vocab"]]:
    """Run a batch, and keep what `entered` needs to begin passes at some blocks.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: the batch.
        numbers: of the blocks; at block 0, a pass begins as ever. A later block that attends to the
            keys of an earlier one is left for the latest block that all keys come after.

    Returns:
        What was kept, and the logits.
    """
    residuals = dict[int, Tensor]()

    def keep(tensor: Tensor, hook: HookPoint, number: int) -> None:
        residuals[number] = tensor

    sharing = [layer.index for layer in layers_of(model) if layer.shares_keys]
    latest = min(sharing, default=len(blocks_of(model)))
    points = [
        (block_point(model, number, "hook_resid_pre"), partial(keep, number=number))
        for number in {min(number, latest) for number in numbers} - {0}
    ]
    with _counting_outputs(model) as counts, hooks_attached(points):
        logits = logits_of(model, tokens)
    return Entry(residuals=residuals, n_outputs=counts[0]), logits


def n_outputs_of(model: HookedModel, inputs: Inputs) -> int:
    """Return how many values the first block of a model returns; 0 for a single tensor."""
    with _counting_outputs(model) as counts:
        run_forward(model, inputs)
    return counts[0]


@contextmanager
def _counting_outputs(model: HookedModel) -> Iterator[list[int]]:
    counts = list[int]()

    def count(module: nn.Module, args: object, output: object) -> None:
        counts.append(len(output) if isinstance(output, tuple) else 0)

    with blocks_of(model)[0].register_forward_hook(OfThread(count)):
        yield counts


@contextmanager
def entered(
    model: HookedModel,
    entry: Entry,
    number: int,
    rows: Callable[[], Tensor | slice] = lambda: slice(None),
) -> Iterator[None]:
    """Begin passes at a block: earlier blocks do not run, and their hooks see nothing.

    Args:
        model: the model, with no other change than in this block and later ones.
        entry: of the same sequences.
        number: of the block. A pass begins at the latest block up to it whose residual stream was
            kept.
        rows: returns the sequences of the batch that is run; by default all of the entry.
    """
    number = max((kept for kept in entry.residuals if kept <= number), default=0)

    def skip(*_: object, **__: object) -> object:
        residual = entry.residuals[number][rows()]
        return (residual, *[None] * (entry.n_outputs - 1)) if entry.n_outputs else residual

    with ExitStack() as stack:
        for block in blocks_of(model)[:number]:
            stack.enter_context(replaced_in_this_thread(block, "forward", lambda _: skip))
        yield


@contextmanager
def logits_from(model: HookedModel, position: int) -> Iterator[None]:
    """Compute logits from a position on: the unembedding is a quarter of a small model's work."""

    def cut(
        module: nn.Module, inputs: tuple[Float[Tensor, "batch pos d_model"]]
    ) -> tuple[Float[Tensor, "batch later d_model"]]:
        return (inputs[0][:, position:],)

    with modules_of(model)["unembed"].register_forward_pre_hook(OfThread(cut)):
        yield
