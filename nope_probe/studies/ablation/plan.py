"""What a run of `ablate` removes, and the score maps of every condition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nope_probe.analyses.attribution import conditions_of
from nope_probe.analyses.reader import MIN_FOLDS
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Inputs
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.maps.maps import Layers
from nope_probe.maps.positions import PositionSums
from nope_probe.models.info import LoadedModel
from nope_probe.removal import INTACT, MASK, SOURCES, UNION, Component, Condition
from nope_probe.studies.engine import Engine, idle_sources, irreplaceable, validate_removable
from nope_probe.studies.removing import parse_removed
from nope_probe.studies.study import CALIBRATION, Pass, Results, calibration

ConditionMaps = dict[Condition, Layers]
DEFAULT_WEIGHTS = ("w_q", "w_k", "w_q+w_k", "w_o")  # constant queries, keys, both, and output


@dataclass(frozen=True, kw_only=True)
class AblationPlan:
    """What is removed, and how.

    Attributes:
        sources: the mask, and the window and position encodings that the model has as well. They
            are removed in all combinations.
        removed: what else is removed, one at a time.
        ablations: for each replacement of removed weights, an ablation that removes nothing yet.
        layers: the numbers of the layers to map.
        left_out: components that by default are no sources or not removed here, and why.
        per_head: whether the maps of each head are kept where sources alone are removed.
    """

    sources: tuple[Component, ...]
    removed: tuple[Condition, ...] = ()
    ablations: tuple[Ablation, ...] = (Ablation(),)
    layers: tuple[int, ...] = (0,)
    left_out: Mapping[str, str] = field(default_factory=dict)
    per_head: bool = False

    @property
    def of_sources(self) -> list[Condition]:
        """The conditions that remove sources alone, the intact model first."""
        return conditions_of(self.sources)

    @property
    def of_heads(self) -> list[Condition]:
        """The conditions with maps of heads: those of sources, and of bands of RoPE."""
        return [condition for condition in self.plain if self.per_head and condition.are_sources]

    @property
    def plain(self) -> list[Condition]:
        """The conditions that replace no weight, the intact model first."""
        others = [condition for condition in self.removed if not condition.weights]
        return conditions_of(self.sources, others)

    @property
    def replacing(self) -> list[Condition]:
        """The conditions that replace a weight."""
        return [condition for condition in self.removed if condition.weights]

    @property
    def replacements(self) -> list[Replacement]:
        """The names of the replacements; none where no weight is removed."""
        named = [by.replacement for by in self.ablations if isinstance(by.replacement, str)]
        return named if self.replacing else []

    @property
    def calibrated(self) -> list[Ablation]:
        """The removals that may need a calibration, by each replacement."""
        return [by.without(condition) for by in self.ablations for condition in self.removed]

    def passes(
        self,
        engine: Engine,
        shuffled: Sequences | None = None,
        also: Sequence[Accumulator] = (),
    ) -> Iterator[Pass]:
        """Yield all passes, in the order in which they are run.

        Args:
            engine: the model on the run's sequences.
            shuffled: the same sequences with their tokens permuted, if they are a control.
            also: what the intact model's pass adds to as well.
        """
        of_sources = self.of_sources
        yield from self._scores("score", engine, of_sources, also=also)
        if self.sources and engine.n_folds >= MIN_FOLDS:
            yield Pass(key="positions", engine=engine, read=self._read_positions)
        yield from calibration(engine, self.calibrated)
        yield from self._scores("score", engine, [x for x in self.plain if x not in of_sources])
        for by in self.ablations:
            run = dict.fromkeys(equivalent(condition, by) for condition in self.replacing)
            yield from self._scores(f"score-{by.replacement}", engine, run, by)
        if shuffled is not None:
            yield from self._scores("shuffled", engine.with_sequences(shuffled), (INTACT, MASK))

    def _scores(
        self,
        prefix: str,
        engine: Engine,
        conditions: Iterable[Condition],
        by: Ablation | None = None,
        also: Sequence[Accumulator] = (),
    ) -> Iterator[Pass]:
        """Yield the passes that capture the score maps of some conditions."""
        for condition in conditions:
            without = (by or self.ablations[0]).without(condition)
            of_run = prefix != "shuffled"
            per_head = of_run and condition in self.of_heads
            mean_term = of_run and condition == INTACT and bool(self.sources)
            yield Pass(
                key=f"{prefix}/{condition.name}",
                engine=engine,
                read=partial(
                    self._read_scores,
                    per_head=per_head,
                    mean_term=mean_term,
                    also=() if condition else also,
                ),
                ablation=without if condition else None,
                kind=None if mean_term else "scores of heads" if per_head else "scores",
            )

    def _read_scores(
        self,
        engine: Engine,
        key: str,
        ablation: Ablation | None,
        per_head: bool,
        mean_term: bool,
        also: Sequence[Accumulator],
    ) -> Layers:
        """Return score maps; the intact model's with their mean term if scores are plain q.k."""
        scores = partial(
            engine.scores, key, ablation, layers=self.layers, per_head=per_head, also=also
        )
        # The mean term is a difference between sequences; a soft cap or bias leaves none.
        if mean_term and int(engine.fold_of.bincount().min()) >= 2:
            with suppress(NotImplementedError):
                return scores(mean_term=True)
        return scores()

    def _read_positions(
        self, engine: Engine, key: str, ablation: Ablation | None
    ) -> PositionSums | None:
        """Return the intact model's mean queries and keys, if its scores are q.k of rotations."""
        with suppress(NotImplementedError):
            return engine.positions(key, ablation, layers=self.layers, writers="none")
        return None


