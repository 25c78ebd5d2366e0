"""Attribution of a pattern, from the maps of ablated models, to its sources and to players.

Only the mask and position encodings break the symmetry between positions: they are the sources.
Weights shape what the sources start: a weight can be a player, and is never called a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Int
from torch import Tensor

from nope_probe.analyses.conditions import (
    AnyMaps,
    Removed,
    fold_counts_of,
    folds_by_condition,
    position_of,
    skipped_keys,
    validate_complete,
)
from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.mask_effect import MaskEffect, mask_effect
from nope_probe.analyses.player_attribution import (
    BASE,
    Interaction,
    PlayerAttribution,
    attribute_interactions,
    attribute_players,
)
from nope_probe.analyses.shapley import (
    INTACT,
    MASK,
    Condition,
    Contrast,
    PlayerSet,
    position_term,
    source_terms,
)
from nope_probe.errors import closed_choices
from nope_probe.hooks.layer_folds import LayerFolds
from nope_probe.hooks.names import Component

CONJUNCTION_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Source:
    """One term of v(all) = content + mask + rope + mask x rope.

    Attributes:
        term: its name, as in `source_terms`, or `position` for all of them but content.
        rms: its RMS over the cells, nats.
        share: <term, v(all)> / <v(all), v(all)>; the shares of the terms of v(all) add to 1.
    """

    term: str
    rms: Interval
    share: Interval


@dataclass(frozen=True, kw_only=True)
class LayerAttribution:
    """The attribution of one layer's pattern.

    Attributes:
        layer: the layer, from 0.
        sources: the terms that add up to the pattern.
        position: all of them but content, whose share of the pattern is what players share.
        players, interactions: of every player set.
        non_relative: the mask's effect on the non-relative part.
        kept: per condition, the share of v(all) that is left in its pattern.
    """

    layer: int
    sources: tuple[Source, ...]
    position: Source
    players: tuple[PlayerAttribution, ...]
    interactions: tuple[Interaction, ...]
    non_relative: MaskEffect
    kept: Mapping[Condition, Interval] = field(default_factory=dict, repr=False)

    def is_conjunction(self, player_set: str) -> bool:
        """Return whether all players of a set have about the same share: all are needed at once.

        Any destructive removal makes the pattern a conjunction, and a conjunction of k players
        gives each 1/k, which is no measurement of equal weight.
        """
        ours = [each for each in self.players if each.player_set == player_set]
        shares = [each.share.value for each in ours if each.player != BASE]
        equal = 1 / max(1, len(shares))
        return len(shares) > 1 and all(abs(s - equal) < CONJUNCTION_TOLERANCE for s in shares)


@closed_choices("position", "skip_keys")
def attribute(
    maps: Mapping[Removed, AnyMaps],
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
            fold means alone, in nats, will do, and count as folds of equal size.
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
    counts = fold_counts_of(maps.values())
    source = position_of(folds) if position == "auto" else position
    validate_complete(folds, player_sets, source)
    return [
        _attribute_layer(
            layer,
            {condition: each[layer] for condition, each in folds.items()},
            player_sets,
            source,
            skipped,
            counts,
        )
        for layer in range(len(folds[INTACT]))
    ]


def _attribute_layer(
    layer: int,
    folds: Mapping[Condition, LayerFolds],
    player_sets: Sequence[PlayerSet],
    position: Component | None,
    skip_keys: int,
    counts: Int[Tensor, " fold"] | None,
) -> LayerAttribution:
    gram = ContrastGram.of_layers(folds, skip_keys, counts)
    return LayerAttribution(
        layer=layer,
        sources=tuple(_source(gram, *each) for each in source_terms(position).items()),
        position=_source(gram, "position", position_term(position)),
        players=tuple(each for ours in player_sets for each in attribute_players(gram, ours)),
        interactions=tuple(
            each for ours in player_sets for each in attribute_interactions(gram, ours)
        ),
        non_relative=mask_effect(folds[INTACT], folds[MASK], skip_keys, counts),
        kept={each: gram.share({each: 1.0}, {INTACT: 1.0}) for each in folds},
    )


def _source(gram: ContrastGram, name: str, term: Contrast) -> Source:
    return Source(term=name, rms=gram.rms(term), share=gram.share(term, {INTACT: 1.0}))
