"""What an ablation can remove: every component's name, kind, words, colour and marker.

Nothing here needs torch, so that the command line, figures and pages read the same table as hooks.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Component = Literal["mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed", "alibi"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
Projection = Literal["w_q", "w_k", "w_o", "w_v"]
WEIGHTS: tuple[Projection, ...] = get_args(Projection)
Replacement = Literal["identity", "random", "mean", "zero"]
REPLACEMENTS: tuple[Replacement, ...] = get_args(Replacement)
Gain = Literal["output", "norm", "identity"]
GAINS: tuple[Gain, ...] = get_args(Gain)
CIRCUITS: dict[str, tuple[Component, ...]] = {"qk": ("w_q", "w_k"), "ov": ("w_o", "w_v")}
INK = "#1b1f24"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A component, circuit or term of the pattern, as tables, sentences and figures name it.

    Attributes:
        label: in legends.
        phrase: in sentences; the label if empty.
        short: in unions and interactions; the label if empty.
        colour, marker: of its lines and points.
        breaks_symmetry: whether it is a source: it makes positions differ.
        per_head: whether it can be removed in some heads only.
        downstream: whether a layer's own scores do not depend on it, only those of layers after.
    """

    label: str
    phrase: str = ""
    short: str = ""
    colour: str = INK
    marker: str = "circle"
    breaks_symmetry: bool = False
    per_head: bool = False
    downstream: bool = False


TABLE: dict[str, Entry] = {
    "all": Entry(label="whole pattern"),
    "position": Entry(label="positional part", phrase="the mask and position encoding"),
    "base": Entry(label="without the players", phrase="what no player brings"),
    "content": Entry(label="content", phrase="the content of the text", colour="#7a7a7a"),
    "mask": Entry(
        label="causal mask",
        phrase="the causal mask",
        short="mask",
        colour="#d55e00",
        marker="square",
        breaks_symmetry=True,
        per_head=True,
        downstream=True,
    ),
    "rope": Entry(
        label="RoPE", colour="#0070e3", marker="diamond", breaks_symmetry=True, per_head=True
    ),
    "pos_embed": Entry(
        label="learned positions",
        phrase="the learned position embeddings",
        short="positions",
        colour="#538ff5",
        marker="diamond",
        breaks_symmetry=True,
    ),
    "alibi": Entry(
        label="ALiBi", colour="#4a78c8", marker="diamond", breaks_symmetry=True, per_head=True
    ),
    "mask_x_rope": Entry(label="mask × RoPE", phrase="mask and RoPE together"),
    "mask_x_alibi": Entry(label="mask × ALiBi", phrase="mask and ALiBi together"),
    "mask_x_pos_embed": Entry(
        label="mask × learned positions", phrase="mask and position embeddings together"
    ),
    "interaction": Entry(label="interaction", colour="#ab3e98", marker="cross"),
    "w_q": Entry(label="W_Q", colour="#1da2a5", marker="triangle-up", per_head=True),
    "w_k": Entry(label="W_K", colour="#18753a", marker="triangle-down", per_head=True),
    "w_o": Entry(label="W_O", colour="#999847", marker="star", per_head=True, downstream=True),
    "w_v": Entry(label="W_V", colour="#8952a0", marker="hexagon", per_head=True, downstream=True),
    "mlp": Entry(label="MLP", phrase="the MLPs", colour="#8a5969", marker="x", downstream=True),
    "norms": Entry(
        label="norm weights", phrase="the norms' weights", colour="#6a7a99", marker="pentagon"
    ),
    "qk": Entry(
        label="QK circuit",
        phrase="the query-key circuit (W_Q with W_K)",
        short="QK",
        colour="#3ba763",
        marker="triangle-up",
    ),
    "ov": Entry(
        label="OV circuit",
        phrase="the value-output circuit (W_V with W_O)",
        short="OV",
        colour="#a64b21",
        marker="star",
    ),
    "mean_term": Entry(
        label="mean term", phrase="the mean term", colour="#535dba", marker="square"
    ),
    "covariance_term": Entry(
        label="covariance term", phrase="the covariance term", colour="#8d6620"
    ),
    "intact": Entry(label="intact model", phrase="the intact model"),
}
SOURCES: tuple[Component, ...] = tuple(n for n in COMPONENTS if TABLE[n].breaks_symmetry)
POSITION_ENCODINGS: tuple[Component, ...] = tuple(n for n in SOURCES if n != "mask")
PER_HEAD: tuple[Component, ...] = tuple(n for n in COMPONENTS if TABLE[n].per_head)
DOWNSTREAM: frozenset[str] = frozenset(n for n in COMPONENTS if TABLE[n].downstream)
# What --players and --remove take, as their help says it.
KNOWN = f"{' '.join(COMPONENTS)}, the circuits {' '.join(CIRCUITS)}"
ROPE_HALVES = ("rope_high", "rope_low")
BAND = re.compile(r"rope\[(\d+):(\d+)\]")

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
NORMS: tuple[Norm, ...] = get_args(Norm)
Letter = Literal["a", "b", "c", "d", "e", "f", "g", "h", "i"]
LETTERS: tuple[Letter, ...] = get_args(Letter)
SCORE_STAGES: tuple[Letter, ...] = ("b", "i")
# What each stage of the paper's Figure 3 holds; primes mark the next layer.
STAGE_MEANINGS: dict[Letter, str] = {
    "a": "Y = LN(X)",
    "b": "QKᵀ/√d",
    "c": "AV",
    "d": "AVW_O",
    "e": "O = AVW_O + X",
    "f": "LN(O)",
    "g": "X′ = FFN(LN(O)) + O",
    "h": "Y′ = LN(X′)",
    "i": "Q′K′ᵀ/√d",
}


