"""What an ablation can remove: a record of each component, and the bands of RoPE.

Nothing here needs torch, so that the command line, figures and pages read the same records as
hooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Component = Literal[
    "mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed", "alibi", "window", "sink"
]
COMPONENTS: tuple[Component, ...] = get_args(Component)
Projection = Literal["w_q", "w_k", "w_o", "w_v"]
NO_REPLACEMENT = "none"  # in tables, where no weight is removed
WEIGHTS: tuple[Projection, ...] = get_args(Projection)
Gain = Literal["output", "norm", "identity"]


CIRCUITS: dict[str, tuple[Component, ...]] = {"qk": ("w_q", "w_k"), "ov": ("w_o", "w_v")}
INK = "#1b1f24"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A component, circuit or term of the pattern, as sentences name it and figures draw it.

    Attributes:
        label: in legends.
        phrase: in sentences; the label if empty.
        short: in unions, interactions and narrow columns; the label if empty.
        colour, marker: of its lines and points.
    """

    label: str
    phrase: str = ""
    short: str = ""
    colour: str = INK
    marker: str = "circle"


@dataclass(frozen=True, kw_only=True)
class Removable(Entry):
    """A component or circuit that an ablation can remove.

    Attributes:
        breaks_symmetry: whether it is a source, which makes positions differ.
        per_head: whether it can be removed in some heads only.
        by_token: whether a removal at a token depends on that token alone, so that a cache of
            keys and values stays right.
        removed: completes "to remove the causal mask, ..." in a methods paragraph; empty for
            weights, which replacements stand for.
    """

    breaks_symmetry: bool = False
    per_head: bool = False
    by_token: bool = False
    removed: str = ""


REMOVABLE: dict[str, Removable] = {
    "mask": Removable(
        label="causal mask",
        phrase="the causal mask",
        short="mask",
        colour="#d55e00",
        marker="square",
        breaks_symmetry=True,
        per_head=True,
        removed="every query attended to all keys",
    ),
    "rope": Removable(
        label="RoPE",
        colour="#0070e3",
        marker="diamond",
        breaks_symmetry=True,
        per_head=True,
        removed="all queries and keys were rotated as at position 0",
    ),
    "pos_embed": Removable(
        label="learned positions",
        phrase="the learned position embeddings",
        colour="#538ff5",
        marker="diamond",
        breaks_symmetry=True,
        removed="they were replaced by their mean over positions",
    ),
    "alibi": Removable(
        label="ALiBi",
        colour="#4a78c8",
        marker="diamond",
        breaks_symmetry=True,
        per_head=True,
        removed="its bias was left out",
    ),
    "window": Removable(
        label="sliding window",
        phrase="the sliding window",
        short="window",
        colour="#908448",
        marker="pentagon",
        breaks_symmetry=True,
        per_head=True,
        removed="every query attended to all earlier keys",
    ),
    "sink": Removable(
        label="attention sink",
        phrase="the attention sinks",
        short="sink",
        colour="#5f6b2d",
        marker="x",
        per_head=True,
        by_token=True,
        removed="they got no attention",
    ),
    "w_q": Removable(
        label="W_Q", colour="#1da2a5", marker="triangle-up", per_head=True, by_token=True
    ),
    "w_k": Removable(label="W_K", colour="#18753a", marker="triangle-down", per_head=True),
    "w_o": Removable(label="W_O", colour="#999847", marker="star", per_head=True, by_token=True),
    "w_v": Removable(label="W_V", colour="#8952a0", marker="hexagon", per_head=True),
    "mlp": Removable(
        label="MLP",
        phrase="the MLPs",
        colour="#8a5969",
        marker="x",
        by_token=True,
        removed="their output was set to 0",
    ),
    "norms": Removable(
        label="norm weights",
        phrase="the norms' weights",
        colour="#6a7a99",
        marker="pentagon",
        by_token=True,
        removed="weights were set to 1 and biases to 0",
    ),
    "qk": Removable(
        label="QK circuit",
        phrase="the query-key circuit (W_Q with W_K)",
        short="QK",
        colour="#3ba763",
        marker="triangle-up",
    ),
    "ov": Removable(
        label="OV circuit",
        phrase="the value-output circuit (W_V with W_O)",
        short="OV",
        colour="#a64b21",
        marker="star",
    ),
}
SOURCES: tuple[Component, ...] = tuple(n for n in COMPONENTS if REMOVABLE[n].breaks_symmetry)
POSITION_ENCODINGS: tuple[Component, ...] = ("rope", "pos_embed", "alibi")
PER_HEAD: tuple[Component, ...] = tuple(n for n in COMPONENTS if REMOVABLE[n].per_head)
LOCAL = frozenset(name for name, entry in REMOVABLE.items() if entry.by_token)
ROPE_HALVES = ("rope_high", "rope_low")
# Padding would change these removals: they depend on a sequence's length.
OF_LENGTH = frozenset((*ROPE_HALVES, "pos_embed"))
BAND = re.compile(r"rope\[([0-9]+):([0-9]+)\]")


def is_rope(name: str) -> bool:
    """Return whether a name stands for RoPE or a band of its pairs.

    `rope` is all pairs; `rope_high` the pairs whose wavelength 2 pi / theta is below the length of
    the sequences, `rope_low` the rest; `rope[a:b]` the pairs a to b - 1, from 0, the fastest first.

    Example:
        >>> is_rope("rope"), is_rope("rope_low"), is_rope("rope[0:4]"), is_rope("mask")
        (True, True, True, False)
    """
    return name in ("rope", *ROPE_HALVES) or BAND.fullmatch(name) is not None


def are_sources(components: Iterable[str]) -> bool:
    """Return whether all components are sources or bands of RoPE.

    Example:
        >>> are_sources(["mask", "rope"]), are_sources(["mask", "w_q"])
        (True, False)
    """
    return all(name in SOURCES or is_rope(name) for name in components)


def equal_bands(n_pairs: int, n_bands: int) -> tuple[str, ...]:
    """Return the names of bands that divide all pairs as equally as possible.

    Raises:
        ValueError: for more bands than pairs, or no band.

    Example:
        >>> equal_bands(8, 3)
        ('rope[0:2]', 'rope[2:5]', 'rope[5:8]')
    """
    if not 1 <= n_bands <= n_pairs:
        raise ValueError(f"expected from 1 to {n_pairs} bands for {n_pairs} pairs, got {n_bands}")
    ends = [n_pairs * band // n_bands for band in range(n_bands + 1)]
    return tuple(f"rope[{a}:{b}]" for a, b in pairwise(ends))
