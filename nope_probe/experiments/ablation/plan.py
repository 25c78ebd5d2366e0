"""The conditions of an attribution, and the score maps of each condition."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, combinations

from nope_probe.analyses.attribution import losses_need
from nope_probe.analyses.reader import MIN_FOLDS
from nope_probe.analyses.shapley import PlayerSet, player_set
from nope_probe.components import CIRCUITS, ROPE_HALVES, SOURCES, WEIGHTS, Component, is_rope
from nope_probe.conditions import INTACT, MASK, Condition, Writer, kept_name, validate_components
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.experiments.ablation.settings import Settings
from nope_probe.experiments.engine import Engine, position_keys
from nope_probe.hooks.removing.removals import Ablation, Substitute
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.hooks.removing.stand_ins import WITH_GAIN, Replacement
from nope_probe.maps.folds import folds_of
from nope_probe.maps.maps import Layers
from nope_probe.maps.positions import PositionSums

ConditionMaps = dict[Condition, Layers]
PLAIN = Settings(replacement=("identity",))  # without a second replacement as a check


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The conditions to run, and how.

    Attributes:
        player_sets: the players; empty if only the sources are wanted.
        sources: the mask, and the window and position encodings that the model has beside it.
        conditions: the components removed in each condition, the intact model first.
        layers: the numbers of the layers to map.
        settings: the settings of the command, such as the replacements.
        left_out: components that by default are no sources or players here, and why.
    """

    player_sets: tuple[PlayerSet, ...]
    sources: tuple[Component, ...]
    conditions: tuple[Condition, ...]
    layers: tuple[int, ...] = (0,)
    settings: Settings = PLAIN
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def substitutes(self) -> tuple[Substitute, ...]:
        """The replacements of removed weights, in turn."""
        return self.settings.substitutes

    @property
    def checks(self) -> tuple[Substitute, ...]:
        """The replacements that only measure what is lost without each weight, in turn."""
        return self.settings.checks if self.removes_weights else ()

    @property
    def removes_weights(self) -> bool:
        """Whether some condition replaces a weight."""
        return bool(self.removable & {*WEIGHTS})

    @property
    def switches(self) -> PlayerSet:
        """The player set that an explorer switches: the first, or the sources."""
        if self.player_sets:
            return self.player_sets[0]
        return player_set(self.sources)

    @property
    def removable(self) -> Condition:
        """All components that some condition removes."""
        return Condition(chain.from_iterable(self.conditions))

    @property
    def ablations(self) -> list[Ablation]:
        """The removal of all that some condition removes and calibrates, by each substitute."""
        calibrated = {name for name in self.removable if name in WEIGHTS or Writer.removed_by(name)}
        return [substitute.without(calibrated) for substitute in (*self.substitutes, *self.checks)]

    @property
    def of_sources(self) -> list[Condition]:
        """The conditions that remove sources alone, the intact model first: they are run first."""
        return [condition for condition in self.conditions if condition <= {*self.sources}]

    @property
    def others(self) -> list[Condition]:
        """The conditions that remove something else than sources."""
        return [condition for condition in self.conditions if condition not in self.of_sources]

    @property
    def replacing(self) -> list[Condition]:
        """The conditions that replace a weight."""
        return [condition for condition in self.conditions if condition & {*WEIGHTS}]

    def checked(self, by: Substitute) -> dict[Condition, Condition]:
        """Return the conditions that tell what is lost, with the condition run for each.

        W_V does not matter where a constant takes the place of W_O.
        """
        needed = losses_need(self.player_sets)
        dropped = set() if by.replacement in WITH_GAIN else {"w_v"}
        return {
            condition: Condition(condition - dropped) if "w_o" in condition else condition
            for condition in self.replacing
            if condition in needed
        }

    def name(self, condition: Condition) -> str:
        """Return a condition's name: the removable components that it keeps.

        RoPE is named as a whole unless a part of it is removed. Then `rope_rest` are the pairs
        that no condition removes by themselves.
        """
        bands = {name for name in self.removable if name != "rope" and is_rope(name)}
        kept = self.removable - condition
        if not condition & bands:
            return kept_name(kept - bands)
        is_whole = any(players.bands <= bands for players in self.player_sets)
        return kept_name(kept - {"rope"} | (set() if is_whole else {"rope_rest"}))

    def pass_of(
        self, prefix: str, condition: Condition, substitute: Substitute | None = None
    ) -> tuple[str, Ablation | None]:
        """Return the checkpoint's key of a condition's pass, and what it ablates."""
        without = (substitute or self.substitutes[0]).without
        return f"{prefix}/{self.name(condition)}", without(condition) if condition else None

    def keys(self, has_shuffled: bool) -> list[str]:
        """Return the checkpoint's keys of all passes, in the order in which they are run."""
        gains = ["gains"] * any(ablation.needs_calibration for ablation in self.ablations)
        keys = [
            *self.keys_of("score", self.of_sources),
            *gains,
            *self.keys_of("score", self.others),
        ]
        for substitute in self.substitutes[1:]:
            keys += self.keys_of(f"score-{substitute.replacement}", self.replacing)
        for substitute in self.checks:
            run = dict.fromkeys(self.checked(substitute).values())
            keys += self.keys_of(f"score-{substitute.replacement}", [*run])
        if has_shuffled:
            keys += self.keys_of("shuffled", (INTACT, MASK))
        return keys

    def keys_of(self, prefix: str, conditions: Sequence[Condition]) -> list[str]:
        """Return the checkpoint's keys of the passes of some conditions."""
        return [
            name
            for condition in conditions
            for key, ablation in [self.pass_of(prefix, condition)]
            for name in (*position_keys(key, ablation or Ablation()).values(), key)
        ]


