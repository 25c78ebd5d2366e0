"""The maps that figures take: arrays, tensors, or what a capture returned, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float

Layers: TypeAlias = Float[Any, "layer query_pos key_pos"]


@runtime_checkable
class ScoreMapsLike(Protocol):
    """What `capture_scores` returns, as far as a figure reads it."""

    @property
    def mean(self) -> Layers:
        """The mean over sequences, in nats."""


@runtime_checkable
class StageMapsLike(Protocol):
    """What `capture_stages` returns, as far as a figure reads it."""

    @property
    def folds(self) -> Mapping[Any, Any]:
        """Fold means, per letter."""

    def mean(self, letter: Any) -> Float[Any, "row_pos col_pos"]:
        """The mean over sequences of one stage's map."""

    def normalised(self, letter: Any) -> Float[Any, "row_pos col_pos"]:
        """The same less the mean of each diagonal."""


Stages: TypeAlias = StageMapsLike | Mapping[Any, Float[Any, "row_pos col_pos"]]


def layer_maps(maps: Layers | ScoreMapsLike) -> Float[np.ndarray, "layer query_pos key_pos"]:
    """Return maps of layers as an array: the mean over sequences of captured score maps."""
    captured = hasattr(maps, "folds")
    return np.asarray(maps.mean if captured else maps)


def keys_left_out(maps: object, skip_keys: int | Literal["auto"]) -> int:
    """Return how many first keys of some maps colour limits leave out.

    `auto` is 1 for captured maps of sequences that all begin with the same token (a BOS token,
    which is an attention sink), else 0.
    """
    return int(getattr(maps, "bos", False)) if skip_keys == "auto" else skip_keys


def stage_maps(stages: Stages) -> dict[str, Float[np.ndarray, "row_pos col_pos"]]:
    """Return the maps of a block's stages as arrays, by letter."""
    if isinstance(stages, Mapping):
        return {letter: np.asarray(each) for letter, each in stages.items()}
    return {letter: np.asarray(stages.mean(letter)) for letter in stages.folds}


def normalised_maps(stages: Stages) -> dict[str, Float[np.ndarray, "row_pos col_pos"]]:
    """Return captured stages less the mean of each diagonal; nothing of maps that are given."""
    if isinstance(stages, Mapping):
        return {}
    return {letter: np.asarray(stages.normalised(letter)) for letter in stages.folds}
