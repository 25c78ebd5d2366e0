"""The engine of every command that runs a model: conditions times captures.

A capture runs the model on all sequences, intact or in the condition of an ablation. A
finished capture is read from the run's checkpoint; any other is computed and saved. Last come
the checks of what can be removed from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.data.sequences import InputKind, Sequences, read_tokens
from nope_probe.errors import UserError
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import (
    Given,
    Inputs,
    as_inputs,
    begins_alike,
    blocks_of,
    layers_of,
    validate_inputs,
)
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.batch_readings import window_hides
from nope_probe.hooks.reading.calibration import (
    blocks_that_write,
    calibrate,
    capture_written,
    weights_checksum,
)
from nope_probe.hooks.reading.capture import capture_losses, capture_scores, capture_stages
from nope_probe.hooks.reading.readers import WriterKind, capture_positions
from nope_probe.hooks.reading.streaming import (
    StreamCheckpoint,
    restore,
    state_of,
)
from nope_probe.hooks.removing.block_ablation import ablations_of, content_heads
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Calibration, WrittenPosition
from nope_probe.maps.folds import State, default_folds, under
from nope_probe.maps.layers import with_skip_keys
from nope_probe.maps.maps import (
    AttentionMaps,
    Layers,
    ScoreMaps,
    StageMaps,
    packed_tensors,
    stored_layers,
)
from nope_probe.maps.positions import PositionSums
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import validate_reachable
from nope_probe.removal import WEIGHTS, Writer
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.flags import flag_of
from nope_probe.run.process_group import device_of_process
from nope_probe.run.session import Session
from nope_probe.run.settings import GIVEN, OF_INPUTS, RunSettings
from nope_probe.run.sources import load_first_layers
from nope_probe.studies.removing import RemovingSettings

Capture = Callable[[StreamCheckpoint | None], State]
Chosen = TypeVar("Chosen", bound=RunSettings)
Captured = TypeVar("Captured", ScoreMaps, StageMaps, PositionSums)
Sums = TypeVar("Sums", ScoreMaps, StageMaps, PositionSums, AttentionMaps, Tensor)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model and the sequences that it is run on.

    Attributes:
        model: a HookedTransformer or TransformerBridge.
        inputs: token sequences of equal length, or input vectors.
        documents: the document of each sequence, if that is known.
        checkpoint: where captures are saved; without one, nothing is kept.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from.
        calibration: gains, means and positions of removals, from `calibrated`.
        skip_keys: how many keys count as first; by default as captures set it.
        kept_positions: how many first positions keep what writers write there (see `calibrate`);
            by default as captures set it.
        query_rows: how many rows maps have; see `capture_scores`.

    A capture's `key` names it in the checkpoint; with the key None it is not kept. A capture's
    `ablation` is what the model is run without; None for the intact model.
    """

    model: HookedModel
    inputs: Tensor
    documents: Int[Tensor, " seq"] | None = None
    checkpoint: RunCheckpoint | None = None
    batch_size: int = 32
    n_folds: int = 8
    calibration: Calibration | None = None
    skip_keys: int | None = None
    kept_positions: int | None = None
    query_rows: int | None = None

    @classmethod
    def of(cls, session: Session[RunSettings], data: Sequences | None = None) -> Engine:
        """Return the engine of a run: its model on its sequences, or on some others."""
        settings, data = session.settings, data or session.sequences()
        return cls(
            model=session.loaded.model,
            inputs=data.inputs,
            documents=data.documents,
            checkpoint=session.checkpoint,
            batch_size=settings.seqs_per_batch,
            n_folds=settings.folds,
            query_rows=settings.query_rows,
            skip_keys=settings.skip_keys_of(data),
            kept_positions=settings.kept_positions_of(data),
        )

    def with_sequences(self, data: Sequences) -> Engine:
        """Return the engine of the same model on other sequences."""
        return replace(self, inputs=data.inputs, documents=data.documents)

    def calibrated(self, key: str | None, ablations: Iterable[Ablation]) -> Engine:
        """Return the engine with gains, means and positions, if an ablation needs them.

        Gains are stored without a checksum of the weights: the checkpoint belongs to a run of one
        model, and weights rewritten on another device may differ in the last bit.
        """
        needing = [ablation for ablation in ablations if ablation.needs_calibration]
        if not needing:
            return self
        seeds = [ablation.calibration_seed for ablation in needing]
        measured = self.load_or_compute(
            key,
            lambda stream: calibrate(
                self.model,
                self.inputs,
                batch_size=self.batch_size,
                seed=next((seed for seed in seeds if seed is not None), None),
                writers=sorted(
                    {name for ablation in needing for name in ablation.condition.writers}
                ),
                heads=content_heads(self.model, needing),
                kept_positions=self.kept_positions,
                checkpoint=stream,
            ).to_tensors(),
        )
        checksum = weights_checksum(self.model)
        calibration = Calibration.from_tensors(measured, checksum)
        return replace(self, calibration=calibration)

    def load_or_compute(
        self, key: str | None, capture: Capture, ablation: Ablation | None = None
    ) -> State:
        """Return the result of a capture, from the checkpoint or computed and saved.

        Args:
            key: the capture's name in the checkpoint; None to keep nothing.
            capture: returns tensors by name, given the stream to save its progress in.
            ablation: what the model is run without.
        """
        if key is None or self.checkpoint is None:
            with self._without(None, ablation):
                return capture(None)
        if key not in self.checkpoint:
            with self._without(key, ablation):
                return self.checkpoint.load_or_compute(key, capture)
        return self.checkpoint.load(key)

    def _without(
        self, key: str | None, ablation: Ablation | None
    ) -> AbstractContextManager[HookedModel]:
        if ablation is None:
            return nullcontext(self.model)
        return ablated(self.model, ablation, self._calibration_for(key, ablation))

    def _calibration_for(self, key: str | None, ablation: Ablation) -> Calibration | None:
        """Return the calibration, with positions as written in the ablated model.

        Without the mask, or behind another writer, a component writes another position than in the
        intact model, and taking away that of the intact model would leave its opposite.
        """
        calibration, keys = self.calibration, position_keys(key or "", ablation)
        if calibration is None or not keys:
            return calibration
        others = [name for name in ablation.condition.ordered if name.writer is None]
        for writer in keys:
            earlier = [w.removal for w in ablation.condition.writers if w.runs_before(writer)]
            with ablated(self.model, replace(ablation, remove=[*others, *earlier]), calibration):
                written = self._written(None if key is None else keys[writer], writer)
            positions = {**calibration.positions, writer: written}
            calibration = replace(calibration, positions=positions)
        return calibration

    def _written(self, key: str | None, writer: Writer) -> WrittenPosition:
        tensors = self.load_or_compute(
            key,
            lambda stream: capture_written(
                self.model,
                self.inputs,
                [writer],
                kept_positions=self.kept_positions,
                batch_size=self.batch_size,
                checkpoint=stream,
            )[writer].to_tensors(),
        )
        return WrittenPosition.from_tensors(tensors)

    def scores(
        self,
        key: str | None,
        ablation: Ablation | None = None,
        *,
        layers: Sequence[int] | None = None,
        per_head: bool = False,
    ) -> ScoreMaps:
        """Return the score maps of some layers (all by default); see `capture_scores`."""
        options = {"layers": layers, "per_head": per_head}
        return self._captured(ScoreMaps, key, capture_scores, ablation, **options)

    def stored_scores(
        self,
        key: str,
        ablation: Ablation | None = None,
        *,
        name: str,
        layers: Sequence[int],
        mean_term: bool = False,
        per_head: bool = False,
        also: Sequence[Accumulator] = (),
    ) -> Layers:
        """Return the maps of each layer, whose folds stay in the checkpoint until they are read.

        The passes add to the sums `also`.

        Raises:
            UserError: for a non-finite score, with the name of what was captured.
        """

        def capture(stream: StreamCheckpoint | None) -> State:
            options = {"layers": layers, "mean_term": mean_term, "per_head": per_head}
            maps = self.by_fold(capture_scores, stream, also=also, **options)
            validate_finite(maps, name)
            sums = state_of(also) if also else {}
            return packed_tensors(maps) | {f"also.{name}": sums[name] for name in sums}

        tensors = self.load_or_compute(key, capture, ablation)
        restore(also, under(tensors, "also."))
        stored = tensors if self.checkpoint is None else self.checkpoint.open(key)
        captured = stored_layers(stored)
        return captured if self.skip_keys is None else with_skip_keys(captured, self.skip_keys)

    def stages(
        self, key: str | None, ablation: Ablation | None = None, *, layer: int = 0
    ) -> StageMaps:
        """Return the stage maps of one block; see `capture_stages`."""
        return self._captured(StageMaps, key, capture_stages, ablation, layer=layer)

    def positions(
        self,
        key: str | None,
        ablation: Ablation | None = None,
        *,
        layers: Sequence[int],
        writers: WriterKind = "heads",
        per_head: bool = False,
    ) -> PositionSums:
        """Return the writers' parts in queries and keys of layers; see `capture_positions`."""
        options = {"layers": layers, "writers": writers, "per_head": per_head}
        capture = partial(capture_positions, kept_positions=self.kept_positions)
        return self._captured(PositionSums, key, capture, ablation, **options)

    def _captured(
        self,
        kind: type[Captured],
        key: str | None,
        capture: Callable[..., Captured],
        ablation: Ablation | None,
        **options: Any,
    ) -> Captured:
        """Return the result of a capture of `hooks.reading`, from the checkpoint if it is there.

        The engine's first keys are measured separately, if it names any.
        """
        tensors = self.load_or_compute(
            key, lambda stream: self.by_fold(capture, stream, **options).to_tensors(), ablation
        )
        maps = kind.from_tensors(tensors)
        return maps if self.skip_keys is None else replace(maps, skip_keys=self.skip_keys)

    def by_fold(
        self, capture: Callable[..., Sums], stream: StreamCheckpoint | None, **options: Any
    ) -> Sums:
        """Return the sums of a capture of `hooks.reading` over the sequences of each fold."""
        return capture(
            self.model,
            self.inputs,
            batch_size=self.batch_size,
            n_folds=self.n_folds,
            documents=self.documents,
            query_rows=self.query_rows,
            checkpoint=stream,
            **options,
        )

    def losses(
        self, key: str | None, ablation: Ablation | None = None
    ) -> Float[Tensor, "seq target"]:
        """Return the loss of every token, nats; see `capture_losses`."""
        capture = partial(capture_losses, self.model, self.inputs, batch_size=self.batch_size)
        return self.load_or_compute(
            key, lambda stream: {"losses": capture(checkpoint=stream)}, ablation
        )["losses"]


