"""Players, their coalitions, and every quantity of an attribution as a contrast of conditions.

A condition is the model with some components removed, the `Condition` of their names.
A contrast is a linear combination of conditions' maps: a source, a Shapley map, an interaction. A
contrast holds only coefficients, so every share is an inner product in one Gram matrix of the maps.

v(T) is the pattern when only the players in T are kept. Weights cannot make position; they only
shape the effects of sources. Players therefore share the positional part p(T) = v(T) - v(T less the
sources), without v(none), the content pattern of replaced weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import factorial

from nope_probe.components import ROPE_HALVES, SOURCES, WEIGHTS, is_rope
from nope_probe.conditions import INTACT, Condition, validate_disjoint

Contrast = Mapping[Condition, float]
MOST_CONDITIONS = 1024  # the coalitions of 10 players


@dataclass(frozen=True, kw_only=True)
class Player:
    """A component, a circuit or a union of these, kept or removed as a whole."""

    name: str
    components: Condition

    @property
    def is_source(self) -> bool:
        """Whether it holds the mask or a position encoding."""
        return any(name in SOURCES or is_rope(name) for name in self.components)

    @property
    def has_weight(self) -> bool:
        """Whether it holds a projection, which a removal replaces."""
        return not self.components.isdisjoint(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class PlayerSet:
    """Players whose coalitions are all measured; v(T) is the pattern when only T is kept.

    Attributes:
        name: the set's name.
        players: the players.
        bands: bands of RoPE that together are all of RoPE.
    """

    name: str
    players: tuple[Player, ...]
    bands: frozenset[str] = frozenset(ROPE_HALVES)

    @property
    def has_source(self) -> bool:
        """Whether a source plays; without a source, the positional part p is v itself."""
        return any(player.is_source for player in self.players)

    @property
    def conditions(self) -> list[Condition]:
        """All 2^k conditions, the intact model first."""
        return [self.condition(kept) for kept in reversed(list(coalitions(self.players)))]

    def condition(self, kept: Sequence[Player]) -> Condition:
        """Return the condition in which only these players are kept."""
        gone = [player.components for player in self.players if player not in kept]
        return Condition.of(chain.from_iterable(gone), self.bands)


def player(name: str) -> Player:
    """Return a player by its name: a component, a circuit (qk, ov) or a union such as w_q+mlp.

    Bands of RoPE (`rope_high`, `rope_low`, `rope[a:b]`) count as components.

    Raises:
        ValueError: for an unknown component or circuit, or for parts that share a component.

    Example:
        >>> sorted(player("qk+mlp").components)
        ['mlp', 'w_k', 'w_q']
    """
    return Player(name=name, components=Condition.parse(name))


def player_set(
    names: Sequence[str], name: str = "players", bands: Iterable[str] = ROPE_HALVES
) -> PlayerSet:
    """Return a player set from the names of its players.

    Args:
        names: components, circuits, bands of RoPE, and unions of them.
        name: the set's name.
        bands: bands of RoPE that together are all of RoPE; they matter if they all play.

    Raises:
        ValueError: for no players, an unknown player, players that share a component, or players
            with more than 1,024 conditions.

    Example:
        >>> from nope_probe import player_set
        >>> len(player_set(["mask", "rope", "qk"]).conditions)
        8
    """
    if isinstance(names, str):
        raise ValueError(f'expected a list of players, such as ["mask", "qk"], got {names!r}')
    players = tuple(player(member) for member in names)
    if not players:
        raise ValueError("expected at least one player")
    validate_disjoint(names)
    if 2 ** len(players) > MOST_CONDITIONS:
        raise ValueError(_too_many(len(players)))
    return PlayerSet(name=name, players=players, bands=frozenset(bands))


def _too_many(n_players: int) -> str:
    if n_players > 40:
        number, time = f"2^{n_players}", "over 30,000 years"
    else:
        hours = 2**n_players / 3600
        number = f"{2**n_players:,}"
        time = f"{hours:.2g} hours" if hours < 48 else f"{hours / 24:,.0f} days"
    return (
        f"{n_players} players have {number} conditions, which take {time} at 1 s per condition; "
        f"at most {MOST_CONDITIONS:,} are run: name fewer players or bands"
    )


def coalitions(players: Sequence[Player]) -> Iterator[tuple[Player, ...]]:
    """Yield all subsets of the players, the empty subset first."""
    sizes = range(len(players) + 1)
    return chain.from_iterable(combinations(players, size) for size in sizes)


def source_terms(sources: Sequence[str]) -> dict[str, Contrast]:
    """Return the terms of v(all): content, each source, and the interactions of sources.

    The trained weights are kept. Content is the pattern without any source. The term of a source is
    the pattern that this source alone adds to content. An interaction is the pattern that sources
    add only together (the paper's section 5).

    Args:
        sources: the sources that the model has: the mask, and a window or position encodings.

    Example:
        >>> list(source_terms(["mask", "rope"]))
        ['content', 'mask', 'rope', 'mask_x_rope']
    """
    terms: dict[str, Contrast] = {}
    for size in range(len(sources) + 1):
        for term in combinations(sources, size):
            terms["_x_".join(term) or "content"] = {
                Condition({*sources} - {*kept}): (-1.0) ** (size - len(kept))
                for n_kept in range(size, -1, -1)
                for kept in combinations(term, n_kept)
            }
    return terms


def position_term(sources: Sequence[str]) -> Contrast:
    """Return v(all) less content: the pattern that all sources add together."""
    return {INTACT: 1.0, Condition(sources): -1.0}


def positional(players: PlayerSet, kept: Sequence[Player]) -> Contrast:
    """Return p(T) = v(T) - v(T less the sources), the positional part of v(T).

    Sources that do not play are kept. Where no source plays, p(T) is v(T).
    """
    value: Contrast = {players.condition(kept): 1.0}
    if not players.has_source:
        return value
    weights = [member for member in kept if not member.is_source]
    return _sum([(1.0, value), (-1.0, {players.condition(weights): 1.0})])


def positional_whole(players: PlayerSet) -> Contrast:
    """Return p(all), the whole of the players' shares."""
    return positional(players, players.players)


def base(players: PlayerSet) -> Contrast:
    """Return p(none): 0 where a source plays, else the pattern that needs no player."""
    return positional(players, ())


def shapley(players: PlayerSet, one: Player) -> Contrast:
    """Return phi_c: a player's addition to p, averaged over all orders in which players join."""
    k = len(players.players)
    terms = []
    for kept in coalitions(_others(players, one)):
        weight = factorial(len(kept)) * factorial(k - len(kept) - 1) / factorial(k)
        terms += [
            (weight, positional(players, (*kept, one))),
            (-weight, positional(players, kept)),
        ]
    return _sum(terms)


def alone(players: PlayerSet, one: Player) -> Contrast:
    """Return p({c}): the part of a player alone; 0 for a weight where a source plays."""
    return positional(players, (one,))


def without(players: PlayerSet, one: Player) -> Contrast:
    """Return p(all less c): the part of all other players together."""
    return positional(players, _others(players, one))


def lost(players: PlayerSet, one: Player) -> Contrast:
    """Return p(all) - p(all less c): the loss without a player."""
    return _sum([(1.0, positional_whole(players)), (-1.0, without(players, one))])


def moebius(players: PlayerSet, members: Sequence[Player]) -> Contrast:
    """Return m(T), the sum over S in T of (-1)^(|T|-|S|) p(S): the part that needs all of T.

    Where a source plays, m(T) is 0 for a T of weights alone.
    """
    return _sum(
        [((-1.0) ** (len(members) - len(s)), positional(players, s)) for s in coalitions(members)]
    )


def _others(players: PlayerSet, one: Player) -> list[Player]:
    return [member for member in players.players if member != one]


def _sum(terms: Sequence[tuple[float, Contrast]]) -> Contrast:
    total: dict[Condition, float] = {}
    for weight, contrast in terms:
        for condition, coefficient in contrast.items():
            total[condition] = total.get(condition, 0.0) + weight * coefficient
    return {condition: coefficient for condition, coefficient in total.items() if coefficient}
