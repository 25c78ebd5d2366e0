"""The removals in one block: what has to be read of a forward pass, and what is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.hooks.attention import repeat_heads, unmasked
from nope_probe.hooks.base_layer import Keys, Layer, Values, Visible
from nope_probe.hooks.names import Component, Projection
from nope_probe.hooks.protocols import Attachment, HookPoint
from nope_probe.hooks.qk_reader import QKReader
from nope_probe.hooks.replacements import ReplacedWeight


class BlockAblation:
    """Removes components from one block, for as long as its hooks are attached.

    Args:
        layer: the block.
        remove: the components.
        replaced: the replacement of each weight that is removed.
        prefix: how many first positions lose the mask among themselves; None for all positions.
    """

    def __init__(
        self,
        layer: Layer,
        remove: Collection[Component],
        replaced: Mapping[Projection, ReplacedWeight],
        prefix: int | None = None,
    ) -> None:
        self.layer, self.remove, self.replaced = layer, set(remove), replaced
        self.prefix = prefix
        self.reader = QKReader(layer)
        self.read: dict[str, Tensor] = {}

    def hooks(self) -> Iterator[Attachment]:
        """Return the hooks in the order in which they have to be attached."""
        point, remove = self.layer.point, self.remove
        if remove & {"w_q", "w_k", "w_v"}:
            yield point(self.layer.norm_point("ln1")), self.read_input
        if "w_q" in remove:
            yield point("attn.hook_q"), self.write_q
        if "rope" in remove:
            yield from self.layer.hooks_without_rope()
        if remove & {"mask", "w_k"}:
            yield from self.reader.hooks()
            yield point("attn.hook_attn_scores"), self.write_scores
        if "w_v" in remove:
            yield point("attn.hook_pattern"), self.read_pattern
            yield point("attn.hook_z"), self.write_z
        if "w_o" in remove:
            yield point("attn.hook_z"), self.read_z
            yield point(self.layer.attn_out_point), self.write_attn_out
        if "mlp" in remove:
            yield point("hook_mlp_out"), zeros
        yield point("hook_resid_post"), self.reset

    def read_input(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read["y"] = self.layer.norm_output("ln1", tensor)

    def read_pattern(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read["pattern"] = tensor

    def read_z(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read["z"] = tensor

    def write_q(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_Q; the model then norms and rotates it."""
        return self._replaced("w_q").to(tensor.dtype)

    def write_scores(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Rebuild the scores from q and k, with the model's own mask unless that is removed."""
        scores = self.layer.scores(self.reader.read("q"), self._keys()).to(tensor.dtype)
        if "mask" in self.remove and self.prefix is None:
            return scores
        # One sequence and head shows the mask of all: lengths are equal, without padding.
        visible = unmasked(tensor[0, 0])
        if self.prefix is not None:
            visible = with_prefix(visible, self.prefix)
        return torch.where(visible, scores, tensor)

    def edit_product(
        self, k: Keys, v: Values, visible: Visible
    ) -> tuple[
        Float[Tensor, "batch pos new_kv_head d_head"],
        Float[Tensor, "batch pos new_value_head d_head"],
        Visible,
    ]:
        """Write the removals to what fused attention is computed from, and has no hook points for.

        Args:
            k: keys, normed and rotated.
            v: values.
            visible: which keys each query attends to.
        """
        if "w_k" in self.remove:
            k = self._keys().to(k.dtype)
        if "w_v" in self.remove:
            v = self._replaced("w_v").to(v.dtype)
        return k, v, self._visible(visible) if "mask" in self.remove else visible

    def _visible(self, visible: Visible) -> Visible:
        """Return the mask without what is removed of it."""
        if self.prefix is None:
            return torch.ones_like(visible)
        return with_prefix(visible, self.prefix)

    def write_z(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_V, weighted by attention; fused attention has done so already."""
        if "pattern" not in self.read:
            return tensor
        pattern = self.read.pop("pattern")  # the largest tensor of a block: not kept for the next
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, self._replaced("w_v").to(pattern.dtype))
        return z.to(tensor.dtype)

    def write_attn_out(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_O."""
        heads = range(self.layer.n_heads)
        return self.replaced["w_o"].summed(self.read["z"], heads).to(tensor.dtype)

    def reset(self, tensor: Tensor, hook: HookPoint) -> None:
        """Drop what was read of a pass: the queries and keys of all blocks are gigabytes."""
        self.read.clear()
        self.reader.reset()

    def _keys(self) -> Float[Tensor, "batch pos head d_head"]:
        if "w_k" not in self.remove:
            return repeat_heads(self.reader.read("k"), self.layer.n_heads)
        keys = self.layer.qk_norm(self._replaced("w_k"), "k")
        return keys if "rope" in self.remove else self.reader.rotate(keys)

    def _replaced(self, name: Projection) -> Float[Tensor, "batch pos head d_head"]:
        """Return the output of the replacement of W_Q, W_K or W_V."""
        return self.replaced[name].outputs(self.read["y"])


def with_prefix(
    visible: Bool[Tensor, "query_pos key_pos"], prefix: int
) -> Bool[Tensor, "query_pos key_pos"]:
    """Return a mask whose first positions attend to one another both ways.

    Args:
        visible: which keys each query attends to.
        prefix: how many first positions.

    Raises:
        ValueError: if the sequences are shorter than the prefix.
    """
    n = visible.shape[-1]
    if prefix > n:
        raise ValueError(f"a prefix of {prefix} positions, but the sequences have {n}")
    visible = visible.clone()
    visible[:prefix, :prefix] = True
    return visible


def zeros(tensor: Tensor, hook: HookPoint) -> Tensor:
    """Replace a tensor by zeros."""
    return torch.zeros_like(tensor)


def mean_over_positions(
    tensor: Float[Tensor, "batch pos d_model"], hook: HookPoint
) -> Float[Tensor, "batch pos d_model"]:
    """Replace each position's vector by the mean over positions."""
    return tensor.mean(-2, keepdim=True).expand_as(tensor).clone()