def position_keys(key: str, ablation: Ablation) -> dict[Writer, str]:
    """Return by writer the key of the capture of its position in the ablated model.

    Args:
        key: of the capture that the ablation is for.
        ablation: what is removed.
    """
    writers = sorted(ablation.condition.writers, key=lambda writer: writer.order)
    alone = len(writers) == len(ablation.condition)
    reached = [w for w in writers if not alone or any(other.runs_before(w) for other in writers)]
    return {writer: f"{key}/{writer}" for writer in reached}


def validate_finite(maps: ScoreMaps, condition: str) -> None:
    """Check that every score at or below the diagonal, unless masked, is finite.

    Raises:
        UserError: naming layer and condition.
    """
    below = torch.arange(maps.folds.shape[-1]) <= maps.query_positions[:, None]
    for place, layer in enumerate(maps.layers):
        for of, folds in (("", maps.folds), (" of a head", maps.per_head)):
            if folds is not None and not are_finite(folds[:, place], maps.visible[place] & below):
                raise UserError(f"non-finite scores{of} in L{layer}, {condition}")


def are_finite(
    maps: Float[Tensor, "*batch row_pos col_pos"], cells: Bool[Tensor, "row_pos col_pos"]
) -> bool:
    """Return whether maps are finite in all of the given cells."""
    return bool(maps[..., cells].isfinite().all())


