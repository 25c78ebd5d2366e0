"""BlockRemoval: what is removed from one block, all names resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from nope_probe.components import Projection
from nope_probe.hooks.replacements import ReplacedWeight
from nope_probe.hooks.rope_bands import RemovedPairs


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockRemoval:
    """What is removed from one block.

    Attributes:
        components: components, and `norms`.
        replaced: the replacement of each weight that is removed.
        rope: the rotary pairs that are removed, if any are.
        heads: the query heads that lose the components; None for all.
        prefix: how many first positions lose the mask among themselves; None for all positions.
    """

    components: frozenset[str]
    replaced: Mapping[Projection, ReplacedWeight] = field(default_factory=dict)
    rope: RemovedPairs | None = None
    heads: list[int] | None = None
    prefix: int | None = None

    @property
    def rebuilds_scores(self) -> bool:
        """Whether the block's scores are rebuilt from queries and keys."""
        per_head_rope = self.rope is not None and self.heads is not None
        return per_head_rope or bool(self.components & {"mask", "w_k", "alibi"})

    def in_heads(
        self, new: Float[Tensor, "*shape"], old: Float[Tensor, "*shape"], dim: int
    ) -> Float[Tensor, "*shape"]:
        """Return the new tensor in the heads that lose the components, and the old in the rest."""
        if self.heads is None:
            return new
        mixed = old.clone()
        mixed.movedim(dim, 0)[self.heads] = new.movedim(dim, 0)[self.heads].to(old.dtype)
        return mixed
