"""Which models are ablated now, and how: what a forward pass does depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from nope_probe.hooks.block_ablation import BlockAblation
from nope_probe.hooks.placed import HookGroup
from nope_probe.hooks.protocols import HookedModel, HookPoint

if TYPE_CHECKING:
    from nope_probe.components import Ablation

BlockAblations = Mapping[int, BlockAblation]  # by the block's number


@dataclass(frozen=True, kw_only=True, eq=False)
class ActiveAblation:
    """An ablation that is in effect.

    Attributes:
        ablation: what is removed.
        calibration: the gains and means of its replacements, compared by identity.
        blocks: the removals in each block.
        groups: the hooks that are attached.
    """

    ablation: Ablation
    calibration: Hashable
    blocks: BlockAblations
    groups: Sequence[HookGroup]


ABLATED: WeakKeyDictionary[HookedModel, ActiveAblation] = WeakKeyDictionary()


def block_ablations(model: HookedModel) -> BlockAblations:
    """Return the removals that are in effect in each block; none outside `ablated`."""
    active = ABLATED.get(model)
    return {} if active is None else active.blocks


def removed_before(model: HookedModel, depth: int) -> tuple[Hashable, ...]:
    """Return what identifies the removals before a block; empty where nothing is removed there.

    Two passes over the same tokens enter the block with equal residual streams if this is equal.

    Args:
        model: the model, ablated or not.
        depth: the number of the block.
    """
    active = ABLATED.get(model)
    if active is None:
        return ()
    ablation, removals = active.ablation, []
    for index, each in sorted(active.blocks.items()):
        if index < depth:
            heads = each.removal.heads
            removals.append((index, None if heads is None else tuple(heads)))
    embeds = "pos_embed" in ablation.components
    if not (removals or embeds) or not ablation.components:
        return ()
    names = tuple(sorted(ablation.components))
    how = ablation.replacement, ablation.gain, ablation.seed, ablation.prefix
    return (names, *how, active.calibration, *removals)


def has_foreign_hooks(model: HookedModel, points: Iterable[HookPoint]) -> bool:
    """Return whether hook points have other hooks than those of an ablation in effect."""
    active = ABLATED.get(model)
    groups = () if active is None else active.groups
    ours = Counter(id(placed.point) for group in groups for placed in group.hooks)
    return any(len(point.fwd_hooks) != ours[id(point)] for point in points)