def validate_first_sequence(model: HookedModel, inputs: Tensor, layers: Sequence[int]) -> None:
    """Check on one sequence, before all are run, that some layers have a pattern to measure.

    Raises:
        UserError: for a score that is not finite.
    """
    maps = capture_scores(model, inputs[:1], layers=layers, batch_size=1, n_folds=1)
    validate_finite(maps, "the intact model")


def as_sequences(model: HookedModel, given: Given) -> Sequences:
    """Return sequences with their properties; a first token that all share is a BOS token.

    Raises:
        TypeError: for a model or inputs of another kind.
        UserError: for inputs that the model cannot take.
    """
    inputs = as_inputs(model, given)
    if isinstance(given, Sequences):
        return given
    kind: InputKind = "vectors" if inputs.is_floating_point() else "text"
    return Sequences(inputs=inputs.cpu(), name="tokens", bos=begins_alike(inputs), kind=kind)


def on_inputs(
    settings: Chosen,
    data: Sequences,
    n_folds: int | None,
) -> Chosen:
    """Return the settings of a run on given sequences.

    Args:
        settings: of the run.
        data: its sequences.
        n_folds: into how many folds they are dealt; by default 8, or as many as there are
            documents.
    """
    n_seqs, seq_len = data.inputs.shape[:2]
    folds = folds_for_intervals(data, n_folds)
    return replace(settings, data=GIVEN, n_seqs=n_seqs, seq_len=seq_len, folds=folds)


