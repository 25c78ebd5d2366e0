"""Measure the position that components write, block after block, over all texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.base_layer import Vectors
from nope_probe.hooks.layers.hook_points import HookedModel, hooks_attached
from nope_probe.hooks.layers.model import (
    Inputs,
    begins_alike,
    block_point,
    blocks_of,
    tapped,
)
from nope_probe.hooks.layers.passes import (
    Entry,
    entered,
    latest_entry,
    n_outputs_of,
    tensors_at,
)
from nope_probe.hooks.layers.writers import (
    BlockWriting,
    Outlet,
    blocks_that_write,
    outlets_of,
    written_by_blocks,
)
from nope_probe.hooks.reading.streaming import Stream, batches_of
from nope_probe.hooks.removing.written import (
    MeanOutput,
    Texts,
    WrittenPositions,
    fingerprints,
    null_order,
    positions_taken,
)
from nope_probe.maps.folds import halves_of
from nope_probe.removal import Writer

MASSIVE = 4.0  # times the median norm of a component's outputs
MOST = 0.5  # of the texts
BYTES = 8  # float32 of the residual stream and of an output


def capture_written(
    model: HookedModel,
    inputs: Inputs,
    writers: Sequence[str] | None = None,
    *,
    as_intact: bool = False,
    fold_of: Int[Tensor, " seq"] | None = None,
    null_seed: int | None = None,
    kept_positions: int | None = None,
    batch_size: int = 32,
    checkpoint: Stream | None = None,
) -> WrittenPositions:
    """Measure the position that components write, in the model without that of earlier ones.

    Every block runs on all texts before the next one does: once to its attention's output, and once
    more, without the position of that, to its end. The residual stream of the texts and the output
    of one component stay in main memory, `BYTES` for each of their numbers.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        inputs: the texts, of equal length.
        writers: the components; by default every block's attention and MLP.
        as_intact: whether the model keeps the position of earlier components.
        fold_of: the fold of each text, which decides its half; by default texts alternate.
        null_seed: of the order in which the positions of each text are averaged; None for the true
            order.
        kept_positions: how many first positions keep the outputs; by default 1 if all texts begin
            with the same token, else 0.
        batch_size: sequences per forward pass.
        checkpoint: deals out batches to processes; see `stream`.

    Raises:
        UserError: for a writer that the model does not have, and for too few texts: a mean is over
            the other texts of a half.
    """
    halves = halves_of(torch.arange(len(inputs)) if fold_of is None else fold_of)
    n, of_tokens = inputs.shape[1], not inputs.is_floating_point()
    # What is written where all sequences begin with the same token marks the token, no position.
    kept = int(begins_alike(inputs)) if kept_positions is None else kept_positions
    outlets = _outlets(model, inputs, writers, of_tokens=of_tokens)
    missing = 2 - min((halves == half).sum() for half in (0, 1))
    if missing > 0:
        raise UserError(
            "written position is a mean over the other texts of a half, even or odd folds: "
            f"{missing} more in a half needed"
        )
    checkpoint = checkpoint or Stream()
    if kept >= n:
        raise UserError(f"kept_positions {kept}: sequences of {n} tokens have no later positions")
    nothing = WrittenPositions(
        outputs={},
        texts=fingerprints_of(model, inputs, batch_size),
        halves=halves,
        kept_positions=kept,
        of_tokens=of_tokens,
        order=None if null_seed is None else null_order(len(inputs), n, kept, null_seed),
    )
    ends = batches_of(len(inputs), batch_size, checkpoint.rank, checkpoint.n_processes)
    batches = [torch.arange(start, stop) for start, stop in ends]
    measuring = _Measuring(model, inputs, outlets, as_intact, batches, checkpoint, nothing)
    with torch.inference_mode(), tapped(model):
        for place in range(len(outlets)):
            measuring.measure(place)
    return measuring.positions


def _outlets(
    model: HookedModel, inputs: Inputs, writers: Sequence[str] | None, *, of_tokens: bool
) -> list[tuple[Outlet, BlockWriting]]:
    """Return where writers are measured, and how their blocks write."""
    if writers is None:
        with torch.inference_mode(), tapped(model):
            whole = written_by_blocks(model, inputs[:1], len(blocks_of(model)))
        blocks = {block.index: replace(block, w_o=None) for block in whole}
        named = [name for block in blocks.values() for name in block.names]
    else:
        blocks = blocks_that_write(model, writers, inputs[:1])
        named = [Writer(name) for name in dict.fromkeys(writers)]
    outlets = outlets_of(model, named, blocks, of_tokens=of_tokens)
    return [(outlet, blocks[outlet.index]) for outlet in outlets]


def fingerprints_of(model: HookedModel, inputs: Inputs, batch_size: int) -> Int[Tensor, " text"]:
    """Return the `fingerprints` of texts, in every process those of all texts."""
    entry = {"residual": block_point(model, 0, "hook_resid_pre")}
    batches = (tensors_at(model, batch, entry) for batch in inputs.split(batch_size))
    with tapped(model):
        return torch.cat([fingerprints(batch["residual"]).cpu() for batch in batches])


@dataclass
class _Measuring:
    """The measurement in progress: residual streams before a block, and what is known so far."""

    model: HookedModel
    inputs: Inputs
    outlets: Sequence[tuple[Outlet, BlockWriting]]
    as_intact: bool
    batches: Sequence[Int[Tensor, " _text"]]  # the numbers of the texts
    checkpoint: Stream
    positions: WrittenPositions
    entry: int = 0  # the block before which the residual streams are known
    residuals: dict[int, Vectors] = field(default_factory=dict)  # by batch

    def __post_init__(self) -> None:
        self.latest = latest_entry(self.model)
        self.n_outputs = n_outputs_of(self.model, self.inputs[:1])

    def measure(self, place: int) -> None:
        """Measure what an outlet's writers write, and run the texts through a block without that.

        Residual streams behind a block are kept where nothing in it follows the outlet.
        """
        outlet, block = self.outlets[place]
        is_last_of_block = block.names[-1].kind in {writer.kind for writer in outlet.writers}
        has_later = place + 1 < len(self.outlets)
        goes_on = is_last_of_block and has_later and outlet.index < self.latest
        kept = self._tensors(place, to_end=goes_on)
        for writer in outlet.writers:
            factor = block.factor if writer.kind in ("HEAD", "ATTN", "MLP") else 1.0
            outputs = [outlet.output(writer, tensors["output"], tensors) for tensors in kept]
            measured = {**self.positions.outputs, str(writer): self._mean(outputs, factor)}
            self.positions = replace(self.positions, outputs=measured)
            if goes_on and not self.as_intact:
                for index, output in enumerate(outputs):
                    written = self.positions.written(writer, output, self.batches[index])
                    self.residuals[index] -= factor * written.to(self.residuals[index])

    def _tensors(self, place: int, *, to_end: bool) -> list[dict[str, Tensor]]:
        """Return what an outlet's outputs are known from, by batch; keep the stream behind it."""
        model, entry, texts = self.model, self.entry, Texts(self.positions.texts)
        on = next(blocks_of(model)[entry].parameters()).device
        done = [outlet for outlet, _ in self.outlets[:place] if outlet.index >= entry]
        taken = () if self.as_intact else positions_taken(done, self.positions, texts)
        # After the hooks of an ablation that the model has: outputs as it leaves them are changed.
        changes = [(point, hook) for point, hook, _ in taken]
        outlet, kept = self.outlets[place][0], list[dict[str, Tensor]]()
        points = {**outlet.points_before(), "output": outlet.point}
        if to_end:
            points["after"] = block_point(model, outlet.index, "hook_resid_post")
        for index, numbers in enumerate(self.batches):
            texts.numbers = numbers.to(on)
            begin = {entry: self.residuals[index].to(on)} if entry else {}
            entering = entered(model, Entry(residuals=begin, n_outputs=self.n_outputs), entry)
            with entering, hooks_attached(changes):
                tensors = tensors_at(model, self.inputs[numbers], points)
            kept.append({name: tensor.cpu() for name, tensor in tensors.items()})
            if to_end:
                self.residuals[index] = kept[-1].pop("after")
            n_done, n_of = place * len(numbers), len(self.outlets)
            self.checkpoint.advance((n_done + len(numbers)) // n_of - n_done // n_of)
        self.entry = outlet.index + 1 if to_end else entry
        return kept

    def _mean(
        self, outputs: Sequence[Float[Tensor, "_text pos d_model"]], factor: float
    ) -> MeanOutput:
        """Return the mean of the outputs that are not massive, over all processes' texts."""
        n, kept = self.inputs.shape[1], self.positions.kept_positions
        norms: Float[Tensor, "text pos"] = torch.zeros(len(self.inputs), n)
        for numbers, output in zip(self.batches, outputs, strict=True):
            norms[numbers] = output.float().norm(dim=-1)
        self.checkpoint.all_reduce([norms])
        limits = torch.full((n,), MASSIVE * float(norms[:, kept:].median()))
        order = self.positions.order
        are_massive = (norms if order is None else norms.gather(1, order)) > limits
        # Where most outputs are massive, as the first token's, that is what the position is like.
        limits[are_massive.float().mean(0) > MOST] = torch.inf
        d_model = outputs[0].shape[-1]
        total, counts = torch.zeros(2, n, d_model, dtype=torch.float64), torch.zeros(2, n)
        for numbers, output in zip(self.batches, outputs, strict=True):
            seen, halves = self.positions.seen(output.float(), numbers), self.positions.halves
            small = seen.norm(dim=-1) <= limits
            counted = seen.masked_fill(~small[..., None], 0.0).double()
            total.index_add_(0, halves[numbers], counted)
            counts.index_add_(0, halves[numbers], small.float())
        self.checkpoint.all_reduce([total, counts])
        mean = (total / counts.clamp(min=1)[..., None]).float()
        return MeanOutput(mean=mean, counts=counts, limits=limits, factor=factor)
