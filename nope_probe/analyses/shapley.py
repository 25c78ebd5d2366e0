"""Players, coalitions, and every quantity of the attribution as a sum of condition maps.

A condition is the model with some components removed, written as the frozenset of what is removed.
A term is a linear combination of conditions' maps: a source, a Shapley map, an interaction. Keeping
the coefficients apart from the maps makes every share an inner product of the same Gram matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import factorial

from nope_probe.hooks.names import COMPONENTS, Component

Condition = frozenset[Component]
Contrast = Mapping[Condition, float]
INTACT: Condition = frozenset()
MASK: Condition = frozenset({"mask"})
CIRCUITS: dict[str, tuple[Component, ...]] = {"qk": ("w_q", "w_k"), "ov": ("w_o", "w_v")}


@dataclass(frozen=True, kw_only=True)
class Player:
    """One thing that is kept or removed as a whole: a component, a circuit or a union."""

    name: str
    components: Condition


@dataclass(frozen=True, kw_only=True)
class PlayerSet:
    """Players whose coalitions are all measured: v(T) is the pattern when only T is left."""

    name: str
    players: tuple[Player, ...]

    @property
    def conditions(self) -> list[Condition]:
        """All 2^k conditions, the intact model first."""
        return [self.condition(kept) for kept in reversed(list(coalitions(self.players)))]

    def condition(self, kept: Sequence[Player]) -> Condition:
        """Give the condition in which only these players are left."""
        gone = [player.components for player in self.players if player not in kept]
        return frozenset(chain.from_iterable(gone))


def player(name: str) -> Player:
    """Read a player's name: a component, a circuit (qk, ov) or a union such as w_q+mlp.

    Raises:
        ValueError: if there is no such component or circuit.

    Example:
        >>> sorted(player("qk+mlp").components)
        ['mlp', 'w_k', 'w_q']
    """
    components: set[Component] = set()
    for part in name.split("+"):
        if part in CIRCUITS:
            components |= set(CIRCUITS[part])
        elif part in COMPONENTS:
            components |= {part}
        else:
            known = ", ".join([*COMPONENTS, *CIRCUITS])
            raise ValueError(
                f"unknown player {part!r}; there are {known}, and unions such as w_q+w_k"
            )
    return Player(name=name, components=frozenset(components))


def player_set(names: Sequence[str], name: str = "players") -> PlayerSet:
    """Make a game of players by their names.

    Raises:
        ValueError: for an unknown or repeated player, or two that share a component.

    Example:
        >>> from nope_probe import player_set
        >>> len(player_set(["mask", "rope", "qk"]).conditions)
        8
    """
    players = tuple(player(each) for each in names)
    if not players:
        raise ValueError("expected at least one player")
    for one, other in combinations(players, 2):
        shared = one.components & other.components
        if shared:
            raise ValueError(f"the players {one.name} and {other.name} share {sorted(shared)[0]}")
    return PlayerSet(name=name, players=players)


def coalitions(players: Sequence[Player]) -> Iterator[tuple[Player, ...]]:
    """Give all subsets of the players, the empty one first."""
    sizes = range(len(players) + 1)
    return chain.from_iterable(combinations(players, size) for size in sizes)


def kept_name(condition: Condition, playing: Condition) -> str:
    """Name a condition by what it keeps of the playing components, joined by +, or `none`."""
    return "+".join(name for name in COMPONENTS if name in playing - condition) or "none"


def source_terms(position: Component | None) -> dict[str, Contrast]:
    """Split v(all) into content, the mask, the position encoding and their interaction.

    Args:
        position: `rope`, `pos_embed`, or None in a model without position encoding.

    The trained weights stay. Content is what is left without mask and position encoding; mask and
    RoPE are what each adds to it alone; the interaction is the rest (the paper's section 5).
    """
    if position is None:
        return {"content": {MASK: 1.0}, "mask": {INTACT: 1.0, MASK: -1.0}}
    alone: Condition = frozenset({position})
    both = MASK | alone
    return {
        "content": {both: 1.0},
        "mask": {alone: 1.0, both: -1.0},
        position: {MASK: 1.0, both: -1.0},
        f"mask_x_{position}": {INTACT: 1.0, alone: -1.0, MASK: -1.0, both: 1.0},
    }


def difference(players: PlayerSet) -> Contrast:
    """D = v(all) - v(none): what the players bring together."""
    return _sum([(1.0, players.condition(players.players)), (-1.0, players.condition(()))])


def shapley(players: PlayerSet, one: Player) -> Contrast:
    """phi_c: what a player adds, averaged over all orders in which players can join."""
    k = len(players.players)
    others = [each for each in players.players if each != one]
    pairs = []
    for kept in coalitions(others):
        weight = factorial(len(kept)) * factorial(k - len(kept) - 1) / factorial(k)
        pairs += [(weight, players.condition((*kept, one))), (-weight, players.condition(kept))]
    return _sum(pairs)


def sufficiency(players: PlayerSet, one: Player) -> Contrast:
    """v({c}) - v(none): what a player brings alone."""
    return _sum([(1.0, players.condition((one,))), (-1.0, players.condition(()))])


def necessity(players: PlayerSet, one: Player) -> Contrast:
    """v(all) - v(all less c): what is lost without a player."""
    others = [each for each in players.players if each != one]
    return _sum([(1.0, players.condition(players.players)), (-1.0, players.condition(others))])


def moebius(players: PlayerSet, members: Sequence[Player]) -> Contrast:
    """m(T): the sum over S in T of (-1)^(|T|-|S|) v(S), what only all of T together bring."""
    return _sum(
        [((-1.0) ** (len(members) - len(s)), players.condition(s)) for s in coalitions(members)]
    )


def _sum(pairs: Sequence[tuple[float, Condition]]) -> Contrast:
    term: dict[Condition, float] = {}
    for weight, condition in pairs:
        term[condition] = term.get(condition, 0.0) + weight
    return term
