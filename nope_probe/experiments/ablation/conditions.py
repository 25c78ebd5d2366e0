"""Runs of a model in every condition of a plan, and the score maps of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nope_probe.analyses.shapley import INTACT, MASK, Condition
from nope_probe.components import Replacement, Substitute, removal_order
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.ablation.plan import Plan
from nope_probe.experiments.engine import calibration_once
from nope_probe.experiments.finite import validate_finite, validate_first_sequence
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.hooks.reading.residual_cache import GIGABYTE, ResidualCache
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.edited_weights import reparametrised
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.folds import State, folds_of
from nope_probe.maps.stored_maps import StoredMaps, concatenate_layers, packed_tensors
from nope_probe.runtime.checkpoint import RunCheckpoint

Scope = Literal["both", "upstream", "own"]
ConditionMaps = dict[Condition, StoredMaps]


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How conditions are run, the same for all of them.

    Attributes:
        n_layers: how many first layers to map.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from.
        substitutes: what stands for removed weights; each in turn.
        scope: whether to remove, for a layer's scores, in the layers before it (`upstream`), in
            itself (`own`), or in both.
        n_reparametrisations: in how many random reparametrisations to run the first player set.
        seed: the seed of these.
        max_residual_bytes: how much of the residual streams to keep that several passes share;
            with the scope `both`, no two conditions share any.
    """

    n_layers: int
    batch_size: int = 32
    n_folds: int = 8
    substitutes: tuple[Substitute, ...] = (Substitute(),)
    scope: Scope = "both"
    n_reparametrisations: int = 0
    seed: int = 0
    max_residual_bytes: int = GIGABYTE


@dataclass(frozen=True, kw_only=True)
class LayerPasses:
    """Passes of one batch through one block, up to its scores or whole, in this process.

    Attributes:
        run: those that were run; finished conditions of an interrupted run are not among them.
        needed: as many if each layer's scores were captured from the embeddings on.
    """

    run: int = 0
    needed: int = 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The score maps of every condition.

    Attributes:
        maps: per condition, weights being replaced by the first replacement; the intact model's
            with their mean term, where scores are q.k.
        gains: gains and means of the replacements, where weights are removed and need them.
        replacement: the first replacement.
        others: per further replacement, the conditions that replace weights.
        shuffled: of the intact model and the one without mask on shuffled tokens, if wanted.
        reparametrised: of the first player set's conditions, per reparametrisation.
        layer_passes: how many passes through blocks it took.
    """

    maps: ConditionMaps
    gains: Calibration | None
    replacement: Replacement = "identity"
    others: dict[Replacement, ConditionMaps] = field(default_factory=dict)
    shuffled: ConditionMaps = field(default_factory=dict)
    reparametrised: tuple[ConditionMaps, ...] = ()
    layer_passes: LayerPasses = LayerPasses()

    @property
    def intact(self) -> StoredMaps:
        """The intact model's maps."""
        return self.maps[INTACT]


