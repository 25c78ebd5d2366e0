"""The paper's letters: the stages of its Figure 3, and the variants of its theory. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args, get_type_hints

from nope_probe.errors import UserError, validate_types

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
Letter = Literal["a", "b", "c", "d", "e", "f", "g", "h", "i"]
LETTERS: tuple[Letter, ...] = get_args(Letter)
SCORE_STAGES: tuple[Letter, ...] = ("b", "i")


class StageWords(NamedTuple):
    """What figures and tables say of a stage of the paper's Figure 3.

    Attributes:
        arrow: the operations that lead to it, by words; some are components that can be removed.
        name: what it is.
        formula: its contents; primes mark the next layer.
    """

    arrow: str
    name: str
    formula: str


STAGE_WORDS: dict[Letter, StageWords] = {
    "a": StageWords("X LN weights", "the block's input", "Y = LN(X)"),
    "b": StageWords("W_Q W_K RoPE", "scores", "QKᵀ/√d"),
    "c": StageWords("mask softmax W_V", "attention's output", "AV"),
    "d": StageWords("W_O", "after W_O", "AVW_O"),
    "e": StageWords("+ X", "added to X", "O = AVW_O + X"),
    "f": StageWords("LN weights", "the MLP's input", "LN(O)"),
    "g": StageWords("FFN + O", "the block's output", "X′ = FFN(LN(O)) + O"),
    "h": StageWords("next LN weights", "the next block's input", "Y′ = LN(X′)"),
    "i": StageWords("W_Q W_K RoPE", "its scores", "Q′K′ᵀ/√d"),
}


@dataclass(frozen=True, kw_only=True)
class ParameterFreeSpec:
    """A variant of the parameter-free transformer.

    Attributes:
        d_model: the dimension; None for its limit, infinity (L2 norm without RoPE only).
        norm: `l2` (eq. 1) or LayerNorm with scores over sqrt(d) or d (appendix B).
        rope: whether queries and keys are rotated (base 10000).
        causal: whether keys j > i are masked; False is the encoder of Figure 10.

    Raises:
        UserError: for an unknown norm, or a dimension that the norm or RoPE does not allow.

    Example:
        >>> import torch
        >>> from nope_probe import ParameterFreeSpec, theory_scores
        >>> spec = ParameterFreeSpec(d_model=64, rope=True)
        >>> theory_scores(torch.tensor([0.2]), 11, 3, spec).shape
        torch.Size([1, 3, 11, 11])
    """

    d_model: int | None = None
    norm: Norm = "l2"
    rope: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        validate_types(get_type_hints(type(self)), vars(self))
        if self.d_model is None and (self.norm != "l2" or self.rope):
            raise UserError("RoPE and LayerNorm depend on the dimension: give d_model")
        if self.rope and self.dimension % 2:
            raise UserError(f"RoPE rotates pairs of coordinates: d_model {self.d_model} is odd")
        if self.dimension < 1 + self.centred:
            raise UserError(f"{self.norm} needs more dimensions than {self.d_model}")

    @property
    def dimension(self) -> int:
        """The dimension; 2 for infinity, where the dimension has no effect."""
        return 2 if self.d_model is None else self.d_model

    @property
    def centred(self) -> bool:
        """Whether vectors are centred first (LayerNorm), which leaves them d - 1 dimensions."""
        return self.norm != "l2"

    @property
    def value_scale(self) -> float:
        """The length of a normed vector: 1, or sqrt(d) for LayerNorm."""
        return self.dimension**0.5 if self.centred else 1.0

    @property
    def score_scale(self) -> float:
        """The factor between a cosine and a score, in nats: the largest possible score."""
        return self.dimension**0.5 if self.norm == "layernorm-sqrt-d" else 1.0

    @property
    def start_scale(self) -> float:
        """The expected squared length of a centred unit vector."""
        return (self.dimension - 1) / self.dimension if self.centred else 1.0

    @property
    def resolution(self) -> float:
        """The smallest difference of scores that float32 resolves, nats."""
        return 2.0**-23 * self.score_scale
