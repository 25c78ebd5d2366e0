"""Attribution of a pattern, from the maps of ablated models, to its sources and to players.

Only the mask and position encodings break the symmetry between positions: they are the sources.
Weights shape what the sources start: a weight can be a player, and is never called a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.conditions import (
    FoldMeans,
    Removed,
    folds_by_condition,
    position_of,
    skipped_keys,
    validate_complete,
)
from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.analyses.jackknife import Interval, cross_products, jackknife, rms, signed_root
from nope_probe.analyses.pattern import kept_cells, relative_part, row_centred
from nope_probe.analyses.shapley import (
    INTACT,
    MASK,
    Condition,
    Contrast,
    PlayerSet,
    alone,
    difference,
    lost,
    moebius,
    shapley,
    source_terms,
)
from nope_probe.hooks.maps import ScoreMaps
from nope_probe.hooks.names import Component

CONJUNCTION_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Source:
    """One term of v(all) = content + mask + rope + mask x rope.

    Attributes:
        term: its name, as in `source_terms`.
        rms: its RMS over the cells, nats.
        share: <term, v(all)> / <v(all), v(all)>; the shares of all terms add to 1.
    """

    term: str
    rms: Interval
    share: Interval


@dataclass(frozen=True, kw_only=True)
class PlayerAttribution:
    """A player's part in D = v(all) - v(none), each relative to <D, D>.

    Attributes:
        player_set, player: their names.
        share: the Shapley share; the shares of all players add to 1.
        alone: of v({c}) - v(none), the pattern with this player alone.
        lost: of v(all) - v(all less c), what is lost without this player.
    """

    player_set: str
    player: str
    share: Interval
    alone: Interval
    lost: Interval


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """The share of a Moebius term: what these players add only when all of them are kept."""

    player_set: str
    players: tuple[str, ...]
    share: Interval


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """RMS of the non-relative part with and without the mask, nats (the paper's section 5).

    Attributes:
        difference: with the mask less without it, paired.
    """

    with_mask: Interval
    without_mask: Interval
    difference: Interval


@dataclass(frozen=True, kw_only=True)
class LayerAttribution:
    """The attribution of one layer's pattern.

    Attributes:
        layer: the layer, from 0.
        sources: the terms that add up to the pattern.
        players, interactions: of every player set.
        non_relative: the mask's effect on the non-relative part.
    """

    layer: int
    sources: tuple[Source, ...]
    players: tuple[PlayerAttribution, ...]
    interactions: tuple[Interaction, ...]
    non_relative: MaskEffect

    def is_conjunction(self, player_set: str) -> bool:
        """Return whether all players of a set have about the same share: all are needed at once.

        Any destructive removal makes the pattern a conjunction, and a conjunction of k players
        gives each 1/k, which is no measurement of equal weight.
        """
        shares = [each.share.value for each in self.players if each.player_set == player_set]
        equal = 1 / max(1, len(shares))
        return len(shares) > 1 and all(abs(s - equal) < CONJUNCTION_TOLERANCE for s in shares)


def attribute(
    maps: Mapping[Removed, ScoreMaps | FoldMeans],
    player_sets: Sequence[PlayerSet] = (),
    *,
    position: Component | Literal["auto"] | None = "auto",
    skip_keys: int | Literal["auto"] = "auto",
) -> list[LayerAttribution]:
    """Attribute each layer's pattern to its sources, and find the weights it needs.

    `run_ablations` captures the conditions too, and returns tables.

    Args:
        maps: score maps of the intact and the ablated model on the same sequences, under the names
            of what is removed: `{(): ..., "mask": ..., "rope": ..., ("mask", "rope"): ...}`. The
            fold means alone, in nats, will do.
        player_sets: the players; none stops after the sources.
        position: the position encoding that is a source beside the mask; None if there is none.
            `auto`: the one that the conditions remove (what is never removed counts as content).
        skip_keys: first keys to leave out; `auto`: 1 where captured sequences all begin with the
            same token (BOS, an attention sink), else 0.

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
    folds, skipped = folds_by_condition(maps), skipped_keys(maps.values(), skip_keys)
    source = position_of(folds) if position == "auto" else position
    validate_complete(folds, player_sets, source)
    layers = next(iter(folds.values())).shape[1]
    return [
        _attribute_layer(
            layer,
            {condition: each[:, layer] for condition, each in folds.items()},
            player_sets,
            source,
            skipped,
        )
        for layer in range(layers)
    ]


def _attribute_layer(
    layer: int,
    folds: Mapping[Condition, Float[Tensor, "fold query_pos key_pos"]],
    player_sets: Sequence[PlayerSet],
    position: Component | None,
    skip_keys: int,
) -> LayerAttribution:
    gram = ContrastGram(list(folds), _kept_patterns(list(folds.values()), skip_keys))
    return LayerAttribution(
        layer=layer,
        sources=tuple(_sources(gram, position)),
        players=tuple(each for ours in player_sets for each in _players(gram, ours)),
        interactions=tuple(each for ours in player_sets for each in _interactions(gram, ours)),
        non_relative=mask_effect(folds[INTACT], folds[MASK], skip_keys),
    )


def _kept_patterns(
    folds: Sequence[Float[Tensor, "fold query_pos key_pos"]], skip_keys: int
) -> Float[Tensor, "condition fold cell"]:
    # One condition at a time, and the kept cells alone: all whole maps together are gigabytes.
    cells = kept_cells(folds[0].shape[-1], skip_keys)
    return torch.stack([row_centred(each.double(), skip_keys)[..., cells] for each in folds])


def _sources(gram: ContrastGram, position: Component | None) -> list[Source]:
    whole: Contrast = {INTACT: 1.0}
    return [
        Source(term=name, rms=rms(gram.product(term, term)), share=gram.share(term, whole))
        for name, term in source_terms(position).items()
    ]


def _players(gram: ContrastGram, players: PlayerSet) -> list[PlayerAttribution]:
    whole = difference(players)
    return [
        PlayerAttribution(
            player_set=players.name,
            player=each.name,
            share=gram.share(shapley(players, each), whole),
            alone=gram.share(alone(players, each), whole),
            lost=gram.share(lost(players, each), whole),
        )
        for each in players.players
    ]


def _interactions(gram: ContrastGram, players: PlayerSet) -> list[Interaction]:
    whole = difference(players)
    return [
        Interaction(
            player_set=players.name,
            players=tuple(player.name for player in members),
            share=gram.share(moebius(players, members), whole),
        )
        for size in range(2, len(players.players) + 1)
        for members in combinations(players.players, size)
    ]


def mask_effect(
    with_mask: Float[Tensor, "fold query_pos key_pos"],
    without_mask: Float[Tensor, "fold query_pos key_pos"],
    skip_keys: int = 0,
) -> MaskEffect:
    """Return the RMS of one layer's non-relative part with and without the mask, and its change.

    Args:
        with_mask: fold maps of the intact model's score, nats.
        without_mask: the same without the mask, on the same sequences.
        skip_keys: how many first keys to leave out.
    """
    patterns = torch.stack(
        [row_centred(each.double(), skip_keys) for each in (with_mask, without_mask)]
    )
    rest = patterns - relative_part(patterns, skip_keys)
    cells = kept_cells(patterns.shape[-1], skip_keys)
    squares = cross_products(rest[..., cells], rest[..., cells])
    with_square, without_square = squares[:, 0, 0], squares[:, 1, 1]
    return MaskEffect(
        with_mask=rms(with_square),
        without_mask=rms(without_square),
        difference=jackknife(_roots(with_square) - _roots(without_square)),
    )


def _roots(squares: Float[Tensor, " one_plus_folds"]) -> Float[Tensor, " one_plus_folds"]:
    return torch.tensor([signed_root(float(square)) for square in squares], dtype=torch.float64)
