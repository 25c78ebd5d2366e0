"""Replacements of removed weights: a record of each.

A record says how its replacement is made, what it needs, and how pages name it. A new replacement
is a record with its function here, and its name in `Replacement`. Nothing here needs torch, so that
commands read their options, and pages their words, from the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from nope_probe.hooks.removing.replacements import GivenReplacement, Place, ReplacedWeight
else:
    GivenReplacement = object  # so that types which name it resolve without torch

Replacement = Literal["identity", "random", "mean", "zero"]
REPLACEMENTS: tuple[Replacement, ...] = get_args(Replacement)


@dataclass(frozen=True, kw_only=True, eq=False)
class StandIn:
    """A replacement of removed weights: how it is made, and what it needs.

    Attributes:
        make: makes the replacement of one weight, at its place in the model.
        gain: whether it has a size, which `calibrate` measures for the gain `output`.
        seed: whether it is drawn from a seed.
        mean: whether it keeps the measured mean of the weight's output.
    """

    make: Callable[[Place], ReplacedWeight]
    gain: bool = False
    seed: bool = False
    mean: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedStandIn(StandIn):
    """A replacement that commands know by name, and its words.

    Attributes:
        note: says in a note to a page what it is.
        column: heads a column of what is lost with it.
    """

    note: str
    column: str


STAND_INS: dict[Replacement, NamedStandIn] = {
    "identity": NamedStandIn(
        make=lambda place: place.identity(),
        gain=True,
        note="an identity as strong as the weight, so that coordinates pass on as they are",
        column="identity",
    ),
    "random": NamedStandIn(
        make=lambda place: place.matrix(place.random_rows()),
        gain=True,
        seed=True,
        note="a random projection as strong as the weight, which learned nothing",
        column="random",
    ),
    "mean": NamedStandIn(
        make=lambda place: place.constant(place.mean_output()),
        mean=True,
        note="the mean of its output, whatever it reads",
        column="mean kept",
    ),
    "zero": NamedStandIn(
        make=lambda place: place.constant(),
        note="zero",
        column="zero",
    ),
}
WITH_GAIN = tuple(name for name in REPLACEMENTS if STAND_INS[name].gain)
CONSTANT_OUTPUTS = tuple(name for name in REPLACEMENTS if not STAND_INS[name].gain)


def stand_in_of(replacement: Replacement | GivenReplacement) -> StandIn:
    """Return the record of a replacement by name, or one that uses a given weight."""
    if isinstance(replacement, str):
        return STAND_INS[replacement]
    return StandIn(make=lambda place: place.given(replacement))
