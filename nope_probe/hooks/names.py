"""The names of components, projections, gains, norms and stages. This file imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
NORMS: tuple[Norm, ...] = get_args(Norm)
Gain = Literal["output", "norm", "identity"]
GAINS: tuple[Gain, ...] = get_args(Gain)
Projection = Literal["w_q", "w_k", "w_o", "w_v"]
WEIGHTS: tuple[Projection, ...] = get_args(Projection)
Component = Literal["mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
Letter = Literal["a", "b", "c", "d", "e", "f", "g", "h", "i"]
LETTERS: tuple[Letter, ...] = get_args(Letter)
