"""From the maps of ablated models to sources, the weights they need, and their intervals.

Only the mask and position encodings break the symmetry between positions: they are sources. Weights
shape what these start, so a weight is needed or enough, and never called a source.
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
    validate_complete,
)
from nope_probe.analyses.jackknife import (
    Interval,
    cross_products,
    jackknife,
    rms,
    share,
    signed_root,
)
from nope_probe.analyses.pattern import kept_cells, relative_part, row_centred
from nope_probe.analyses.shapley import (
    INTACT,
    MASK,
    Condition,
    Contrast,
    PlayerSet,
    difference,
    moebius,
    necessity,
    shapley,
    source_terms,
    sufficiency,
)
from nope_probe.hooks.maps import ScoreMaps
from nope_probe.hooks.names import Component

CONJUNCTION_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Source:
    """One term of v(all) = content + mask + rope + mask x rope.

    Attributes:
        rms: the term's RMS over the cells, nats.
        share: <term, v(all)> / <v(all), v(all)>; the shares of all terms add to 1.
    """

    term: str
    rms: Interval
    share: Interval


@dataclass(frozen=True, kw_only=True)
class PlayerAttribution:
    """What a player means for the pattern of its game, each relative to <D, D>.

    Attributes:
        share: of its Shapley map; the shares of all players add to 1.
        sufficiency: of v({c}) - v(none).
        necessity: of v(all) - v(all less c).
    """

    game: str
    player: str
    share: Interval
    sufficiency: Interval
    necessity: Interval


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """The share of what only these players together bring (a Moebius term)."""

    game: str
    players: tuple[str, ...]
    share: Interval


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """The paper's section 5: RMS of the non-relative part with and without the mask, nats."""

    with_mask: Interval
    without_mask: Interval
    difference: Interval


@dataclass(frozen=True, kw_only=True)
class LayerAttribution:
    """Everything that is attributed in one layer."""

    layer: int
    sources: tuple[Source, ...]
    needs: tuple[PlayerAttribution, ...]
    interactions: tuple[Interaction, ...]
    non_relative: MaskEffect

    def is_conjunction(self, game: str) -> bool:
        """Tell whether all of a game's players get about the same share: all are needed at once.

        Any destructive removal makes the pattern a conjunction, and a conjunction of k players
        gives each 1/k: that is no measurement of equal weight.
        """
        shares = [need.share.value for need in self.needs if need.game == game]
        equal = 1 / max(1, len(shares))
        return len(shares) > 1 and all(abs(s - equal) < CONJUNCTION_TOLERANCE for s in shares)


def attribute(
    maps: Mapping[Removed, ScoreMaps | FoldMeans],
    games: Sequence[PlayerSet] = (),
    *,
    position: Component | Literal["auto"] | None = "auto",
    skip_keys: int = 0,
) -> list[LayerAttribution]:
    """Attribute each layer's pattern to its sources, and find the weights it needs.

    `run_ablations` captures the conditions too, and returns tables.

    Args:
        maps: score maps of the intact and the ablated model on the same sequences, under the names
            of what is removed: `{(): ..., "mask": ..., "rope": ..., ("mask", "rope"): ...}`. The
            fold means alone, in nats, will do.
        games: the players; none stops after the sources.
        position: the position encoding that is a source beside the mask; None if there is none.
            `auto`: the one that the conditions remove (what is never removed counts as content).
        skip_keys: first keys to leave out.

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
    folds = folds_by_condition(maps)
    source = position_of(folds) if position == "auto" else position
    validate_complete(folds, games, source)
    layers = next(iter(folds.values())).shape[1]
    return [
        _attribute_layer(
            layer,
            {condition: each[:, layer] for condition, each in folds.items()},
            games,
            source,
            skip_keys,
        )
        for layer in range(layers)
    ]


def _patterns(
    folds: Sequence[Float[Tensor, "fold query_pos key_pos"]], skip_keys: int
) -> Float[Tensor, "condition fold query_pos key_pos"]:
    return torch.stack([row_centred(each.double(), skip_keys) for each in folds])


def _kept_patterns(
    folds: Sequence[Float[Tensor, "fold query_pos key_pos"]], skip_keys: int
) -> Float[Tensor, "condition fold cell"]:
    """Give the patterns' cells alone, one condition at a time: whole maps are gigabytes."""
    cells = kept_cells(folds[0].shape[-1], skip_keys)
    return torch.stack([row_centred(each.double(), skip_keys)[..., cells] for each in folds])


