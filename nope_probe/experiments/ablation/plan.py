"""The conditions of an attribution, and its player sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nope_probe.analyses.shapley import INTACT, MASK, Condition, PlayerSet, player_set
from nope_probe.components import (
    POSITION_ENCODINGS,
    ROPE_HALVES,
    WEIGHTS,
    Component,
    is_rope,
    kept_name,
)
from nope_probe.errors import UserError
from nope_probe.experiments.components import validate_components


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The conditions to run.

    Attributes:
        player_sets: the players; empty if only the sources are wanted.
        position: the position encoding that is a source beside the mask, if the model has one.
        conditions: the components removed in each condition, the intact model first.
    """

    player_sets: tuple[PlayerSet, ...]
    position: Component | None
    conditions: tuple[Condition, ...]

    @property
    def switches(self) -> PlayerSet:
        """The first player set, or of the sources alone: what an explorer switches."""
        if self.player_sets:
            return self.player_sets[0]
        return player_set(["mask"] + ([self.position] if self.position else []))

    @property
    def removable(self) -> Condition:
        """All components that some condition removes."""
        return frozenset().union(*self.conditions)

    @property
    def removes_weights(self) -> bool:
        """Whether some condition replaces a weight."""
        return bool(self.removable & set(WEIGHTS))

    @property
    def replacing(self) -> list[Condition]:
        """The conditions that replace a weight."""
        return [each for each in self.conditions if each & set(WEIGHTS)]

    def name(self, condition: Condition) -> str:
        """Return a condition's name: what it keeps of the removable components.

        RoPE is named as a whole, but where a part of it is removed. Then `rope_rest` are the pairs
        that no condition removes by themselves.
        """
        bands = {name for name in self.removable if name != "rope" and is_rope(name)}
        kept = self.removable - condition
        if not condition & bands:
            return kept_name(kept - bands)
        is_whole = any(each.bands <= bands for each in self.player_sets)
        return kept_name(kept - {"rope"} | (set() if is_whole else {"rope_rest"}))


def make_plan(
    has: Sequence[Component],
    players: Sequence[str] | None,
    parameter_free: bool = False,
    bands: Sequence[str] = ROPE_HALVES,
) -> Plan:
    """Return the plan for a model.

    Args:
        has: the components that the model has.
        players: their names; None for the default player sets; `["sources"]` for the sources alone.
        parameter_free: whether the weights are identities already, which no player may be.
        bands: bands that together are all of RoPE, if they are players.

    Raises:
        UserError: for a player that does not exist, that the model lacks, or that shares a
            component with another, or too many players.
    """
    if "mask" not in has:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    position: Component | None = next((p for p in POSITION_ENCODINGS if p in has), None)
    player_sets = _default_player_sets(has, position, parameter_free) if players is None else ()
    if players is not None and list(players) != ["sources"]:
        player_sets = (_checked_players(players, has, parameter_free, bands),)
    conditions = [INTACT, *_source_conditions(position)]
    for each in player_sets:
        conditions += each.conditions
    return Plan(
        player_sets=player_sets, position=position, conditions=tuple(dict.fromkeys(conditions))
    )


def _default_player_sets(
    has: Sequence[Component], position: Component | None, parameter_free: bool
) -> tuple[PlayerSet, ...]:
    sources = ["mask"] + ([position] if position else [])
    if parameter_free:
        return (player_set(sources),)
    singles = [name for name in ("w_q", "w_k", "w_o") if name in has]
    return (
        player_set([*sources, *singles]),
        player_set([*sources, "qk", "ov"], name="circuits"),
    )


def _checked_players(
    players: Sequence[str], has: Sequence[Component], parameter_free: bool, bands: Sequence[str]
) -> PlayerSet:
    try:
        ours = player_set(players, bands=bands)
    except ValueError as error:
        raise UserError(str(error)) from error
    wanted = frozenset[str]().union(*(player.components for player in ours.players))
    validate_components(wanted, has)
    if parameter_free and wanted & set(WEIGHTS):
        raise UserError("the weights of a parameter-free model are identities already: no players")
    return ours


def _source_conditions(position: Component | None) -> Iterator[Condition]:
    yield MASK
    if position is not None:
        yield frozenset({position})
        yield MASK | {position}
