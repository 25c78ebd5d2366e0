"""The maps of a block, the circuit figure's views on them, and their colour limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float

from nope_probe.components import LETTERS, SCORE_STAGES, Letter

Of = Literal["shown", "reference", "difference"]
Kind = Literal["raw", "cosines", "less diagonal means"]
Stage = tuple[Letter, Of, Kind]
Scale = tuple[float, float]
RAW: Kind = "raw"
COSINES: Kind = "cosines"
DIAGONAL: Kind = "less diagonal means"
PER_STAGE, ALL_COSINES = "each stage its own", "one for all cosines"
MIDDLE = (5, 95)  # percentiles of the cells off the diagonal, between which colours run


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """What the circuit figure shows of one block.

    Attributes:
        layer: the block's number, from 0.
        maps: per letter its Gram map, or score map in nats for (b) and (i); NaN where masked.
        normalised: the same maps less the mean of each diagonal, as `diagonal_normalised` of
            `analyses.pattern` returns them; empty for a figure without this view.
        absent: per letter that the block lacks, why.
        components: the model's components, such as `mask`, `rope`, `w_q`.
        removed: the components that an ablation removed.
        reference: the intact model's maps, to compare with; empty without an ablation.
    """

    layer: int
    maps: Mapping[str, Float[np.ndarray, "query_pos key_pos"]]
    normalised: Mapping[str, Float[np.ndarray, "query_pos key_pos"]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    components: Sequence[str] = ()
    removed: Sequence[str] = ()
    reference: Mapping[str, Float[np.ndarray, "query_pos key_pos"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted({*self.maps} - {*LETTERS})
        if unknown or not self.maps:
            got = " ".join(unknown) or "none"
            raise ValueError(f"expected maps of the stages a to i, got {got}")


def views(data: Circuit) -> dict[str, tuple[Of, Kind]]:
    """Return the views for which there are maps: of which model, and which kind of map."""
    diagonal = bool(data.normalised)
    if not data.reference:
        kinds = (RAW, COSINES, *([DIAGONAL] if diagonal else []))
        return {kind: ("shown", kind) for kind in kinds}
    offered: dict[str, tuple[Of, Kind]] = {
        "ablated": ("shown", RAW),
        "intact": ("reference", RAW),
        "difference": ("difference", RAW),
        "ablated cosines": ("shown", COSINES),
        "intact cosines": ("reference", COSINES),
        "difference of cosines": ("difference", COSINES),
    }
    return offered | ({f"ablated {DIAGONAL}": ("shown", DIAGONAL)} if diagonal else {})


def stages_in(view: tuple[Of, Kind], data: Circuit) -> list[Stage]:
    """Return the maps that a view shows.

    Scores are not inner products of one stage's vectors: they have no cosines, and a view of
    cosines shows them as they are.
    """
    of, kind = view
    return [
        (letter, of, RAW if kind == COSINES and letter in SCORE_STAGES else kind)
        for letter in LETTERS
        if letter in data.maps
    ]


def cells(data: Circuit, stage: Stage) -> Float[np.ndarray, "query_pos key_pos"]:
    """Return the values of a map."""
    letter, of, kind = stage
    if kind == DIAGONAL:
        return np.asarray(data.normalised[letter])
    shown, reference = (
        cosines(np.asarray(maps[letter])) if kind == COSINES else np.asarray(maps[letter])
        for maps in (data.maps, data.reference or data.maps)
    )
    return {"shown": shown, "reference": reference, "difference": shown - reference}[of]


def cosines(
    gram: Float[np.ndarray, "row_pos col_pos"],
) -> Float[np.ndarray, "row_pos col_pos"]:
    """Return mean inner products over the root mean square lengths of both positions' vectors.

    Example:
        >>> cosines(np.array([[4.0, 3.0], [3.0, 9.0]]))[1].tolist()
        [0.5, 1.0]
    """
    lengths = np.sqrt(np.diagonal(gram).clip(min=0))
    known = np.where(lengths > 0, lengths, np.nan)
    return gram / known[:, None] / known


def is_signed(stage: Stage) -> bool:
    """Return whether a map's colours centre on zero."""
    return stage[1] == "difference" or stage[2] != RAW


def limits(values: Sequence[np.ndarray], signed: bool) -> Scale:
    """Return colour limits of maps on one scale: the middle 90% of their cells off the diagonal.

    Args:
        values: the maps.
        signed: whether colours centre on zero.
    """
    found = [_limits(each, signed) for each in values]
    return min(low for low, _ in found), max(high for _, high in found)


def _limits(values: np.ndarray, signed: bool) -> Scale:
    off = values[np.isfinite(values) & ~np.eye(len(values), dtype=bool)]
    off = off if off.size else values[np.isfinite(values)]
    if not off.size:
        return 0.0, 1.0
    if signed:
        top = float(np.percentile(np.abs(off), MIDDLE[1])) or 1.0
        return -top, top
    low, high = np.percentile(off, MIDDLE)
    return float(low), float(high)


def scales_of(shown: Mapping[Stage, np.ndarray]) -> dict[str, dict[Stage, Scale]]:
    """Return the colour limits of all maps, by the name of the switch's choice.

    A stage of the ablated model has the colours of the intact one. Inner products never share a
    scale among stages, whose vectors differ in length by an order of magnitude; cosines can.
    """
    own = {}
    for letter, of, kind in shown:
        alike: tuple[Of, ...] = ("difference",) if of == "difference" else ("shown", "reference")
        maps = [shown[letter, each, kind] for each in alike if (letter, each, kind) in shown]
        own[letter, of, kind] = limits(maps, is_signed((letter, of, kind)))
    changes = [
        high for (_, of, kind), (_, high) in own.items() if (of, kind) == ("difference", COSINES)
    ]
    tops: dict[Of, float] = {"shown": 1.0, "reference": 1.0, "difference": max(changes, default=1)}
    shared = {
        stage: (-tops[stage[1]], tops[stage[1]]) if stage[2] == COSINES else scale
        for stage, scale in own.items()
    }
    return {PER_STAGE: own, ALL_COSINES: shared}