def on_tokens(settings: Chosen, file: Path) -> tuple[Chosen, LoadedModel, Sequences]:
    """Return the settings, the model and the sequences of a run on the tokens of a file.

    Raises:
        UserError: for a flag that describes other sequences, or tokens that cannot be read or run.
    """
    others = {name: value for name, value in vars(settings).items() if name not in OF_INPUTS}
    by_default = type(settings)(**others)
    for name in OF_INPUTS:
        if getattr(settings, name) != getattr(by_default, name):
            raise UserError(f"{flag_of(name)} has no effect next to --tokens")
    validate_reachable(settings.model, settings.revision)
    data = read_tokens(file)
    loaded = load_first_layers(settings, device_of_process(settings.device))
    validate_inputs(loaded.model, data.inputs)
    default = type(settings).folds == settings.folds
    n_folds = None if default else settings.folds
    try:
        return on_inputs(settings, data, n_folds), loaded, data
    except ValueError as error:
        raise UserError(f"--tokens {file.name}: {error}") from error


def first_layers(model: HookedModel, n_layers: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that attend, among some first layers or all.

    Raises:
        ValueError: for more layers than there are, or no attention.
    """
    attending, depth = [layer.index for layer in layers_of(model)], len(blocks_of(model))
    if n_layers is not None and not 1 + attending[0] <= n_layers <= depth:
        raise ValueError(f"expected from {1 + attending[0]} to {depth} layers, got {n_layers}")
    return tuple(layer for layer in attending if layer < (n_layers or depth))


def folds_for_intervals(inputs: Sequences, n_folds: int | None) -> int:
    """Return how many folds the sequences are dealt to, 4 at least; by default 8 or fewer.

    Raises:
        ValueError: for too few folds, or more than there are sequences (documents).
    """
    most, kind = inputs.n_documents, "sequences" if inputs.documents is None else "documents"
    if most < 4:
        raise ValueError(f"expected 4 {kind} or more for intervals, got {most}")
    if n_folds is None:
        return default_folds(most)
    if not 4 <= n_folds <= most:
        raise ValueError(f"expected from 4 to {most} folds for {most} {kind}, got {n_folds}")
    return n_folds


def validate_removable(model: HookedModel, ablations: Iterable[Ablation]) -> None:
    """Check that a model has what is removed: bands, weights that are separate matrices, writers.

    Raises:
        UserError: naming a part that cannot be removed, and why.
    """
    try:
        for ablation in ablations:
            ablations_of(model, ablation)
            blocks_that_write(model, ablation.condition.writers)
    except ValueError as error:
        raise UserError(str(error)) from error


def ablation_of(model: HookedModel, settings: RemovingSettings) -> Ablation:
    """Return the ablation of all that a command removes at once, by its first replacement.

    Raises:
        UserError: for a component that the model lacks, or that cannot be removed, and why.
    """
    ablation = settings.ablations[0].without(settings.removed)
    validate_removable(model, [ablation])
    return ablation


def irreplaceable(model: HookedModel) -> dict[str, str]:
    """Return the weights of a model that no ablation can replace, and why."""
    return {
        name: reason
        for name in WEIGHTS
        for layer in layers_of(model)
        if (reason := layer.why_not_replaced(name)) is not None
    }


def idle_sources(model: HookedModel, inputs: Inputs, n_layers: int) -> dict[str, str]:
    """Return the sources of a model that do nothing in sequences of this length, and why.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: tokens, or vectors.
        n_layers: how many blocks are run.
    """
    if "window" not in components(model) or window_hides(model, inputs[:1], n_layers):
        return {}
    return {"window": f"it hides no key in sequences of {inputs.shape[1]} tokens"}
