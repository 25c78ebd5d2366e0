"""The names of components, projections, gains, norms and stages. This file imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
Gain = Literal["output", "norm", "identity"]
Replacement = Literal["identity", "random", "mean", "zero"]
REPLACEMENTS: tuple[Replacement, ...] = get_args(Replacement)
Projection = Literal["w_q", "w_k", "w_o", "w_v"]
WEIGHTS: tuple[Projection, ...] = get_args(Projection)
Component = Literal["mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed", "alibi"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
# What can be removed in some heads only.
PER_HEAD: tuple[Component, ...] = ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "alibi")
# What is removed at a position depends on that one alone: a cache of keys and values holds.
LOCAL = frozenset(("w_q", "w_o", "mlp", "norms"))
# What is removed depends on how long a sequence is, so that padding would change it.
OF_LENGTH = frozenset(("rope_high", "rope_low", "pos_embed"))
CIRCUITS: dict[str, tuple[Component, ...]] = {"qk": ("w_q", "w_k"), "ov": ("w_o", "w_v")}
# The components that break the symmetry between positions.
POSITION_ENCODINGS: tuple[Component, ...] = ("rope", "pos_embed", "alibi")
SOURCES: tuple[Component, ...] = ("mask", *POSITION_ENCODINGS)

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
