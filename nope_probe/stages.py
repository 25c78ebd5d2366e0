"""The paper's letters: the stages of its Figure 3, and the norms of its appendix B."""

from __future__ import annotations

from typing import Literal, get_args

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
Letter = Literal["a", "b", "c", "d", "e", "f", "g", "h", "i"]
LETTERS: tuple[Letter, ...] = get_args(Letter)
SCORE_STAGES: tuple[Letter, ...] = ("b", "i")
# The contents of each stage of the paper's Figure 3; primes mark the next layer.
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
