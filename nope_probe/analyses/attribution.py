"""Attribution of a pattern, from the maps of ablated models, to its sources and to players.

The mask, a sliding window and position encodings are the sources, because nothing else breaks the
symmetry between positions. Weights only shape the effects of sources: a weight can be a player, and
is never called a source.

A condition is the model with some components removed. Users name a condition by the removed
components (`()`, `"mask"`, `("mask", "rope")`); here such a name becomes a `Condition`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.analyses.pattern_changes import MaskEffect, mask_effect
from nope_probe.analyses.pattern_rows import ContrastGram, names_of_parts
from nope_probe.analyses.shapley import (
    Contrast,
    Player,
    PlayerSet,
    alone,
    base,
    coalitions,
    lost,
    moebius,
    position_term,
    positional_whole,
    shapley,
    source_terms,
    without,
)
from nope_probe.components import SOURCES, Component
from nope_probe.conditions import INTACT, MASK, Condition
from nope_probe.errors import UserError, closed_choices, kind_of
from nope_probe.maps.layers import Part, Pattern, set_apart, shared_patterns
from nope_probe.maps.maps import Layers, ScoreMaps, layers_of

BASE = "base"
CONJUNCTION_TOLERANCE = 0.1
Removed = TypeVar("Removed", bound=str | Iterable[str])


@dataclass(frozen=True, kw_only=True)
class Source:
    """One term of v(all), such as content + mask + rope + mask x rope.

    Attributes:
        term: its name, as in `source_terms`, or `position` for all terms but content.
        rms: its RMS over the cells, nats.
        rms_first, rms_others: the RMS of its part at the first keys, and of its part among the
            other keys; their squares add up to that of `rms`.
        share: <term, v(all)> / <v(all), v(all)>; the shares of the terms of v(all) add to 1.
        share_first, share_others: what each of the two parts brings of `share`; they add up to it.
    """

    term: str
    rms: Interval
    rms_first: Interval = UNDEFINED
    rms_others: Interval = UNDEFINED
    share: Interval
    share_first: Interval = UNDEFINED
    share_others: Interval = UNDEFINED


@dataclass(frozen=True, kw_only=True)
class PlayerAttribution:
    """A player's part in p(all) = v(all) - v(all less the sources).

    All numbers are undefined where <p(all), p(all)> does not exceed its noise.

    Attributes:
        player_set, player: their names; `base`: p(none), where no source plays.
        share: <phi_c, p(all)> / <p(all), p(all)>, the Shapley share; the shares of all players,
            and of `base` where it exists, add to 1.
        lost: the share of p(all) - p(all less c), the loss without this player.
        alone: the share of p({c}), for sources only, as a weight alone has no positional part.
        share_first, share_others, lost_first, lost_others, alone_first, alone_others: what the
            parts at the first keys and among the other keys bring of each of the three.
        amplification: RMS p(all) / RMS p(all less c); undefined where the latter does not exceed
            its noise.
    """

    player_set: str
    player: str
    share: Interval = UNDEFINED
    share_first: Interval = UNDEFINED
    share_others: Interval = UNDEFINED
    lost: Interval = UNDEFINED
    lost_first: Interval = UNDEFINED
    lost_others: Interval = UNDEFINED
    alone: Interval = UNDEFINED
    alone_first: Interval = UNDEFINED
    alone_others: Interval = UNDEFINED
    amplification: Interval = UNDEFINED


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """The share of a Moebius term: the part that exists only when all these players are kept.

    It is the sum of `share_first`, at the first keys, and `share_others`, among the other keys.
    """

    player_set: str
    players: tuple[str, ...]
    share: Interval
    share_first: Interval = UNDEFINED
    share_others: Interval = UNDEFINED


@dataclass(frozen=True, kw_only=True)
class LayerPlayers:
    """The players' parts in one layer's pattern.

    Attributes:
        layer: the layer, from 0.
        players: the players of every player set.
    """

    layer: int
    players: tuple[PlayerAttribution, ...]


@dataclass(frozen=True, kw_only=True)
class LayerAttribution(LayerPlayers):
    """The attribution of one layer's pattern.

    Attributes:
        sources: the terms that add up to the pattern.
        position: all terms but content, as one term.
        interactions: the interactions of every player set.
        non_relative: the mask's effect on the non-relative part.
        kept: per condition, the share of v(all) that is left in its pattern, among the other keys.
    """

    sources: tuple[Source, ...]
    position: Source
    interactions: tuple[Interaction, ...]
    non_relative: MaskEffect
    kept: Mapping[Condition, Interval] = field(default_factory=dict, repr=False)

    def is_conjunction(self, player_set: str) -> bool:
        """Return whether all players of a set have about equal shares: the pattern needs them all.

        Any destructive removal makes the pattern a conjunction. A conjunction of k players gives
        every player 1/k, so equal shares do not show equal importance.
        """
        players = [player for player in self.players if player.player_set == player_set]
        shares = [player.share.value for player in players if player.player != BASE]
        equal = 1 / max(1, len(shares))
        return len(shares) > 1 and all(abs(s - equal) < CONJUNCTION_TOLERANCE for s in shares)


@closed_choices("sources", "skip_keys")
def attribute(
    maps: Mapping[Removed, ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"]],
    player_sets: Sequence[PlayerSet] = (),
    *,
    sources: Sequence[Component] | Literal["auto"] = "auto",
    skip_keys: int | Literal["auto"] = "auto",
) -> list[LayerAttribution]:
    """Attribute each layer's pattern to its sources, and find the weights that it needs.

    `run_ablations` also captures the conditions, and returns tables.

    Args:
        maps: score maps of the intact and the ablated model on the same sequences, by the removed
            components: `{(): ..., "mask": ..., "rope": ..., ("mask", "rope"): ...}`. Bare fold
            means, in nats, are accepted, and count as folds of equal size.
        player_sets: the players; without any, only sources are attributed.
        sources: the mask, and the window and position encodings that are sources beside it. `auto`
            takes the sources that a condition removes without a weight; a source that is never
            removed counts as content.
        skip_keys: how many keys count as first; `auto`: 1 for captured maps of tokens, 0 for maps
            of vectors and for bare fold means, where shares do not split.

    Raises:
        KeyError: if a condition of the sources or players is missing.
        ValueError: for a name that does not exist, or a non-finite cell below the diagonal.

    Example:
        >>> from nope_probe import Ablation, ablated, attribute, capture_scores, load, sequences
        >>> model = load("nope-tiny", n_layers=3)
        >>> tokens = sequences("random", tokenizer=model.tokenizer, n_seqs=64, seq_len=16).inputs
        >>> intact = capture_scores(model.model, tokens)
        >>> with ablated(model.model, Ablation(remove=["mask"])):
        ...     without = capture_scores(model.model, tokens)
        >>> content, mask = attribute({(): intact, "mask": without}, skip_keys=1)[2].sources
        >>> mask.share.value > 0.9
        True
    """
    conditions = layers_by_condition(maps)
    if skip_keys == "auto":
        every_layer = chain.from_iterable(layers.values() for layers in conditions.values())
        skip_keys = max(layer.skip_keys for layer in every_layer)
    conditions = {name: set_apart(layers, skip_keys) for name, layers in conditions.items()}
    sources = sources_of(conditions) if sources == "auto" else sources
    validate_complete(conditions, player_sets, sources)
    layers = []
    for layer in conditions[INTACT]:
        patterns = patterns_of(conditions, layer)
        gram = ContrastGram.of(patterns)
        attribution = LayerAttribution(
            layer=layer,
            sources=tuple(_source(gram, *term) for term in source_terms(sources).items()),
            position=_source(gram, "position", position_term(sources)),
            players=tuple(attribute_players(gram, player_sets)),
            interactions=tuple(attribute_interactions(gram, player_sets)),
            non_relative=mask_effect(patterns[INTACT], patterns[MASK]),
            kept={condition: gram.kept({condition: 1.0}, {INTACT: 1.0}) for condition in patterns},
        )
        layers.append(attribution)
    return layers


def _source(gram: ContrastGram, name: str, term: Contrast) -> Source:
    strengths = (gram.rms(term, part) for part in get_args(Part))
    return Source(
        term=name,
        **dict(zip(names_of_parts("rms"), strengths, strict=True)),
        **gram.shares("share", term, {INTACT: 1.0}),
    )


def attribute_losses(
    maps: Mapping[Condition, Layers], player_sets: Sequence[PlayerSet]
) -> list[LayerPlayers]:
    """Measure the loss of every layer's pattern without each weight, without Shapley shares.

    Args:
        maps: score maps of the conditions of `losses_need`, and of the sources.
        player_sets: the players; only players that hold a weight are measured.

    Raises:
        KeyError: if a condition is missing.
    """
    layers = []
    for layer in maps[INTACT]:
        gram = ContrastGram.of(patterns_of(maps, layer))
        players = tuple(
            _player(gram, players, player, {})
            for players in player_sets
            for player in players.players
            if player.has_weight
        )
        layers.append(LayerPlayers(layer=layer, players=players))
    return layers


def losses_need(player_sets: Sequence[PlayerSet]) -> set[Condition]:
    """Return the conditions that `attribute_losses` needs for some player sets.

    Example:
        >>> from nope_probe import player_set
        >>> sorted(map(sorted, losses_need([player_set(["mask", "qk", "w_o"])])))
        [[], ['mask'], ['mask', 'w_k', 'w_q'], ['mask', 'w_o'], ['w_k', 'w_q'], ['w_o']]
    """
    return {
        condition
        for players in player_sets
        for player in players.players
        if player.has_weight
        for contrast in (positional_whole(players), without(players, player))
        for condition in contrast
    }


def _player(
    gram: ContrastGram, players: PlayerSet, player: Player, shares: Mapping[str, Interval]
) -> PlayerAttribution:
    """Return the loss without a player, its amplification, and shares that are known."""
    whole = positional_whole(players)
    return PlayerAttribution(
        player_set=players.name,
        player=player.name,
        **shares,
        **gram.shares("lost", lost(players, player), whole),
        amplification=gram.rms_ratio(whole, without(players, player)),
    )


def attribute_players(
    gram: ContrastGram, player_sets: Iterable[PlayerSet]
) -> Iterator[PlayerAttribution]:
    """Yield the parts of all players of all sets, and `base` where no source plays."""
    for players in player_sets:
        whole = positional_whole(players)
        for one in players.players:
            shares = gram.shares("share", shapley(players, one), whole)
            if one.is_source:
                shares |= gram.shares("alone", alone(players, one), whole)
            yield _player(gram, players, one, shares)
        if not players.has_source:
            shares = gram.shares("share", base(players), whole)
            yield PlayerAttribution(player_set=players.name, player=BASE, **shares)


def attribute_interactions(
    gram: ContrastGram, player_sets: Iterable[PlayerSet]
) -> Iterator[Interaction]:
    """Yield the shares of all Moebius terms of two players or more, except terms that must be 0."""
    for players in player_sets:
        for members in coalitions(players.players):
            has_source = any(member.is_source for member in members) or not players.has_source
            if len(members) > 1 and has_source:
                yield Interaction(
                    player_set=players.name,
                    players=tuple(player.name for player in members),
                    **gram.shares("share", moebius(players, members), positional_whole(players)),
                )


def patterns_of(maps: Mapping[Condition, Layers], layer: int) -> dict[Condition, Pattern]:
    """Return one layer's pattern in each condition, on shared cells."""
    of_layer = [by_layer[layer] for by_layer in maps.values()]
    return dict(zip(maps, shared_patterns(of_layer), strict=True))


