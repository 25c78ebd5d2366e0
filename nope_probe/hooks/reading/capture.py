"""Stream batches through a model for means of maps, losses, and sums of its residual streams.

A map is updated inside the hook that reads its tensor, in float64 and one fold at a time. Folds
are fixed before the first batch, so results do not depend on the batch size or on how many
processes share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from nope_probe.errors import UserError, as_tuple, validate_types
from nope_probe.files import json_checksum
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint
from nope_probe.hooks.layers.model import (
    Given,
    begins_alike,
    layers_of,
    numbered_layers,
    skip_keys_of,
)
from nope_probe.hooks.layers.objects import Model, some_numbers
from nope_probe.hooks.layers.passes import traits_of
from nope_probe.hooks.layers.tap import RemovedPairs
from nope_probe.hooks.reading.accumulators import (
    STAGES,
    Accumulator,
    Cut,
    GramAccumulator,
    HeadAccumulator,
    ScoreAccumulator,
    available,
    stacked_means,
)
from nope_probe.hooks.reading.calibration import tensor_checksum
from nope_probe.hooks.reading.streaming import Stream, dealt, stream
from nope_probe.hooks.removing.written import estimated_on_halves
from nope_probe.maps.folds import FoldSum
from nope_probe.maps.maps import ScoreMaps, StageMaps
from nope_probe.maps.rows import choose_rows, chosen_rows
from nope_probe.removal import Component
from nope_probe.stages import Letter


def capture_scores(
    model: Model,
    inputs: Given,
    *,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    documents: Int[Tensor, " seq"] | None = None,
    per_head: bool = False,
    query_rows: int | None = None,
    band: str | None = None,
    checkpoint: Stream | None = None,
    also: Sequence[Accumulator] = (),
) -> ScoreMaps:
    """Average the attention scores of some layers over sequences and heads.

    Args:
        model: in any form that `load` takes in memory, or what it returns, ablated or not.
        inputs: token sequences of equal length, input vectors, `Sequences`, a text, or texts of
            equally many tokens.
        layers: block numbers from 0; all that attend by default.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals; by default 8, or as
            many as there are sequences (documents) if these are fewer.
        documents: the document of each sequence (`Sequences.documents`), whose sequences go to one
            fold; by default the documents of `Sequences`, else every sequence is independent.
        per_head: whether to keep each head's map too (n_heads times the memory).
        query_rows: how many rows (queries) the maps have: evenly spread, and a run at the end; by
            default all rows up to 2,048 positions, and 512 rows above.
        band: take the part of the scores that some of RoPE's pairs make, such as `rope[0:8]` or
            `rope_high`; by default whole scores.
        checkpoint: deals out batches to processes and saves sums; see `stream`.
        also: further sums that the passes add to.

    Returns:
        Fold means in nats, on the CPU.

    Raises:
        UserError: for a layer that the model does not have, or for a token that the model lacks, an
            empty fold, more rows than positions, or a band that a layer does not have.
        NotImplementedError: for a band of scores that are not q.k (soft-capped ones).

    Example:
        >>> from nope_probe import load, capture_scores
        >>> model = load("parameter-free").model
        >>> capture_scores(model, torch.randn(16, 5, 64), n_folds=4).mean.shape
        torch.Size([4, 5, 5])
    """
    model, inputs, fold_of = dealt(model, inputs, n_folds, documents)
    blocks = numbered_layers(model, layers)
    cut = Cut(
        counts=fold_of.bincount(),
        queries=chosen_rows(inputs.shape[1], query_rows),
        coordinates=None if band is None else _coordinates(model, blocks, band, inputs.shape[1]),
    )
    scores = [ScoreAccumulator(layer, cut) for layer in blocks]
    heads = [HeadAccumulator(layer, cut) for layer in blocks] if per_head else []
    sums = [*scores, *heads, *also]
    stream(model, inputs, sums, fold_of, batch_size, checkpoint)
    return ScoreMaps(
        per_head=stacked_means(heads).get("map"),
        visible=torch.stack([score.flags["visible"].cpu() for score in scores]),
        folds=stacked_means(scores)["map"],
        counts=cut.counts,
        layers=tuple(layer.index for layer in blocks),
        bos=begins_alike(inputs),
        skip_keys=skip_keys_of(inputs),
        query_positions=choose_rows(inputs.shape[1], query_rows),
        across_halves=estimated_on_halves(model, fold_of),
        checksums=(
            _checksum([inputs]),
            *(_checksum(map(some_numbers, layer.block.parameters())) for layer in blocks),
        ),
    )


def _checksum(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of tensors as a number of 60 bits, which fits into a tensor."""
    return int(json_checksum([tensor_checksum(tensor) for tensor in tensors])[:15], 16)


