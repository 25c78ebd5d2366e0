"""Scores rebuilt from queries and keys, without mask, W_K, ALiBi or the RoPE of some heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.hooks.layers.attached_hooks import PlacedHook, last
from nope_probe.hooks.layers.attention import (
    relative_error,
    repeat_heads,
    score_tolerance,
    unmasked,
)
from nope_probe.hooks.layers.base_layer import Heads, Layer
from nope_probe.hooks.layers.qk_reader import QKReader
from nope_probe.hooks.removing.block_removal import BlockRemoval


class ScoreBuilder:
    """Rebuilds one block's scores in each forward pass.

    Args:
        layer: the block.
        removal: what is removed from it.
    """

    def __init__(self, layer: Layer, removal: BlockRemoval) -> None:
        self.layer, self.removal = layer, removal
        self.reader = QKReader(layer)

    def hooks(self) -> Iterator[PlacedHook]:
        """Return the hooks that read what scores are rebuilt from."""
        for point, hook in self.reader.hooks():
            yield last(point, hook)

    def write(
        self,
        scores: Float[Tensor, "batch head query_pos key_pos"],
        new_keys: Heads | None,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """Return what replaces the model's scores.

        Args:
            scores: the model's own.
            new_keys: the output of the replacement of W_K, if that is removed.

        Raises:
            ValueError: if the model's own scores are not q.k times the scale.
        """
        removal = self.removal
        self.check(scores)
        seen = unmasked(scores[:, 0])  # one head shows the mask of all
        keys = self.keys(new_keys, real_positions(seen))
        rebuilt = self.layer.scores(self._queries(), keys).to(scores.dtype)
        bias = None if "alibi" in removal.components else self.layer.score_bias(scores.shape[-1])
        if bias is not None:
            rebuilt = rebuilt + bias.to(scores)
        visible = self.visible(seen)[:, None]
        if not visible.all():
            rebuilt = torch.where(visible, rebuilt, scores)
        return removal.in_heads(rebuilt, scores, dim=1)

    def check(self, scores: Float[Tensor, "batch head query_pos key_pos"]) -> None:
        """Check on the first sequence that q.k times the scale gives the model's own scores.

        Raises:
            ValueError: naming the layer and the largest difference.
        """
        first = scores[:1]
        q, k = self.reader.read("q")[:1], self.reader.read("k")[:1]
        rebuilt = self.layer.scores(q, k)
        bias = self.layer.score_bias(scores.shape[-1])
        if bias is not None:
            rebuilt = rebuilt + bias.to(scores)
        visible = unmasked(first[0, 0])
        expected = first[..., visible].float()
        difference = rebuilt[..., visible].float() - expected
        error = relative_error(expected + difference, expected)
        if not error <= score_tolerance(scores.dtype):
            raise ValueError(
                f"the scores of L{self.layer.index} are not q.k times the scale (the largest "
                f"difference is {float(difference.abs().max()):.3g} nats), so that they cannot be "
                f"rebuilt without {' and '.join(sorted(self.removal.components))}"
            )

    def visible(
        self, visible: Bool[Tensor, "*batch query_pos key_pos"]
    ) -> Bool[Tensor, "*batch query_pos key_pos"]:
        """Return which keys each query is to attend to: never to padding.

        Args:
            visible: which ones it attends to in the intact model.
        """
        if "mask" not in self.removal.components:
            return visible
        if self.removal.prefix is not None:
            return with_prefix(visible, self.removal.prefix)
        return real_positions(visible)[..., None, :].expand_as(visible)

    def _queries(self) -> Heads:
        q = self.reader.read("q")
        return self._without_rope(self.reader.unrotated("q"), q) if self._undoes_rope else q

    def keys(self, new_keys: Heads | None, real: Bool[Tensor, "batch pos"] | None = None) -> Heads:
        """Return the keys of each query head, as they are multiplied.

        Args:
            new_keys: the output of the replacement of W_K, if that is removed.
            real: which positions are not padding; None for all.
        """
        if new_keys is not None:
            keys = self.layer.qk_norm(new_keys, "k")
            return self._without_rope(keys, self.reader.rotate(keys, real))
        keys = self.reader.read("k")
        if self._undoes_rope:
            keys = self._without_rope(self.reader.unrotated("k"), keys)
        return repeat_heads(keys, self.layer.n_heads)

    @property
    def _undoes_rope(self) -> bool:
        """Whether RoPE is removed here: where all heads lose it, q and k come without."""
        return self.removal.rope is not None and self.removal.heads is not None

    def _without_rope(self, unrotated: Heads, turned: Heads) -> Heads:
        rope = self.removal.rope
        return turned if rope is None else self.layer.with_unrotated(unrotated, turned, rope)


def real_positions(
    visible: Bool[Tensor, "*batch query_pos key_pos"],
) -> Bool[Tensor, "*batch key_pos"]:
    """Return which positions are not padding: a mask hides padding even from itself."""
    return visible.diagonal(dim1=-2, dim2=-1)


def with_prefix(
    visible: Bool[Tensor, "*batch query_pos key_pos"], prefix: int
) -> Bool[Tensor, "*batch query_pos key_pos"]:
    """Return a mask whose first positions, counted without padding, attend to one another.

    Args:
        visible: which keys each query attends to.
        prefix: how many first positions.

    Raises:
        ValueError: if a sequence is shorter than the prefix.
    """
    real = real_positions(visible)
    n = int(real.sum(-1).min())
    if prefix > n:
        raise ValueError(f"a prefix of {prefix} positions, but the sequences have {n}")
    inside = real & (real.cumsum(-1) <= prefix)
    return visible | (inside[..., :, None] & inside[..., None, :])
