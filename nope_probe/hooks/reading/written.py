"""Measure the position that blocks write, block after block, over all texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.base_layer import Vectors
from nope_probe.hooks.layers.hook_points import (
    Attachment,
    HookedModel,
    HookPoint,
    hooks_attached,
    hooks_in_place,
)
from nope_probe.hooks.layers.model import Inputs, block_point, blocks_of, layers_of, tapped
from nope_probe.hooks.layers.passes import Entry, entered, n_outputs_of, run_forward
from nope_probe.hooks.layers.tap import StopForward
from nope_probe.hooks.reading.streaming import StreamCheckpoint, batches_of
from nope_probe.hooks.reading.writers import BlockWriting, written_by_blocks
from nope_probe.hooks.removing.replacements import BlockPositions, MeanOutput
from nope_probe.hooks.removing.written import (
    POINTS,
    Texts,
    fingerprints,
    null_order,
    without_written,
)
from nope_probe.maps.folds import halves_of
from nope_probe.removal import WRITTEN_NULL, Component, Writer

MASSIVE = 4.0  # times the median norm of a component's outputs
MOST = 0.5  # of the texts
BYTES = 8  # float32 of the residual stream and of an output


def capture_block_positions(
    model: HookedModel,
    inputs: Inputs,
    *,
    fold_of: Int[Tensor, " seq"] | None = None,
    null_seed: int | None = None,
    kept_positions: int = 1,
    batch_size: int = 32,
    checkpoint: StreamCheckpoint | None = None,
) -> BlockPositions:
    """Measure the position that every block writes, in the model without that of earlier blocks.

    Every block runs on all texts before the next one does: once to its attention's output, and once
    more, without the position of that, to its end. The residual stream of the texts and the output
    of one component stay in main memory, `BYTES` for each of their numbers.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: the texts, of equal length.
        fold_of: the fold of each text, which decides its half; by default texts alternate.
        null_seed: of the order in which the positions of each text are averaged; None for the true
            order.
        kept_positions: how many first positions keep the outputs.
        batch_size: sequences per forward pass.
        checkpoint: deals out batches to processes; see `stream`.

    Raises:
        UserError: for too few texts: a mean is over the other texts of a half.
    """
    halves = halves_of(torch.arange(len(inputs)) if fold_of is None else fold_of)
    missing = 2 - min((halves == half).sum() for half in (0, 1))
    if missing > 0:
        raise UserError(
            "written position is a mean over the other texts of a half, even or odd folds: "
            f"{missing} more in a half needed"
        )
    checkpoint = checkpoint or StreamCheckpoint()
    n, kept = inputs.shape[1], kept_positions
    if kept >= n:
        raise UserError(f"kept_positions {kept}: sequences of {n} tokens have no later positions")
    sharing = [layer.index for layer in layers_of(model) if layer.shares_keys]
    with torch.inference_mode(), tapped(model):
        whole = written_by_blocks(model, inputs[:1], len(blocks_of(model)))
    blocks = [block.with_whole_attention for block in whole]
    measuring = _Measuring(
        model=model,
        inputs=inputs,
        batches=batches_of(len(inputs), batch_size, checkpoint.rank, checkpoint.n_processes),
        latest=min(sharing, default=len(blocks_of(model))),
        checkpoint=checkpoint,
        n_writers=sum(len(block.names) for block in blocks),
        n_outputs=n_outputs_of(model, inputs[:1]),
        positions=BlockPositions(
            outputs={},
            texts=fingerprints_of(model, inputs, batch_size),
            halves=halves,
            kept_positions=kept,
            order=None if null_seed is None else null_order(len(inputs), n, kept, null_seed),
        ),
    )
    with torch.inference_mode(), tapped(model):
        for block in blocks:
            measuring.measure(block, is_last=block is blocks[-1])
    return measuring.positions


def fingerprints_of(model: HookedModel, inputs: Inputs, batch_size: int) -> Int[Tensor, " text"]:
    """Return the `fingerprints` of texts, in every process those of all texts."""
    found = list[Tensor]()

    def keep(residual: Vectors, hook: HookPoint) -> None:
        found.append(fingerprints(residual).cpu())
        raise StopForward

    entry = block_point(model, 0, "hook_resid_pre")
    with torch.inference_mode(), tapped(model), hooks_attached([(entry, keep)]):
        for batch in inputs.split(batch_size):
            run_forward(model, batch)
    return torch.cat(found)


def null_seed_of(removal: Component, seed: int) -> int | None:
    """Return the seed of the null of written position; None for written position itself."""
    return seed + 1 if removal == WRITTEN_NULL else None


@dataclass(kw_only=True)
class _Measuring:
    """The measurement in progress: residual streams before a block, and what is known so far."""

    model: HookedModel
    inputs: Inputs
    batches: Sequence[tuple[int, int]]
    latest: int
    checkpoint: StreamCheckpoint
    n_writers: int
    n_outputs: int
    positions: BlockPositions
    residuals: dict[int, Vectors] = field(default_factory=dict)  # by the first text of the batch

    def measure(self, block: BlockWriting, *, is_last: bool) -> None:
        """Measure what a block writes, and run the texts through it without that."""
        number = block.index
        for writer in block.names:
            is_end = writer == block.names[-1]
            goes_on = is_end and number < self.latest and not is_last
            outputs = self._outputs(writer, number, to_end=goes_on)
            measured = {**self.positions.outputs, str(writer): self._mean(outputs)}
            self.positions = replace(self.positions, outputs=measured)
            if goes_on:
                # Blocks that are no sum write what they add; others may scale their outputs.
                factor = 1.0 if writer.kind == "BLOCK" else block.factor
                for start, output in outputs.items():
                    written = self.positions.written(writer, output, self._numbers(start))
                    self.residuals[start] -= factor * written.to(output)

    def _numbers(self, start: int) -> Int[Tensor, " batch"]:
        stop = dict(self.batches)[start]
        return torch.arange(start, stop)

    def _outputs(self, writer: Writer, number: int, *, to_end: bool) -> dict[int, Vectors]:
        """Return a component's output in every batch; keep the residual stream after a block."""
        model, entry = self.model, min(number, self.latest)
        place = next(blocks_of(model)[entry].parameters()).device
        texts, kept = Texts(self.positions.texts), dict[str, Tensor]()
        known = [name for name in self.positions.outputs if Writer(name).block >= entry]
        groups = [*without_written(model, self.positions, known, texts)]
        is_block = writer.kind == "BLOCK"  # what it adds is known at its end
        hooks = self._reading(writer, number, kept, to_end=to_end or is_block)
        outputs: dict[int, Vectors] = {}
        for start, stop in self.batches:
            texts.numbers = self._numbers(start).to(place)
            residuals = {entry: self.residuals[start].to(place)} if entry else {}
            begin = Entry(residuals=residuals, n_outputs=self.n_outputs)
            with entered(model, begin, entry), hooks_in_place(groups), hooks_attached(hooks):
                run_forward(model, self.inputs[start:stop])
            outputs[start] = kept["after"] - kept["before"] if is_block else kept["output"]
            if to_end:
                self.residuals[start] = kept["after"]
            n_done, n_of = len(self.positions.outputs) * (stop - start), self.n_writers
            self.checkpoint.advance((n_done + stop - start) // n_of - n_done // n_of)
        return outputs

    def _reading(
        self, writer: Writer, number: int, kept: dict[str, Tensor], *, to_end: bool
    ) -> list[Attachment]:
        """Return the hooks that keep what a pass is for, the last of which ends it."""
        names = {"before": "hook_resid_pre", "output": POINTS[writer.kind]}
        if to_end:
            names["after"] = "hook_resid_post"

        def keep(name: str, tensor: Tensor, hook: HookPoint) -> None:
            kept[name] = tensor.cpu()
            if name == [*names][-1]:
                raise StopForward

        return [
            (block_point(self.model, number, point), partial(keep, name))
            for name, point in names.items()
        ]

    def _mean(self, outputs: dict[int, Vectors]) -> MeanOutput:
        """Return the mean of the outputs that are not massive, over all processes' texts."""
        n, kept = self.inputs.shape[1], self.positions.kept_positions
        norms: Float[Tensor, "text pos"] = torch.zeros(len(self.inputs), n)
        for start, output in outputs.items():
            norms[start : start + len(output)] = output.float().norm(dim=-1)
        self.checkpoint.all_reduce([norms])
        limits = torch.full((n,), MASSIVE * float(norms[:, kept:].median()))
        order = self.positions.order
        are_massive = (norms if order is None else norms.gather(1, order)) > limits
        # Where most outputs are massive, as the first token's, that is what the position is like.
        limits[are_massive.float().mean(0) > MOST] = torch.inf
        d_model = next(iter(outputs.values())).shape[-1]
        total, counts = torch.zeros(2, n, d_model, dtype=torch.float64), torch.zeros(2, n)
        for start, output in outputs.items():
            numbers = self._numbers(start)
            seen, halves = self.positions.seen(output.float(), numbers), self.positions.halves
            small = seen.norm(dim=-1) <= limits
            counted = seen.masked_fill(~small[..., None], 0.0).double()
            total.index_add_(0, halves[numbers], counted)
            counts.index_add_(0, halves[numbers], small.float())
        self.checkpoint.all_reduce([total, counts])
        mean = (total / counts.clamp(min=1)[..., None]).float()
        return MeanOutput(mean=mean, counts=counts, limits=limits)
