"""The stages (a) to (i) of the paper's Figure 3 as hook points, in one table.

The paper follows one block from its normed input to the next block's attention scores. A stage
says where to read a letter: the block (this or the next), the hook point, and whether the point
carries vectors, whose Gram map is taken, or scores, which are a map already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.components import Letter
from nope_probe.hooks.layers.base_layer import Layer, NormName


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One letter of Figure 3 (`components.STAGE_MEANINGS` says what it holds).

    Attributes:
        block: 0 for the block under study, 1 for the one after it.
        point: the hook point's name within the block; or
        norm: the norm whose output the stage is; the kind of model decides how it is read.
        scores: whether the hook point carries scores (a map) and not vectors.
    """

    block: Literal[0, 1] = 0
    point: str = ""
    norm: NormName | None = None
    scores: bool = False


_SCORES = "attn.hook_attn_scores"
STAGES: dict[Letter, Stage] = {
    "a": Stage(norm="ln1"),
    "b": Stage(point=_SCORES, scores=True),
    "c": Stage(point="attn.hook_z"),
    "d": Stage(point="hook_attn_out"),
    "e": Stage(point="hook_resid_mid"),
    "f": Stage(norm="ln2"),
    "g": Stage(point="hook_resid_post"),
    "h": Stage(norm="ln1", block=1),
    "i": Stage(point=_SCORES, scores=True, block=1),
}


def available(layers: Mapping[int, Layer], index: int) -> dict[Letter, str]:
    """Return the stages that the block `index` has, each with the name of its hook point.

    The last block has (a) to (g). A block without a second norm has no (f). A block without
    `hook_resid_mid` (attention only, or attention and MLP in parallel) has no (e) either: in an
    attention-only block, (e) would equal (g).

    Args:
        layers: the blocks that attend, by number.
        index: a block's number.

    Raises:
        IndexError: if the model has no such block, or the block does not attend.
    """
    if index not in layers:
        if not 0 <= index < max(layers):
            raise IndexError(f"expected a block from 0 to {max(layers)}, got {index}")
        raise IndexError(f"L{index} does not attend; the layers that do are {[*layers]}")
    names: dict[Letter, str] = {}
    for letter, stage in STAGES.items():
        if index + stage.block in layers:
            layer = layers[index + stage.block]
            name = hook_name(stage, layer)
            if layer.has(name) and not (letter in ("e", "f") and _why_no_middle(layer)):
                names[letter] = name
    return names


def absent_stages(layers: Mapping[int, Layer], index: int, n_layers: int) -> dict[Letter, str]:
    """Return the reason for every stage that the block `index`, of n_layers, lacks."""
    has, block = available(layers, index), layers[index]
    is_last = index == n_layers - 1
    why = f"L{index} is the last layer" if is_last else f"L{index + 1} does not attend"
    return {
        letter: why if stage.block else _why_no_middle(block) or "this block has no such stage"
        for letter, stage in STAGES.items()
        if letter not in has
    }


def _why_no_middle(block: Layer) -> str | None:
    """Return the reason why a block has no (e) and (f) as in the paper; None if it may have them.

    A bridge has a norm of an MLP even where it has no MLP.
    """
    if block.attention_only:
        return "no FFN: the block ends with attention, at (g)"
    if block.parallel:
        return "attention and FFN run in parallel"
    return "there are norms after attention and FFN" if block.has_post_norm else None


def hook_name(stage: Stage, layer: Layer) -> str:
    """Return the name of the hook point that carries a stage in this block."""
    return stage.point if stage.norm is None else layer.norm_point(stage.norm)


def vectors(stage: Stage, layer: Layer, tensor: Tensor) -> Float[Tensor, "batch pos width"]:
    """Return one vector per position from the tensor at a stage's hook point.

    Heads are concatenated, as in the published figure (the mean over heads in its caption is this
    map divided by the number of heads). Norms include their learned weight.
    """
    if stage.norm is not None:
        return layer.norm_output(stage.norm, tensor)
    if tensor.ndim == 4:
        return rearrange(tensor, "batch pos head d_head -> batch pos (head d_head)")
    return tensor
