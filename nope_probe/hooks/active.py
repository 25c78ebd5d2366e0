"""Which models are ablated now, and how: fused attention has no scores for hooks to write."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from nope_probe.hooks.block_ablation import BlockAblation
from nope_probe.hooks.protocols import HookedModel

BlockAblations = Mapping[int, BlockAblation]  # by the block's number
ABLATED: WeakKeyDictionary[HookedModel, BlockAblations] = WeakKeyDictionary()


def block_ablations(model: HookedModel) -> BlockAblations:
    """Return the removals that are in effect in each block; none outside `ablated`."""
    return ABLATED.get(model, {})
