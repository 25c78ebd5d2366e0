"""The players' parts in p(all), the positional part of a pattern, and their interactions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.analyses.shapley import (
    Player,
    PlayerSet,
    alone,
    base,
    lost,
    moebius,
    positional_whole,
    shapley,
    without,
)

BASE = "base"


@dataclass(frozen=True, kw_only=True)
class PlayerAttribution:
    """A player's part in p(all) = v(all) - v(all less the sources).

    All are undefined where <p(all), p(all)> does not exceed its noise.

    Attributes:
        player_set, player: their names; `base`: p(none), where no source plays.
        share: <phi_c, p(all)> / <p(all), p(all)>, the Shapley share; with that of `base`, where
            there is one, the shares of all players add to 1.
        lost: the same of p(all) - p(all less c), what is lost without this player.
        alone: the same of p({c}), of sources only: a weight alone has no positional part.
        amplification: RMS p(all) / RMS p(all less c); undefined where the latter does not exceed
            its noise.
    """

    player_set: str
    player: str
    share: Interval
    lost: Interval = UNDEFINED
    alone: Interval = UNDEFINED
    amplification: Interval = UNDEFINED


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """The share of a Moebius term: what these players add only when all of them are kept."""

    player_set: str
    players: tuple[str, ...]
    share: Interval


def attribute_players(gram: ContrastGram, players: PlayerSet) -> Iterator[PlayerAttribution]:
    """Yield the parts of all players of a set, and `base` where no source plays."""
    whole = positional_whole(players)
    for each in players.players:
        yield _attribute_player(gram, players, each)
    if not players.has_source:
        yield PlayerAttribution(
            player_set=players.name, player=BASE, share=gram.share(base(players), whole)
        )


def _attribute_player(gram: ContrastGram, players: PlayerSet, one: Player) -> PlayerAttribution:
    whole = positional_whole(players)
    return PlayerAttribution(
        player_set=players.name,
        player=one.name,
        share=gram.share(shapley(players, one), whole),
        lost=gram.share(lost(players, one), whole),
        alone=gram.share(alone(players, one), whole) if one.is_source else UNDEFINED,
        amplification=gram.rms_ratio(whole, without(players, one)),
    )


def attribute_interactions(gram: ContrastGram, players: PlayerSet) -> Iterator[Interaction]:
    """Yield the shares of all Moebius terms of two players or more that can be other than 0."""
    whole = positional_whole(players)
    for size in range(2, len(players.players) + 1):
        for members in combinations(players.players, size):
            if any(each.is_source for each in members) or not players.has_source:
                yield Interaction(
                    player_set=players.name,
                    players=tuple(player.name for player in members),
                    share=gram.share(moebius(players, members), whole),
                )
