"""The names of components, projections, gains, norms and stages: one home, no torch."""

from __future__ import annotations

from typing import Literal, get_args

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
Gain = Literal["output", "norm", "identity"]
Projection = Literal["w_q", "w_k", "w_o", "w_v"]
Letter = Literal["a", "b", "c", "d", "e", "f", "g", "h", "i"]
LETTERS: tuple[Letter, ...] = get_args(Letter)
Component = Literal["mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
WEIGHTS: tuple[Projection, ...] = ("w_q", "w_k", "w_o", "w_v")