def layers_by_condition(
    maps: Mapping[Removed, ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"]],
) -> dict[Condition, Layers]:
    """Return the maps of each layer, by its number, in each condition.

    Raises:
        ValueError: for a name that does not exist, two names of one condition, no maps, or maps on
            other sequences.
    """
    if not isinstance(maps, Mapping):
        raise UserError(
            "expected maps by the removed components, {(): ..., 'mask': ...}, got " + kind_of(maps)
        )
    conditions = {
        Condition.parse(removed): layers_of(captured) for removed, captured in maps.items()
    }
    if len(conditions) < len(maps) or not conditions:
        raise ValueError(f"expected one entry per condition, got {list(maps)}")
    counts = [layer.counts for layers in conditions.values() for layer in layers.values()]
    if any(not torch.equal(count, counts[0]) for count in counts):
        raise ValueError("maps have folds of different sizes: capture them on the same sequences")
    return conditions


def sources_of(conditions: Iterable[Condition]) -> tuple[Component, ...]:
    """Return the mask, and every other source that a condition removes without a weight.

    Example:
        >>> sources_of(map(Condition.parse, ((), "mask", "rope")))
        ('mask', 'rope')
    """
    removed = MASK.union(*(names for names in conditions if names <= {*SOURCES}))
    return tuple(name for name in SOURCES if name in removed)


def validate_complete(
    conditions: Collection[Condition],
    player_sets: Sequence[PlayerSet],
    sources: Sequence[Component],
) -> None:
    """Check that there are maps of all conditions of the sources and players.

    Raises:
        KeyError: naming a missing condition.
    """
    needed = {INTACT, MASK}.union(*source_terms(sources).values())
    missing = needed.union(*(player_set.conditions for player_set in player_sets)) - set(conditions)
    if missing:
        names = " + ".join(sorted(min(missing, key=sorted))) or "nothing"
        raise KeyError(f"no maps of the model with {names} removed")
