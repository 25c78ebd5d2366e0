"""Run a model in every condition that an attribution needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.game import INTACT, MASK, Condition, Game, game, kept_name
from nope_probe.data import Windows
from nope_probe.errors import UserError
from nope_probe.hooks.ablation import COMPONENTS, WEIGHTS, Ablation, Component, ablated
from nope_probe.hooks.capture import ScoreMaps, capture_scores
from nope_probe.hooks.gain import Gain, Gains, calibrate
from nope_probe.hooks.gauge import regauged
from nope_probe.journal import Journal

Scope = Literal["both", "upstream", "own"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which conditions to run.

    Attributes:
        games: the players; empty if only the sources are wanted.
        position: the position encoding that is a source beside the mask, if the model has one.
        conditions: what is removed in each condition, the intact model first.
    """

    games: tuple[Game, ...]
    position: Component | None
    conditions: tuple[Condition, ...]

    @property
    def playing(self) -> Condition:
        """All components that some condition removes."""
        return frozenset().union(*self.conditions)

    def name(self, condition: Condition) -> str:
        """Name a condition by what it keeps."""
        return kept_name(condition, self.playing)


@dataclass(frozen=True, kw_only=True)
class How:
    """How conditions are run, the same for all of them."""

    n_layers: int
    batch_size: int = 32
    n_folds: int = 8
    gain: Gain = "output"
    scope: Scope = "both"
    on_batch: Callable[[int], object] | None = None
    journal: Journal = field(default_factory=Journal)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The score maps of every condition.

    Attributes:
        maps: per condition; the intact model's with their mean route, where scores are q.k.
        shuffled: the intact model and the one without mask on shuffled tokens, where asked for.
    """

    maps: dict[Condition, ScoreMaps]
    gains: Gains | None
    shuffled: dict[Condition, ScoreMaps] = field(default_factory=dict)

    @property
    def intact(self) -> ScoreMaps:
        """The intact model's maps."""
        return self.maps[INTACT]


def make_plan(
    has: Sequence[Component], players: Sequence[str] | None, parameter_free: bool = False
) -> Plan:
    """Choose games and conditions for a model.

    Args:
        has: the components that the model has.
        players: their names; None for the default games; `["sources"]` for the sources alone.
        parameter_free: whether the weights are identities already, which no player may be.

    Raises:
        UserError: for a player that does not exist, that the model lacks, or that shares a
            component with another.
    """
    if "mask" not in has:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    position: Component | None = next((p for p in ("rope", "pos_embed") if p in has), None)
    games = _default_games(has, position, parameter_free) if players is None else ()
    if players is not None and list(players) != ["sources"]:
        games = (_checked_game(players, has, parameter_free),)
    conditions = [INTACT, *_source_conditions(position)]
    for each in games:
        conditions += each.conditions
    return Plan(games=games, position=position, conditions=tuple(dict.fromkeys(conditions)))


def _default_games(
    has: Sequence[Component], position: Component | None, parameter_free: bool
) -> tuple[Game, ...]:
    sources = ["mask"] + ([position] if position else [])
    if parameter_free:
        return (game(sources),)
    singles = [name for name in ("w_q", "w_k", "w_o") if name in has]
    return game([*sources, *singles]), game([*sources, "qk", "ov"], name="circuits")


def _checked_game(players: Sequence[str], has: Sequence[Component], parameter_free: bool) -> Game:
    try:
        ours = game(players)
    except ValueError as error:
        raise UserError(str(error)) from error
    wanted = frozenset().union(*(player.components for player in ours.players))
    lacking = [name for name in COMPONENTS if name in wanted and name not in has]
    if lacking:
        raise UserError(f"the model has no {lacking[0]} to play with; it has {', '.join(has)}")
    if parameter_free and wanted & set(WEIGHTS):
        raise UserError("the weights of a parameter-free model are identities already: no players")
    return ours


def _source_conditions(position: Component | None) -> Iterator[Condition]:
    yield MASK
    if position is not None:
        yield frozenset({position})
        yield MASK | {position}


def run_conditions(
    model: Any, inputs: Windows, plan: Plan, how: How, shuffled: Windows | None = None
) -> Measured:
    """Measure the score maps of every condition of a plan.

    Raises:
        UserError: for a non-finite score where a number should be (names layer and condition).
    """
    gains = None
    if how.gain == "output" and plan.playing & set(WEIGHTS):
        gains = _calibrate("gains", model, inputs.inputs, how)
    maps = {INTACT: _intact(f"score/{plan.name(INTACT)}", model, inputs.inputs, how)}
    for condition in plan.conditions[1:]:
        key = f"score/{plan.name(condition)}"
        maps[condition] = run_condition(key, model, inputs.inputs, condition, how, gains)
        _refuse_non_finite(maps[condition].folds, plan.name(condition))
    controls = (
        {}
        if shuffled is None
        else {
            condition: run_condition(
                f"shuffled/{plan.name(condition)}", model, shuffled.inputs, condition, how, gains
            )
            for condition in (INTACT, MASK)
        }
    )
    return Measured(maps=maps, gains=gains, shuffled=controls)


