"""Orders of heads, by a measure of their attention or from a file; and the heads that lose a part.

A head is its layer and its number in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from torch.nn.functional import pad

from nope_probe.analyses.attention import split_attention
from nope_probe.analyses.head_changes import QUANTITIES
from nope_probe.analyses.head_measures import (
    first_key_attention,
    induction_scores,
    previous_token_attention,
)
from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.model import read_attention
from nope_probe.hooks.reading.attention import capture_attention
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.folds import State
from nope_probe.studies.engine import Engine

HeadPlace = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class HeadCondition:
    """What is removed from which heads.

    Attributes:
        removed: rope, content or mask.
        order: the order whose first heads lose it, or next to whose first heads others are drawn.
        k: how many heads.
        draw: the number of the draw; None for the first heads of the order.
        alone: the only head that loses it, whatever the order.
    """

    removed: str
    order: str = ""
    k: int = 1
    draw: int | None = None
    alone: HeadPlace | None = None

    def heads(
        self, ranked: Sequence[HeadPlace], places: Sequence[HeadPlace], seed: int
    ) -> list[HeadPlace]:
        """Return the heads: the first of an order, or as many others of their layers, at random.

        Where a layer has too few others, heads of any layer are drawn.

        Args:
            ranked: the heads in the order.
            places: all heads.
            seed: of the draws.
        """
        if self.alone is not None:
            return [self.alone]
        first = list(ranked[: self.k])
        if self.draw is None:
            return first
        others = [place for place in places if place not in first]
        shuffled = np.random.default_rng([seed, self.draw, self.k]).permutation(len(others))
        left, drawn = [others[at] for at in shuffled], list[HeadPlace]()
        for layer, of_layer in by_layer(first).items():
            drawn += [place for place in left if place[0] == layer][: len(of_layer)]
        spare = [place for place in left if place not in drawn]
        return sorted([*drawn, *spare[: self.k - len(drawn)]])


def by_layer(heads: Iterable[HeadPlace]) -> dict[int, list[int]]:
    """Return heads by layer."""
    places: dict[int, list[int]] = {}
    for layer, head in heads:
        places.setdefault(layer, []).append(head)
    return places


def head_measures(
    engine: Engine, stream: StreamCheckpoint | None, *, layers: Sequence[int]
) -> State:
    """Return by name the measures of the heads of some layers, by which heads are ordered."""
    maps = engine.by_fold(
        capture_attention, stream, layers=layers, skip_keys=engine.skip_keys, keeps_scores=False
    )
    weights = rearrange(maps.mean, "layer head row key -> (layer head) row key")
    to_previous = pad(weights.diagonal(-1, -2, -1), (1, 0))
    splits = split_attention(maps).values()
    parts = {
        name: torch.stack([getattr(split, name).values[0] for split in splits])
        for name in QUANTITIES
    }
    among = parts["others_position"] + parts["others_content"]
    position = parts["first_position"] + parts["others_position"]
    return {
        "positional": position / parts["information"],
        "others": parts["others_position"] / among,
        "information": parts["information"],
        "first_key": first_key_attention(weights[..., 0]).double(),
        "previous_token": previous_token_attention(to_previous).double(),
    }


def induction(
    engine: Engine, stream: StreamCheckpoint | None, *, layers: Sequence[int], n_tokens: int
) -> State:
    """Return the mean induction score of the heads of some layers, on n random tokens twice."""

    def read(layer: Layer, attention: Attention) -> tuple[int, torch.Tensor]:
        return layer.index, induction_scores(attention, n_tokens).mean(0)

    means = dict(read_attention(engine.model, engine.inputs, read))
    return {"induction": torch.cat([means[layer] for layer in layers]).double()}


def is_file(order: str) -> bool:
    """Return whether an order is a file of the user's, and no measure."""
    return order.endswith(".csv")


def name_of(order: str) -> str:
    """Return the name of an order in tables: a file's without its folder and ending."""
    return Path(order).stem if is_file(order) else order


def read_order(path: Path, heads: Sequence[HeadPlace]) -> list[tuple[HeadPlace, float]]:
    """Return the heads of a CSV file in its order, with the value of a third column if it has one.

    Raises:
        UserError: for a file without the columns layer and head, a head that does not exist or is
            named twice, or too few heads.
    """
    with reading(f"cannot read --by {path}"):
        table = pd.read_csv(path)
    if not {"layer", "head"} <= {*table.columns}:
        raise UserError(f"--by {path}: expected the columns layer and head, got {[*table.columns]}")
    ranked = [(int(layer), int(head)) for layer, head in table[["layer", "head"]].to_numpy()]
    unknown = [head for head in ranked if head not in heads]
    if unknown or len({*ranked}) < len(ranked):
        named = f"L{unknown[0][0]}H{unknown[0][1]} is no head" if unknown else "a head comes twice"
        raise UserError(f"--by {path}: {named} of the ordered layers")
    others = [name for name in table if name not in ("layer", "head")]
    numbers = table[others].select_dtypes("number")
    values = numbers.iloc[:, 0] if numbers.shape[1] else pd.Series(np.nan, index=table.index)
    return list(zip(ranked, values.astype(float).tolist(), strict=True))