def _coordinates(
    model: HookedModel, layers: Sequence[Layer], band: str, n_pos: int
) -> dict[int, Int[Tensor, " coordinate"]]:
    """Return the coordinates of a head that a band of RoPE turns, by block."""
    name, traits, coordinates = Component(band), traits_of(model), {}
    if name.kind != "rope":
        raise UserError(f"expected pairs of RoPE, such as rope[0:8] or rope_high, got {band}")
    for layer in layers:
        rotary = traits[layer.index].rotary
        if rotary is None:
            raise UserError(f"L{layer.index} has no RoPE, so its scores have no band {band}")
        chosen = RemovedPairs(bands=[name], rotary=rotary).mask(n_pos)
        coordinates[layer.index] = rotary.known_pairs[chosen].flatten()
    return coordinates


def capture_stages(
    model: Model,
    inputs: Given,
    *,
    layer: int = 0,
    stages: Sequence[Letter] | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    documents: Int[Tensor, " seq"] | None = None,
    query_rows: int | None = None,
    checkpoint: Stream | None = None,
) -> StageMaps:
    """Average the Gram maps of stages (a) to (i) around one block (the paper's Figure 3).

    Args:
        model: in any form that `load` takes in memory, or what it returns, ablated or not.
        inputs: token sequences of equal length, input vectors, `Sequences`, a text, or texts of
            equally many tokens.
        layer: the block under study, from 0.
        stages: letters; by default all stages of the block.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals; by default 8, or as
            many as there are sequences (documents) if these are fewer.
        documents: the document of each sequence (`Sequences.documents`), whose sequences go to one
            fold; by default the documents of `Sequences`, else every sequence is independent.
        query_rows: how many rows the maps have; see `capture_scores`.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Raises:
        UserError: for a block that the model does not have, or for a stage that this block does not
            have.

    Example:
        >>> from nope_probe import capture_stages, load
        >>> maps = capture_stages(load("parameter-free").model, torch.randn(16, 5, 64), layer=1)
        >>> maps.mean("a").shape
        torch.Size([5, 5])
    """
    given = None if stages is None else as_tuple(stages)
    validate_types({"stages": tuple[Letter, ...] | None}, {"stages": given})
    model, inputs, fold_of = dealt(model, inputs, n_folds, documents)
    blocks = {block.index: block for block in layers_of(model)}
    has = available(blocks, layer)
    letters = has if stages is None else list(stages)
    missing = [letter for letter in letters if letter not in has]
    if missing:
        raise UserError(f"block {layer} has the stages {' '.join(has)}, not {' '.join(missing)}")
    cut = Cut(counts=fold_of.bincount(), queries=chosen_rows(inputs.shape[1], query_rows))
    accumulators: dict[Letter, GramAccumulator | ScoreAccumulator] = {}
    for letter in letters:
        stage, block = STAGES[letter], blocks[layer + STAGES[letter].block]
        accumulators[letter] = (
            ScoreAccumulator(block, cut) if stage.scores else GramAccumulator(stage, block, cut)
        )
    stream(model, inputs, list(accumulators.values()), fold_of, batch_size, checkpoint)
    return StageMaps(
        folds={letter: of.all_means()["map"] for letter, of in accumulators.items()},
        visible={
            letter: accumulator.flags["visible"].cpu()
            for letter, accumulator in accumulators.items()
            if STAGES[letter].scores
        },
        counts=cut.counts,
        bos=begins_alike(inputs),
        skip_keys=skip_keys_of(inputs),
        query_positions=choose_rows(inputs.shape[1], query_rows),
    )


def capture_losses(
    model: Model, tokens: Given, *, batch_size: int = 32, checkpoint: Stream | None = None
) -> Float[Tensor, "seq target"]:
    """Return the loss of every token but the first of each sequence, in nats, float64 on the CPU.

    Args:
        model: in any form that `load` takes in memory, or what it returns, ablated or not.
        tokens: sequences of equal length, `Sequences`, a text, or texts of equally many tokens.
        batch_size: sequences per forward pass; the logits of one batch are in memory.
        checkpoint: deals out batches to processes and saves finished losses; see `stream`.

    Example:
        >>> from nope_probe import capture_losses, load, sequences
        >>> loaded = load("rope-tiny")
        >>> tokens = sequences(tokenizer=loaded.tokenizer, n_seqs=3, seq_len=16).inputs
        >>> capture_losses(loaded.model, tokens).shape
        torch.Size([3, 15])
    """
    model, tokens, _ = dealt(model, tokens)
    if tokens.is_floating_point():
        raise UserError("losses need tokens: vectors have none")
    losses = LossAccumulator(len(tokens))
    stream(model, tokens, [losses], torch.arange(len(tokens)), batch_size, checkpoint)
    return losses.totals["losses"].cpu()


