"""The maps that `measure` and `attribute` take: what captures return, or their fold means.

A condition is the model with some components removed. Users name it by what is removed (`()`,
`"mask"`, `("mask", "rope")`); `condition` makes a frozenset of components of such a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.shapley import (
    INTACT,
    MASK,
    Condition,
    PlayerSet,
    condition,
    source_terms,
)
from nope_probe.hooks.layer_folds import LayerFolds, TensorFolds
from nope_probe.hooks.maps import ScoreMaps
from nope_probe.hooks.names import POSITION_ENCODINGS, Component
from nope_probe.hooks.stored_maps import StoredMaps

FoldMeans: TypeAlias = Float[Tensor, "fold layer query_pos key_pos"]
AnyMaps: TypeAlias = ScoreMaps | StoredMaps | FoldMeans
FoldCounts: TypeAlias = Int[Tensor, " fold"]
Removed = TypeVar("Removed", bound=str | Iterable[str])


def layer_folds(maps: AnyMaps) -> list[LayerFolds]:
    """Return the fold means of each layer's scores, in nats."""
    if isinstance(maps, StoredMaps):
        return [each.folds for each in maps.layers]
    folds = maps.folds if isinstance(maps, ScoreMaps) else maps
    return [TensorFolds(folds[:, layer]) for layer in range(folds.shape[1])]


def skipped_keys(maps: Iterable[AnyMaps], skip_keys: int | Literal["auto"]) -> int:
    """Return how many first keys to leave out of some maps.

    `auto` is 1 where all captured sequences begin with the same token (a BOS token, which is an
    attention sink), else 0; of fold means, which do not say, 0.
    """
    if skip_keys == "auto":
        return int(any(not isinstance(each, Tensor) and each.bos for each in maps))
    return skip_keys


def fold_counts_of(maps: Iterable[AnyMaps]) -> FoldCounts | None:
    """Return the sequences per fold of maps on the same sequences; None if none of them says.

    Raises:
        ValueError: if they differ.
    """
    counts = [each.counts for each in maps if not isinstance(each, Tensor)]
    if any(not torch.equal(each, counts[0]) for each in counts):
        raise ValueError("the maps have folds of different sizes: they are of other sequences")
    return counts[0] if counts else None


def folds_by_condition(maps: Mapping[Removed, AnyMaps]) -> dict[Condition, list[LayerFolds]]:
    """Return the fold means of each layer in each condition.

    Raises:
        ValueError: for a name that does not exist, two names of one condition, or no maps.
    """
    found = {condition(removed): layer_folds(each) for removed, each in maps.items()}
    if len(found) < len(maps) or not found:
        raise ValueError(f"expected one entry per condition, got {list(maps)}")
    return found


def position_of(conditions: Iterable[Condition]) -> Component | None:
    """Return the position encoding that a condition removes, alone or with the mask, or None.

    Example:
        >>> position_of([condition(()), condition("mask"), condition("rope")])
        'rope'
    """
    beside_mask = {each - MASK for each in conditions}
    return next((name for name in POSITION_ENCODINGS if {name} in beside_mask), None)


def validate_complete(
    conditions: Collection[Condition],
    player_sets: Sequence[PlayerSet],
    position: Component | None,
) -> None:
    """Check that there are maps of all conditions of the sources and players.

    Raises:
        KeyError: naming one that is missing.
    """
    needed = {INTACT, MASK}.union(*source_terms(position).values())
    missing = needed.union(*(each.conditions for each in player_sets)) - set(conditions)
    if missing:
        names = " + ".join(sorted(min(missing, key=sorted))) or "nothing"
        raise KeyError(f"no maps of the model with {names} removed")