class ConditionRunner:
    """Runs a model in the conditions of a plan that the checkpoint does not have yet.

    Args:
        model: a HookedTransformer or TransformerBridge.
        plan: the conditions.
        options: how they are run.
        checkpoint: the maps that are finished; new ones are saved there.
    """

    def __init__(
        self, model: HookedModel, plan: Plan, options: CaptureOptions, checkpoint: RunCheckpoint
    ) -> None:
        self.model, self.plan, self.options, self.checkpoint = model, plan, options, checkpoint
        shares = options.scope != "both"
        self.residuals = ResidualCache(options.max_residual_bytes if shares else 0)
        self.needs_gains = (
            any(each.without(["w_q"]).needs_calibration for each in options.substitutes)
            and plan.removes_weights
        )

    def keys(self, has_shuffled: bool) -> list[str]:
        """Return the checkpoint keys of all streams, in the order in which they are run."""
        plan, options = self.plan, self.options
        found = ["gains"] * self.needs_gains + [f"score/{plan.name(INTACT)}"]
        for condition in plan.conditions[1:]:
            found += self._condition_keys("score", condition)
        for other in options.substitutes[1:]:
            for condition in plan.replacing:
                found += self._condition_keys(f"score-{other.replacement}", condition)
        for condition in (INTACT, MASK) if has_shuffled else ():
            found += self._condition_keys("shuffled", condition)
        for index in range(options.n_reparametrisations):
            found += [f"reparametrised-{index}/gains"] * self.needs_gains
            for condition in plan.player_sets[0].conditions:
                found += self._condition_keys(f"reparametrised-{index}", condition)
        return found

    def validate(self, inputs: Sequences) -> None:
        """Check on one sequence, before all are run, that every layer's pattern can be measured.

        Raises:
            UserError: for a score that is not finite, or a sliding window.
        """
        if f"score/{self.plan.name(INTACT)}" not in self.checkpoint:
            validate_first_sequence(self.model, inputs.inputs, self.options.n_layers)

    def run(self, inputs: Sequences, shuffled: Sequences | None = None) -> Measured:
        """Return the score maps of all conditions.

        Raises:
            UserError: for a non-finite score.
        """
        gains = self.gains("gains", inputs.inputs)
        maps = {INTACT: self.intact(inputs)}
        for condition in self.plan.conditions[1:]:
            maps[condition] = self.condition("score", inputs, condition, gains)
        others = {
            other.replacement: {
                condition: self.condition(
                    f"score-{other.replacement}", inputs, condition, gains, other
                )
                for condition in self.plan.replacing
            }
            for other in self.options.substitutes[1:]
        }
        controls: ConditionMaps = {}
        if shuffled is not None:
            self.residuals.clear()
            for condition in (INTACT, MASK):
                controls[condition] = self.condition("shuffled", shuffled, condition, gains)
        reparametrised = tuple(self.reparametrisations(inputs))
        return Measured(
            maps=maps,
            gains=gains,
            replacement=self.options.substitutes[0].replacement,
            others=others,
            shuffled=controls,
            reparametrised=reparametrised,
            layer_passes=LayerPasses(run=self.residuals.n_run, needed=self.residuals.n_needed),
        )

    def gains(self, key: str, inputs: Tensor) -> Calibration | None:
        """Return the gains of the replacements; None if they need no calibration."""
        if not self.needs_gains:
            return None
        seeds = [each.calibration_seed for each in self.options.substitutes]
        return calibration_once(
            self.checkpoint,
            key,
            self.model,
            inputs,
            batch_size=self.options.batch_size,
            seed=next((seed for seed in seeds if seed is not None), None),
        )

    def intact(self, inputs: Sequences) -> StoredMaps:
        """Return the intact model's maps, with their mean term if scores are plain q.k."""
        key, layers = f"score/{self.plan.name(INTACT)}", range(self.options.n_layers)
        fold_of = folds_of(len(inputs), self.options.n_folds, inputs.documents)
        mean_term = int(fold_of.bincount().min()) >= 2  # it is a difference between sequences
        try:
            return self._capture(key, inputs, layers, "the intact model", mean_term=mean_term)
        except NotImplementedError:  # with a soft cap or bias after q.k there is no mean term
            return self._capture(key, inputs, layers, "the intact model")

    def condition(
        self,
        prefix: str,
        inputs: Sequences,
        condition: Condition,
        gains: Calibration | None,
        substitute: Substitute | None = None,
    ) -> StoredMaps:
        """Return one condition's score maps; what is removed where depends on the scope.

        Args:
            prefix: of the checkpoint's keys.
            inputs: the sequences.
            condition: what is removed.
            gains: gains and means of the replacements.
            substitute: of removed weights; the first of the run by default.
        """
        options, name = self.options, f"condition {prefix}/{self.plan.name(condition)}"
        if options.scope == "upstream":
            self.residuals.clear()  # the blocks before a layer are those of this condition alone
        removed, rows = sorted(condition, key=removal_order), []
        for key, where, layers in self._parts(prefix, condition):
            ablation = (substitute or options.substitutes[0]).without(removed, where)
            with ablated(self.model, ablation, gains):
                rows.append(self._capture(key, inputs, layers, name))
        return concatenate_layers(rows)

    def reparametrisations(self, inputs: Sequences) -> Iterator[ConditionMaps]:
        """Yield the maps of the first player set's conditions in random reparametrisations."""
        for index in range(self.options.n_reparametrisations):
            generator = torch.Generator().manual_seed(self.options.seed + index)
            prefix = f"reparametrised-{index}"
            self.residuals.clear()
            with reparametrised(self.model, generator):
                gains = self.gains(f"{prefix}/gains", inputs.inputs)
                yield {
                    condition: self.condition(prefix, inputs, condition, gains)
                    for condition in self.plan.player_sets[0].conditions
                }

    def _parts(
        self, prefix: str, condition: Condition
    ) -> Iterator[tuple[str, tuple[int, ...] | None, Sequence[int]]]:
        """Yield per stream of a condition its key, the layers to ablate and the layers to map."""
        key, options = f"{prefix}/{self.plan.name(condition)}", self.options
        if options.scope == "both" or not condition:
            yield key, None, range(options.n_layers)
            return
        for layer in range(options.n_layers):
            yield (
                f"{key}/L{layer}",
                (layer,) if options.scope == "own" else tuple(range(layer)),
                [layer],
            )

    def _condition_keys(self, prefix: str, condition: Condition) -> list[str]:
        return [key for key, _, _ in self._parts(prefix, condition)]

    def _capture(
        self,
        key: str,
        inputs: Sequences,
        layers: Sequence[int],
        condition: str,
        mean_term: bool = False,
    ) -> StoredMaps:
        def capture(stream: StreamCheckpoint) -> State:
            maps = capture_scores(
                self.model,
                inputs.inputs,
                layers=layers,
                batch_size=self.options.batch_size,
                n_folds=self.options.n_folds,
                documents=inputs.documents,
                mean_term=mean_term,
                residuals=self.residuals,
                checkpoint=stream,
            )
            validate_finite(maps, condition)
            return packed_tensors(maps)

        self.checkpoint.finish(key, capture)
        return StoredMaps.from_stored(self.checkpoint.open(key))
