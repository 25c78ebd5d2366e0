"""Maps: their folds, how they are kept and stored, how they are pooled and centred.

Here are the paper's letters for maps and norms, and how many rows a map has. Needs no torch.
"""

from typing import Literal, get_args

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]  # of the paper's appendix B
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
ALL_ROWS = 2048  # up to this number of positions, maps have the row of every query by default
DEFAULT_ROWS = 512  # above it, maps have this number of rows


def default_rows(n: int) -> int:
    """Return how many rows maps of n positions have by default.

    Example:
        >>> default_rows(2048), default_rows(2049)
        (2048, 512)
    """
    return n if n <= ALL_ROWS else DEFAULT_ROWS