def _attribute_layer(
    layer: int,
    folds: Mapping[Condition, Float[Tensor, "fold query_pos key_pos"]],
    games: Sequence[PlayerSet],
    position: Component | None,
    skip_keys: int,
) -> LayerAttribution:
    gram = ContrastGram(list(folds), _kept_patterns(list(folds.values()), skip_keys))
    return LayerAttribution(
        layer=layer,
        sources=tuple(_sources(gram, position)),
        needs=tuple(need for game in games for need in _needs(gram, game)),
        interactions=tuple(each for game in games for each in _interactions(gram, game)),
        non_relative=mask_effect(folds[INTACT], folds[MASK], skip_keys),
    )


class ContrastGram:
    """Inner products of terms, on all folds and without each, from one Gram matrix."""

    def __init__(
        self, conditions: Sequence[Condition], patterns: Float[Tensor, "condition fold cell"]
    ) -> None:
        self.row = {condition: row for row, condition in enumerate(conditions)}
        self.gram = cross_products(patterns, patterns)

    def product(self, one: Contrast, other: Contrast) -> Float[Tensor, " one_plus_folds"]:
        """Give <one, other> as a mean over cells, in squared nats."""
        left, right = self._coefficients(one), self._coefficients(other)
        return torch.einsum("x,fxy,y->f", left, self.gram, right)

    def share(self, term: Contrast, whole: Contrast) -> Interval:
        """Give <term, whole> / <whole, whole>."""
        return share(self.product(term, whole), self.product(whole, whole))

    def _coefficients(self, term: Contrast) -> Float[Tensor, " condition"]:
        vector = torch.zeros(len(self.row), dtype=torch.float64)
        for condition, weight in term.items():
            vector[self.row[condition]] += weight
        return vector


def _sources(gram: ContrastGram, position: Component | None) -> list[Source]:
    whole: Contrast = {INTACT: 1.0}
    return [
        Source(term=name, rms=rms(gram.product(term, term)), share=gram.share(term, whole))
        for name, term in source_terms(position).items()
    ]


def _needs(gram: ContrastGram, game: PlayerSet) -> list[PlayerAttribution]:
    whole = difference(game)
    return [
        PlayerAttribution(
            game=game.name,
            player=player.name,
            share=gram.share(shapley(game, player), whole),
            sufficiency=gram.share(sufficiency(game, player), whole),
            necessity=gram.share(necessity(game, player), whole),
        )
        for player in game.players
    ]


def _interactions(gram: ContrastGram, game: PlayerSet) -> list[Interaction]:
    whole = difference(game)
    return [
        Interaction(
            game=game.name,
            players=tuple(player.name for player in members),
            share=gram.share(moebius(game, members), whole),
        )
        for size in range(2, len(game.players) + 1)
        for members in combinations(game.players, size)
    ]


def mask_effect(
    with_mask: Float[Tensor, "fold query_pos key_pos"],
    without_mask: Float[Tensor, "fold query_pos key_pos"],
    skip_keys: int = 0,
) -> MaskEffect:
    """Compare the non-relative part of one layer's pattern with and without the causal mask.

    Both are fold maps of the score (nats) on the same sequences.
    """
    patterns = _patterns([with_mask, without_mask], skip_keys)
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


def term_map(
    term: Contrast, patterns: Mapping[Condition, Float[Tensor, "*batch query_pos key_pos"]]
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Add condition maps up to a term's map, nats."""
    total = torch.zeros_like(next(iter(patterns.values())))
    for condition, weight in term.items():
        total += weight * patterns[condition]
    return total