class LossAccumulator(Accumulator):
    """Sums the loss of every token; where each sequence is a fold, it keeps them.

    Args:
        n_folds: parts of the sequences.
        first: the first position that has logits; see `passes.logits_from`.
    """

    reads_logits = True

    def __init__(self, n_folds: int, first: int = 0) -> None:
        super().__init__(n_folds)
        self.first = first

    def read_logits(
        self, logits: Float[Tensor, "batch logit_pos d_vocab"], tokens: Int[Tensor, "batch pos"]
    ) -> None:
        """Add the losses of a batch: -log p(token | earlier tokens), nats.

        Column i is the loss of token i + 1 under the logits at position i. Logits become float32
        one sequence at a time, to avoid a second tensor of the batch's size.
        """
        targets = tokens[:, self.first + 1 :].to(logits.device)
        losses = [
            (fold, cross_entropy(of_seq[:-1].float(), ids, reduction="none"))
            for fold, of_seq, ids in zip(self.fold_of.tolist(), logits, targets, strict=True)
        ]
        self.add(losses=losses)


Targets = Float[Tensor, "seq pos target"]
Residuals = Float[Tensor, "batch pos row"]
FoldSums = dict[str, list[FoldSum]]
ResidualParts = Callable[[Residuals, Int[Tensor, " batch"]], FoldSums]


def capture_moments(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    targets: Targets,
    *,
    n_layers: int | None = None,
    skip: int = 0,
    batch_size: int = 32,
    checkpoint: Stream | None = None,
) -> tuple[Float[Tensor, "layer row col"], Float[Tensor, "layer row target"]]:
    """Return X'X and X'y of the residual stream after each block, summed in float64 on the CPU.

    X is the residual stream with a last column of ones, so d_model + 1 columns; a row is a position
    of a sequence.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        tokens: sequences of equal length.
        targets: y, one or several numbers per position.
        n_layers: how many first blocks; all by default.
        skip: first positions to leave out.
        batch_size: sequences per forward pass.
        checkpoint: deals out batches to processes and saves sums; see `stream`.
    """
    kept = targets[:, skip:].double()

    def products(x: Residuals, numbers: Int[Tensor, " batch"]) -> FoldSums:
        y = rearrange(kept[numbers], "seq pos target -> (seq pos) target")
        rows = rearrange(x, "seq pos row -> (seq pos) row")
        return {"xx": [(0, rows.T @ rows)], "xy": [(0, rows.T @ y.to(rows.device))]}

    blocks = layers_of(model)[:n_layers]
    sums = [ResidualAccumulator(layer, 1, skip, products) for layer in blocks]
    stream(model, tokens, sums, torch.arange(len(tokens)), batch_size, checkpoint)
    xx, xy = (torch.cat([moments.totals[name].cpu() for moments in sums]) for name in ("xx", "xy"))
    return xx, xy


def capture_distances(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    weights: Float[Tensor, "layer row fit"],
    *,
    skip: int = 0,
    batch_size: int = 32,
    checkpoint: Stream | None = None,
) -> Float[Tensor, "seq layer fit"]:
    """Return how far, in positions, each fit's prediction is from the index, on average.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        tokens: sequences of equal length.
        weights: weights of each block's fits; the last row is the constant.
        skip: first positions to leave out.
        batch_size: sequences per forward pass.
        checkpoint: deals out batches to processes and saves sums; see `stream`.
    """

    def distances(fits: Tensor, x: Residuals, numbers: Int[Tensor, " batch"]) -> FoldSums:
        predicted = x @ fits.double().to(x.device)
        index = torch.arange(skip, skip + x.shape[1], device=x.device)
        errors = (predicted - index[:, None]).abs().mean(1)
        return {"distances": list(zip(numbers.tolist(), errors, strict=True))}

    sums = [
        ResidualAccumulator(layer, len(tokens), skip, partial(distances, fits))
        for layer, fits in zip(layers_of(model), weights, strict=False)
    ]
    stream(model, tokens, sums, torch.arange(len(tokens)), batch_size, checkpoint)
    return torch.stack([accumulator.totals["distances"].cpu() for accumulator in sums], 1)


class ResidualAccumulator(Accumulator):
    """Sums over positions of one block's output.

    Args:
        layer: the block.
        n_folds: how many folds.
        skip: how many first positions are left out.
        parts: returns a batch's parts of the totals, from its residuals in float64 with a last
            column of ones, and the numbers of its sequences, by which their targets are known.
    """

    def __init__(self, layer: Layer, n_folds: int, skip: int, parts: ResidualParts) -> None:
        super().__init__(n_folds)
        self.layer, self.skip, self.parts = layer, skip, parts

    def hooks(self) -> Iterator[Attachment]:
        yield self.layer.point("hook_resid_post"), self.update

    def update(self, tensor: Float[Tensor, "batch pos d_model"], hook: HookPoint) -> None:
        """Add a batch."""
        kept = tensor[:, self.skip :].double()
        x = torch.cat([kept, kept.new_ones(*kept.shape[:2], 1)], -1)
        self.add(**self.parts(x, self.fold_of))
