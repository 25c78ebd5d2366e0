"""The engine of every command that runs a model: conditions times captures.

A capture runs the model on all sequences, intact or in the condition of an ablation. A
finished capture is read from the run's checkpoint; any other is computed and saved. Last come
the checks of what can be removed from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.hooks.ablation import ablated, ablations_of, content_heads, with_written
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs, layers_of
from nope_probe.hooks.layers.passes import window_hides
from nope_probe.hooks.layers.writers import blocks_that_write
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.hooks.reading.streaming import Stream, restore, state_of
from nope_probe.hooks.reading.written import capture_written
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.hooks.removing.weights import AS_INTACT, Calibration
from nope_probe.hooks.removing.written import WrittenPositions
from nope_probe.maps.folds import State, folds_of, under
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
from nope_probe.removal import WEIGHTS, Writer
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.session import Session
from nope_probe.run.settings import RunSettings
from nope_probe.studies.conditions import RemovingSettings

NOTHING = Ablation()  # is removed: the intact model
Captured = TypeVar("Captured", StageMaps, PositionSums)
Sums = TypeVar("Sums", ScoreMaps, StageMaps, PositionSums, AttentionMaps, Tensor)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model and the sequences that it is run on.

    Attributes:
        model: a HookedTransformer or TransformerBridge.
        inputs: token sequences of equal length, or input vectors.
        documents: the document of each sequence, if that is known.
        checkpoint: where captures are saved; without one, nothing is kept.
        stream: hears of the batches of captures that are not kept.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from.
        calibration: gains, means and positions of removals, from `calibrated`.
        skip_keys: how many keys count as first; by default as captures set it.
        kept_positions: how many first positions keep what writers write there (see `calibrate`);
            by default as captures set it.
        query_rows: how many rows maps have; see `capture_scores`.
        texts: of the same length, whose mean is the position that blocks write; by default the
            inputs.
        results: of the passes before, by their keys; `run_passes` sets them.

    A capture's `key` names it in the checkpoint, its `ablation` is what the model is run without.
    """

    model: HookedModel
    inputs: Tensor
    documents: Int[Tensor, " seq"] | None = None
    checkpoint: RunCheckpoint | None = None
    stream: Stream | None = None
    batch_size: int = 32
    n_folds: int = 8
    calibration: Calibration | None = None
    skip_keys: int | None = None
    kept_positions: int | None = None
    query_rows: int | None = None
    texts: Sequences | None = None
    results: Mapping[str, Any] = field(default_factory=dict)

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
            skip_keys=settings.n_first(data.kind != "vectors"),
            kept_positions=settings.n_first(data.bos),
        )

    @property
    def fold_of(self) -> Int[Tensor, " seq"]:
        """The fold of each sequence."""
        return folds_of(len(self.inputs), self.n_folds, self.documents)

    def calibrated(self, key: str, ablations: Iterable[Ablation]) -> Engine:
        """Return the engine with the gains, means and patterns that some of the ablations need.

        They have no checksum of the weights, because the checkpoint belongs to a run of one model.
        """
        needing = [ablation for ablation in ablations if ablation.needs_intact]
        seeds = [ablation.calibration_seed for ablation in needing]
        measure = partial(
            calibrate,
            self.model,
            self.inputs,
            batch_size=self.batch_size,
            seed=next((seed for seed in seeds if seed is not None), None),
            heads=content_heads(self.model, needing),
        )
        tensors = self.load_or_compute(
            key, lambda _, stream: measure(checkpoint=stream).to_tensors()
        )
        return replace(self, calibration=Calibration.from_tensors(tensors))

    def with_positions(self, key: str, writers: Sequence[Writer]) -> Engine:
        """Return the engine with the position that each of some writers writes alone."""
        capture = partial(written, writers=writers, as_intact=True)
        tensors = self.load_or_compute(key, capture)
        positions = {AS_INTACT: WrittenPositions.from_tensors(tensors)}
        return replace(self, calibration=Calibration(positions=positions))

    def load_or_compute(self, key: str, capture: Capture, ablation: Ablation = NOTHING) -> State:
        """Return the result of a capture, from the checkpoint or computed and saved.

        Args:
            key: the capture's name in the checkpoint.
            capture: returns tensors by name, given the engine and the stream to save progress in.
            ablation: what the model is run without.
        """
        if self.checkpoint is None:
            with self._without(key, ablation):
                return capture(self, self.stream)
        if key not in self.checkpoint:
            with self._without(key, ablation), self.checkpoint.stream(key) as stream:
                tensors = capture(self, stream)
            self.checkpoint.save(key, tensors)
        return self.checkpoint.load(key)

    def _without(self, key: str, ablation: Ablation) -> AbstractContextManager[HookedModel]:
        if not ablation.condition:
            return nullcontext(self.model)
        return ablated(self.model, ablation, self._calibration_for(ablation))

    def _calibration_for(self, ablation: Ablation) -> Calibration:
        """Return the calibration, with the position that the ablation removes."""

        def measure(**options: Any) -> WrittenPositions:
            key = position_key(ablation, self)
            return WrittenPositions.from_tensors(
                self.load_or_compute(key, partial(written, **options))
            )

        return with_written(self.model, ablation, self.calibration or Calibration(), measure)

    def scores(
        self,
        key: str,
        ablation: Ablation = NOTHING,
        *,
        layers: Sequence[int] | None = None,
        per_head: bool = False,
        also: Sequence[Accumulator] = (),
    ) -> Layers:
        """Return the score maps of some layers (all by default); see `capture_scores`.

        Their folds are mapped from the checkpoint, and read where they are used. The passes add to
        the sums `also`.

        Raises:
            UserError: for a non-finite score, with the key of the capture.
        """

        def capture(engine: Engine, stream: Stream | None) -> State:
            options = {"layers": layers, "per_head": per_head}
            maps = engine.by_fold(capture_scores, stream, also=also, **options)
            validate_finite(maps, f"pass {key}")
            sums = state_of(also)
            return packed_tensors(maps) | {f"also.{name}": sums[name] for name in sums}

        tensors = self.load_or_compute(key, capture, ablation)
        restore(also, under(tensors, "also."))
        captured = stored_layers(tensors)
        return captured if self.skip_keys is None else with_skip_keys(captured, self.skip_keys)

    def stages(self, key: str, ablation: Ablation = NOTHING, *, layer: int = 0) -> StageMaps:
        """Return the stage maps of one block; see `capture_stages`."""
        return self._captured(StageMaps, key, capture_stages, ablation, layer=layer)

    def positions(self, key: str, ablation: Ablation = NOTHING, **options: Any) -> PositionSums:
        """Return the writers' parts in queries and keys of layers; see `capture_positions`."""
        capture = partial(capture_positions, kept_positions=self.kept_positions)
        return self._captured(PositionSums, key, capture, ablation, **options)

    def _captured(
        self,
        kind: type[Captured],
        key: str,
        capture: Callable[..., Captured],
        ablation: Ablation,
        **options: Any,
    ) -> Captured:
        """Return the result of a capture of `hooks.reading`, from the checkpoint if it is there.

        The engine's first keys are measured separately, if it names any.
        """
        tensors = self.load_or_compute(
            key, lambda _, stream: self.by_fold(capture, stream, **options).to_tensors(), ablation
        )
        maps = kind.from_tensors(tensors)
        return maps if self.skip_keys is None else replace(maps, skip_keys=self.skip_keys)

    def by_fold(self, capture: Callable[..., Sums], stream: Stream | None, **options: Any) -> Sums:
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