def _calibrate(key: str, model: Any, inputs: Tensor, how: How) -> Gains:
    return how.journal.gains(
        key,
        lambda keeper: calibrate(
            model, inputs, batch_size=how.batch_size, on_batch=how.on_batch, keeper=keeper
        ),
    )


def _intact(key: str, model: Any, inputs: Tensor, how: How) -> ScoreMaps:
    keep_routes = len(inputs) >= 2 * how.n_folds
    try:
        maps = _capture(key, model, inputs, how, range(how.n_layers), routes=keep_routes)
    except NotImplementedError:  # a soft cap or bias between q.k and the score: no routes
        maps = _capture(key, model, inputs, how, range(how.n_layers))
    _refuse_non_finite(maps.folds, "the intact model")
    return maps


def run_condition(
    key: str, model: Any, inputs: Tensor, condition: Condition, how: How, gains: Gains | None
) -> ScoreMaps:
    """Measure one condition's score maps, in the scope asked for, or take those kept as `key`."""
    remove = sorted(condition, key=COMPONENTS.index)
    if how.scope == "both":
        with ablated(model, Ablation(remove=remove, gain=how.gain), gains):
            return _capture(key, model, inputs, how, range(how.n_layers))
    rows = []
    for layer in range(how.n_layers):
        where = (layer,) if how.scope == "own" else tuple(range(layer))
        with ablated(model, Ablation(remove=remove, layers=where, gain=how.gain), gains):
            rows.append(_capture(f"{key}/layer-{layer + 1}", model, inputs, how, [layer]))
    return ScoreMaps(folds=torch.cat([row.folds for row in rows], 1), counts=rows[0].counts)


def _capture(
    key: str,
    model: Any,
    inputs: Tensor,
    how: How,
    layers: Sequence[int],
    routes: bool = False,
) -> ScoreMaps:
    return how.journal.maps(
        key,
        lambda keeper: capture_scores(
            model,
            inputs,
            layers=layers,
            batch_size=how.batch_size,
            n_folds=how.n_folds,
            routes=routes,
            on_batch=how.on_batch,
            keeper=keeper,
        ),
    )


def _refuse_non_finite(
    folds: Float[Tensor, "fold layer query_pos key_pos"], condition: str
) -> None:
    n = folds.shape[-1]
    below = folds[..., torch.ones(n, n, dtype=torch.bool).tril()]
    for layer in range(folds.shape[1]):
        cells = below[:, layer]
        if cells.isfinite().all():
            continue
        # Masked cells are NaN in every fold and never among the first; overflow is anywhere.
        if cells[:, :3].isfinite().all() and cells.isnan().any(0).equal(cells.isnan().all(0)):
            raise UserError(
                f"layer {layer + 1} does not see all {n} earlier keys (a sliding window): "
                "choose a shorter --seq-len or fewer --layers"
            )
        raise UserError(f"non-finite scores in layer {layer + 1}, condition {condition}")


def run_gauges(
    model: Any, inputs: Windows, plan: Plan, how: How, n_gauges: int, seed: int = 0
) -> Iterator[dict[Condition, ScoreMaps]]:
    """Measure the first game's conditions again in random gauges of the weights."""
    for index in range(n_gauges):
        with regauged(model, torch.Generator().manual_seed(seed + index)):
            gains = None
            if how.gain == "output":
                gains = _calibrate(f"gauge-{index}/gains", model, inputs.inputs, how)
            yield {
                condition: run_condition(
                    f"gauge-{index}/{plan.name(condition)}",
                    model,
                    inputs.inputs,
                    condition,
                    how,
                    gains,
                )
                for condition in plan.games[0].conditions
            }


def passes(plan: Plan, how: How, shuffled: bool, n_gauges: int) -> int:
    """Count the passes over the tokens, for a progress bar."""
    calibrations = int(how.gain == "output" and bool(plan.playing & set(WEIGHTS)))
    per_condition = 1 if how.scope == "both" else how.n_layers
    first_game = len(plan.games[0].conditions) if plan.games else 0
    return (
        calibrations
        + 1
        + per_condition * (len(plan.conditions) - 1 + 2 * shuffled)
        + n_gauges * (calibrations + per_condition * first_game)
    )