def equivalent(condition: Condition, by: Ablation) -> Condition:
    """Return the condition that is run for another: W_V does not matter behind a constant W_O.

    Example:
        >>> equivalent(Condition.parse("ov"), Ablation(replacement="mean")).name
        'w_o'
    """
    has_constant = "w_o" in condition and not by.stand_in.gain
    return Condition(condition - {"w_v"}) if has_constant else condition


def make_plan(
    has: Sequence[str],
    remove: Sequence[str] | None = None,
    *,
    ablations: Sequence[Ablation] = (Ablation(),),
    layers: Sequence[int] = (0,),
    bands: Sequence[str] = (),
    left_out: Mapping[str, str] | None = None,
    per_head: bool = False,
) -> AblationPlan:
    """Return the plan for a model.

    Args:
        has: the components that the model has.
        remove: what to remove besides the sources, one at a time: components, circuits, bands of
            RoPE, positions of writers and unions of these; None for W_Q, W_K, both, and W_O;
            `["sources"]` for the sources alone; `[]` for the intact model alone.
        ablations: for each replacement of removed weights, an ablation that removes nothing yet.
        layers: the numbers of the layers to map.
        bands: bands of RoPE that are removed in turn as well.
        left_out: components that are no source, and removed only where they are named, and why.
        per_head: whether to keep the maps of heads too.

    Raises:
        UserError: for a name that does not exist.
    """
    is_intact = remove is not None and not remove
    if "mask" not in has and not is_intact:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    left_out = {name: why for name, why in (left_out or {}).items() if name in has}
    sources = tuple(name for name in SOURCES if name in has and name not in left_out)
    sources = () if is_intact else sources
    if remove is None:
        there = {*has} - {*left_out}
        names = [name for name in DEFAULT_WEIGHTS if {*name.split(UNION)} <= there]
    else:
        names = [name for name in remove if name != "sources"]
    if remove is not None:  # where weights are named
        left_out = {name: why for name, why in left_out.items() if name in SOURCES}
    removed = [*map(parse_removed, (*names, *bands))]
    return AblationPlan(
        sources=sources,
        removed=tuple(c for c in dict.fromkeys(removed) if not c <= {*sources}),
        ablations=tuple(ablations),
        layers=tuple(layers),
        left_out=left_out,
        per_head=per_head,
    )


def plan_of(
    loaded: LoadedModel,
    inputs: Inputs,
    remove: Sequence[str] | None,
    *,
    layers: Sequence[int],
    **options: Any,
) -> AblationPlan:
    """Return the plan for a loaded model.

    Args:
        loaded: the model.
        inputs: the sequences, on which a source may do nothing.
        remove: as of `make_plan`.
        layers: as of `make_plan`.
        options: further arguments of `make_plan`.

    Raises:
        UserError: as `make_plan` does, and for what the model does not have.
    """
    model = loaded.model
    plan = make_plan(
        components(model),
        remove,
        layers=layers,
        left_out=irreplaceable(model) | idle_sources(model, inputs, len(layers)),
        **options,
    )
    validate_removable(model, plan.calibrated)
    return plan


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The score maps of every condition.

    Attributes:
        maps: of the conditions that replace no weight; the intact model's with their mean term,
            where scores are q.k.
        replaced: by replacement, of the conditions that replace a weight.
        gains: gains and means of the replacements, where weights are removed and need them.
        shuffled: of the intact model and the model without mask on shuffled tokens, if wanted.
        positions: the intact model's mean queries and keys, where its scores split into terms.
    """

    maps: ConditionMaps
    replaced: dict[str, ConditionMaps] = field(default_factory=dict)
    gains: Calibration | None = None
    shuffled: ConditionMaps = field(default_factory=dict)
    positions: PositionSums | None = None

    @classmethod
    def of(cls, plan: AblationPlan, results: Results) -> Measured:
        """Return the maps of a plan's passes from their results by key."""

        def maps(prefix: str, conditions: Iterable[Condition]) -> ConditionMaps:
            keys = {condition: f"{prefix}/{condition.name}" for condition in conditions}
            return {condition: results[key] for condition, key in keys.items() if key in results}

        replaced: dict[str, ConditionMaps] = {}
        for by in plan.ablations if plan.replacing else ():
            of = {condition: equivalent(condition, by) for condition in plan.replacing}
            run = maps(f"score-{by.replacement}", {*of.values()})
            replaced[str(by.replacement)] = {c: run[other] for c, other in of.items()}
        intact = results[f"score/{INTACT.name}"]
        has_mean_term = all(layer.mean_term is not None for layer in intact.values())
        return cls(
            maps=maps("score", plan.plain),
            replaced=replaced,
            gains=results.get(CALIBRATION),
            shuffled=maps("shuffled", (INTACT, MASK)),
            positions=results.get("positions") if has_mean_term else None,
        )

    @property
    def intact(self) -> Layers:
        """The intact model's maps of each layer."""
        return self.maps[INTACT]