Capture = Callable[[Engine, Stream | None], State]


def written(engine: Engine, stream: Stream | None, **options: Any) -> State:
    """Return the position that components write, as the tensors of `WrittenPositions`."""
    if engine.texts is not None:
        engine = replace(engine, inputs=engine.texts.inputs, documents=engine.texts.documents)
    options = {"kept_positions": engine.kept_positions, **options}
    return capture_written(
        engine.model,
        engine.inputs,
        fold_of=engine.fold_of,
        batch_size=engine.batch_size,
        checkpoint=stream,
        **options,
    ).to_tensors()


def position_key(ablation: Ablation, engine: Engine) -> str:
    """Return the key of the capture of the position that an ablation removes; empty without one.

    The position is measured once for all passes on texts of a length.
    """
    condition = ablation.condition
    by = f"_{ablation.replacement}" if condition.weights else ""
    seen = f"_{ablation.prefix}" if ablation.prefix else ""
    place = f"positions/{condition.name}{by}{seen}/{engine.inputs.shape[1]}"
    return place if condition.of_written else ""


def validate_finite(maps: ScoreMaps, where: str) -> None:
    """Check that every score at or below the diagonal, unless masked, is finite.

    Raises:
        UserError: naming the layer, and where it is.
    """
    below = torch.arange(maps.folds.shape[-1]) <= maps.query_positions[:, None]
    for place, layer in enumerate(maps.layers):
        for of, folds in (("", maps.folds), (" of a head", maps.per_head)):
            if folds is not None and not are_finite(folds[:, place], maps.visible[place] & below):
                raise UserError(f"non-finite scores{of} in L{layer}, {where}")


def are_finite(
    maps: Float[Tensor, "*batch row_pos col_pos"], cells: Bool[Tensor, "row_pos col_pos"]
) -> bool:
    """Return whether maps are finite in all of the given cells."""
    return bool(maps[..., cells].isfinite().all())


def validate_first_sequence(engine: Engine, key: str, layers: Sequence[int]) -> None:
    """Check on one sequence, before all are run, that some layers have a pattern to measure.

    Args:
        engine: of the run.
        key: of the first pass; once it is finished, nothing is checked.
        layers: the layers' numbers.

    Raises:
        UserError: for a score that is not finite.
    """
    if engine.checkpoint is None or key not in engine.checkpoint:
        first = engine.inputs[:1]
        maps = capture_scores(engine.model, first, layers=layers, batch_size=1, n_folds=1)
        validate_finite(maps, "the intact model")


def validate_removable(model: HookedModel, ablations: Iterable[Ablation]) -> None:
    """Check that a model has what is removed: bands, weights that are separate matrices, writers.

    Raises:
        UserError: naming a part that cannot be removed, and why.
    """
    for ablation in ablations:
        ablations_of(model, ablation)
        blocks_that_write(model, ablation.condition.writers)


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