def words(name: str) -> str:
    """Return the label of a component, term or player; of a union, its parts in short.

    Example:
        >>> words("mask"), words("mask+w_q")
        ('causal mask', 'mask + W_Q')
    """
    if "+" not in name:
        return TABLE[name].label if name in TABLE else name
    return " + ".join(
        (TABLE[part].short if part in TABLE else "") or words(part) for part in name.split("+")
    )


def phrase(name: str) -> str:
    """Return a component, term or player as a sentence names it.

    Example:
        >>> phrase("mask"), phrase("w_q+mlp")
        ('the causal mask', 'W_Q + MLP')
    """
    return (TABLE[name].phrase if name in TABLE else "") or words(name)


def colour(name: str) -> str:
    """Return a component's colour, the same in every figure; unions and interactions share one."""
    return _drawn_as(name).colour


def symbol(name: str) -> str:
    """Return a component's marker, so that colour is never the only sign."""
    return _drawn_as(name).marker


def _drawn_as(name: str) -> Entry:
    if "_x_" in name or "+" in name:
        return TABLE["interaction"]
    return TABLE.get(name, Entry(label=name))


def removal_order(name: str) -> tuple[int, str]:
    """Return the sort key of components and of bands of RoPE, which come where RoPE does."""
    component = "rope" if name.startswith("rope") else name
    return [*COMPONENTS].index(component), name  # type: ignore[arg-type]


def kept_name(kept: Collection[str]) -> str:
    """Return the name of a condition: the components that it keeps, in order, or `none`.

    Example:
        >>> kept_name({"w_q", "mask"}), kept_name(())
        ('mask+w_q', 'none')
    """
    return "+".join(sorted(kept, key=removal_order)) or "none"


def is_rope(name: str) -> bool:
    """Return whether a name stands for RoPE or a band of its pairs.

    `rope` is all pairs; `rope_high` the pairs whose wavelength 2 pi / theta is below the length of
    the sequences, `rope_low` the rest; `rope[a:b]` the pairs a to b - 1, from 0, the fastest first.

    Example:
        >>> is_rope("rope"), is_rope("rope_low"), is_rope("rope[0:4]"), is_rope("mask")
        (True, True, True, False)
    """
    return name in ("rope", *ROPE_HALVES) or BAND.fullmatch(name) is not None


def equal_bands(n_pairs: int, n_bands: int) -> tuple[str, ...]:
    """Return the names of bands that divide all pairs as equally as possible.

    Raises:
        ValueError: for more bands than pairs, or none.

    Example:
        >>> equal_bands(8, 3)
        ('rope[0:2]', 'rope[2:5]', 'rope[5:8]')
    """
    if not 1 <= n_bands <= n_pairs:
        raise ValueError(f"expected from 1 to {n_pairs} bands for {n_pairs} pairs, got {n_bands}")
    ends = [n_pairs * band // n_bands for band in range(n_bands + 1)]
    return tuple(f"rope[{a}:{b}]" for a, b in pairwise(ends))
