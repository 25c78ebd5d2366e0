"""Name the shape of an attention mask from the cells that it leaves visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

Kind = Literal["causal", "window", "chunks", "prefix", "bidirectional", "two-sided window", "other"]


@dataclass(frozen=True, kw_only=True)
class MaskShape:
    """Which keys each query attends to.

    Attributes:
        kind: `causal`: all j <= i. `window`: the last `size` of these, i itself included. `chunks`:
            those in its own chunk of `size` positions. `prefix`: the first `size` positions attend
            to each other, later ones are causal. `bidirectional`: all. `two-sided window`: those
            less than `size` away. `other`: none of these.
        size: of a window, chunk or prefix; else None.
        n_positions: how many positions were seen: a longer window or chunk does not show.
    """

    kind: Kind
    size: int | None = None
    n_positions: int

    def __str__(self) -> str:
        return self.kind if self.size is None else f"{self.kind} of {self.size}"


def mask_shape(visible: Bool[Tensor, "query_pos key_pos"]) -> MaskShape:
    """Return the shape of a mask.

    Example:
        >>> str(mask_shape(torch.ones(5, 5, dtype=torch.bool).tril().triu(-2)))
        'window of 3'
    """
    n = len(visible)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    causal, reach = j <= i, int(((i - j) * visible).max()) + 1
    chunk, prefix = _first_row_without_key_0(visible), int(visible[0].sum())
    shapes: list[tuple[Kind, int | None, Tensor]] = [
        ("causal", None, causal),
        ("bidirectional", None, torch.ones_like(causal)),
        ("window", reach, causal & (i - j < reach)),
        ("chunks", chunk, causal & (i // chunk == j // chunk)),
        ("prefix", prefix, causal | (j < prefix)),
        ("two-sided window", reach, (i - j).abs() < reach),
    ]
    for kind, size, cells in shapes:
        if torch.equal(cells, visible):
            return MaskShape(kind=kind, size=size, n_positions=n)
    return MaskShape(kind="other", n_positions=n)


def _first_row_without_key_0(visible: Bool[Tensor, "query_pos key_pos"]) -> int:
    hidden = (~visible[:, 0]).nonzero()
    return int(hidden[0]) if len(hidden) and int(hidden[0]) else len(visible)