def make_plan(
    has: Sequence[Component],
    players: Sequence[str] | None,
    parameter_free: bool = False,
    bands: Sequence[str] = ROPE_HALVES,
    left_out: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan for a model.

    Args:
        has: the components that the model has.
        players: their names; None for the default player sets; `["sources"]` for the sources alone.
        parameter_free: whether the weights are identities already, which no player may be.
        bands: bands that together are all of RoPE, if they are players.
        left_out: components that are no source, and players only where they are named, and why.

    Raises:
        UserError: for a player that does not exist, that the model lacks, or that shares a
            component with another, or too many players.
    """
    if "mask" not in has:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    left_out = {name: why for name, why in (left_out or {}).items() if name in has}
    sources = tuple(name for name in SOURCES if name in has and name not in left_out)
    if players is None:
        player_sets = _default_player_sets({*has} - {*left_out}, sources, parameter_free)
    elif list(players) == ["sources"]:
        player_sets = ()
    else:
        player_sets = (_checked_players(players, has, parameter_free, bands),)
    if players is not None or parameter_free:  # where weights are no players, or named
        left_out = {name: why for name, why in left_out.items() if name in SOURCES}
    sizes = range(len(sources) + 1)
    removed = chain.from_iterable(combinations(sources, size) for size in sizes)
    conditions = [*map(Condition, removed)]
    for players_of_set in player_sets:
        conditions += players_of_set.conditions
    return Plan(
        player_sets=player_sets,
        sources=sources,
        conditions=tuple(dict.fromkeys(conditions)),
        left_out=left_out,
    )


def _default_player_sets(
    has: Collection[Component], sources: Sequence[Component], parameter_free: bool
) -> tuple[PlayerSet, ...]:
    """Return the players as components, and as circuits; the window stays with the content."""
    sources = [name for name in sources if name != "window"]
    singles = [name for name in ("w_q", "w_k", "w_o") if name in has]
    circuits = [name for name, parts in CIRCUITS.items() if {*parts} <= {*has}]
    sets = {"players": singles} | ({"circuits": circuits} if circuits else {})
    if parameter_free:
        sets = {"players": []}
    return tuple(player_set([*sources, *names], name=name) for name, names in sets.items())


def _checked_players(
    players: Sequence[str], has: Sequence[Component], parameter_free: bool, bands: Sequence[str]
) -> PlayerSet:
    try:
        chosen = player_set(players, bands=bands)
    except ValueError as error:
        raise UserError(str(error)) from error
    wanted = Condition().union(*(player.components for player in chosen.players))
    validate_components(wanted, has)
    if parameter_free and wanted & set(WEIGHTS):
        raise UserError("the weights of a parameter-free model are identities already: no players")
    return chosen


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The score maps of every condition.

    Attributes:
        maps: per condition, weights being replaced by the first replacement; the intact model's
            with their mean term, where scores are q.k.
        gains: gains and means of the replacements, where weights are removed and need them.
        others: per further replacement, the conditions that replace weights.
        checks: by replacement of the plan's `checks`, conditions that tell what is lost.
        shuffled: of the intact model and the one without mask on shuffled tokens, if wanted.
        positions: the intact model's mean queries and keys, where its scores split into terms.
    """

    maps: ConditionMaps
    gains: Calibration | None = None
    others: dict[Replacement, ConditionMaps] = field(default_factory=dict)
    checks: dict[Replacement, ConditionMaps] = field(default_factory=dict)
    shuffled: ConditionMaps = field(default_factory=dict)
    positions: PositionSums | None = None

    @property
    def intact(self) -> Layers:
        """The intact model's maps of each layer."""
        return self.maps[INTACT]


def measure_conditions(
    engine: Engine,
    plan: Plan,
    shuffled: Sequences | None = None,
) -> Measured:
    """Return the score maps of all conditions.

    Args:
        engine: the model on the sequences.
        plan: the conditions.
        shuffled: the same sequences with their tokens permuted, if they are a control.

    Raises:
        UserError: for a non-finite score.
    """
    maps = {INTACT: _intact_maps(engine, plan)}
    maps |= maps_of(engine, plan, "score", plan.of_sources[1:])
    positions = _positions(engine, maps[INTACT])
    engine = engine.calibrated("gains", plan.ablations)
    maps |= maps_of(engine, plan, "score", plan.others)

    def replaced(by: Substitute, conditions: Sequence[Condition]) -> ConditionMaps:
        return maps_of(engine, plan, f"score-{by.replacement}", conditions, by)

    others = {by.replacement: replaced(by, plan.replacing) for by in plan.substitutes[1:]}
    checks = {}
    for by in plan.checks:
        checked = plan.checked(by)
        run = replaced(by, list(dict.fromkeys(checked.values())))
        checks[by.replacement] = {condition: run[same] for condition, same in checked.items()}
    controls: ConditionMaps = {}
    if shuffled is not None:
        controls = maps_of(engine.on(shuffled), plan, "shuffled", (INTACT, MASK))
    return Measured(
        maps=maps,
        gains=engine.calibration,
        others=others,
        checks=checks,
        shuffled=controls,
        positions=positions,
    )


def _positions(engine: Engine, intact: Layers) -> PositionSums | None:
    """Return the intact model's mean queries and keys, if its scores are q.k of known rotations."""
    if engine.n_folds < MIN_FOLDS or any(maps.mean_term is None for maps in intact.values()):
        return None
    with suppress(NotImplementedError):
        return engine.positions("positions", layers=[*intact], writers="none")
    return None


def _intact_maps(engine: Engine, plan: Plan) -> Layers:
    """Return the intact model's maps, with their mean term if scores are plain q.k."""
    (key, _), name = plan.pass_of("score", INTACT), "the intact model"
    fold_of = folds_of(len(engine.inputs), engine.n_folds, engine.documents)
    mean_term = int(fold_of.bincount().min()) >= 2  # it is a difference between sequences
    try:
        return engine.stored_scores(key, name=name, layers=plan.layers, mean_term=mean_term)
    except NotImplementedError:  # with a soft cap or bias after q.k there is no mean term
        return engine.stored_scores(key, name=name, layers=plan.layers)


def maps_of(
    engine: Engine,
    plan: Plan,
    prefix: str,
    conditions: Sequence[Condition],
    substitute: Substitute | None = None,
) -> ConditionMaps:
    """Return the score maps of some conditions, whose keys in the checkpoint have a prefix."""
    maps: ConditionMaps = {}
    for condition in conditions:
        key, ablation = plan.pass_of(prefix, condition, substitute)
        name = f"condition {key}"
        maps[condition] = engine.stored_scores(key, ablation, name=name, layers=plan.layers)
    return maps
