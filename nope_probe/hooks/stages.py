"""The stages (a) to (i) of the paper's Figure 3 as hook points, in one table.

The paper follows one block from its normed input to the next block's attention scores. A stage is
where a letter is read: which block (this one or the next), which hook point, and whether it holds
vectors, whose Gram map is wanted, or scores, which are a map already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.layer import BridgeLayer, Layer
from nope_probe.hooks.names import Letter


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One letter of Figure 3 (`hooks.names.STAGE_MEANINGS` says what it holds).

    Attributes:
        block: 0 for the block under study, 1 for the one after it.
        hooked, bridge: the hook point's name within the block, per model kind.
        norm: the norm whose learned weight HookedTransformer's hook point leaves out, if any.
        scores: whether the hook point carries scores (a map) and not vectors.
    """

    block: Literal[0, 1] = 0
    hooked: str
    bridge: str
    norm: str | None = None
    scores: bool = False


def _normed_input(block: Literal[0, 1]) -> Stage:
    return Stage(block=block, hooked="ln1.hook_normalized", bridge="attn.hook_in", norm="ln1")


def _scores(block: Literal[0, 1]) -> Stage:
    name = "attn.hook_attn_scores"
    return Stage(block=block, hooked=name, bridge=name, scores=True)


STAGES: dict[Letter, Stage] = {
    "a": _normed_input(0),
    "b": _scores(0),
    "c": Stage(hooked="attn.hook_z", bridge="attn.hook_z"),
    "d": Stage(hooked="hook_attn_out", bridge="hook_attn_out"),
    "e": Stage(hooked="hook_resid_mid", bridge="hook_resid_mid"),
    "f": Stage(hooked="ln2.hook_normalized", bridge="ln2.hook_out", norm="ln2"),
    "g": Stage(hooked="hook_resid_post", bridge="hook_resid_post"),
    "h": _normed_input(1),
    "i": _scores(1),
}


def available(layers: list[Layer], index: int) -> dict[Letter, str]:
    """Say which stages the block `index` has, each with the name of its hook point.

    The last block has (a) to (g); a block without a second norm has no (f); one without
    `hook_resid_mid` (attention only, or attention and MLP in parallel) has no (e) either: in an
    attention-only block it would equal (g).

    Raises:
        IndexError: if the model has no such block.
    """
    if not 0 <= index < len(layers):
        raise IndexError(f"expected a block from 0 to {len(layers) - 1}, got {index}")
    names: dict[Letter, str] = {}
    for letter, stage in STAGES.items():
        if index + stage.block < len(layers):
            layer = layers[index + stage.block]
            name = hook_name(stage, layer)
            if layer.has(name) and not _means_something_else(layer, letter):
                names[letter] = name
    return names


def _means_something_else(layer: Layer, letter: Letter) -> bool:
    # A bridge has the norm of an MLP that is not there.
    attention_only = bool(getattr(layer.cfg, "attn_only", False))
    parallel = bool(getattr(layer.cfg, "parallel_attn_mlp", False))
    post_norm = layer.has("ln1_post.hook_out") or layer.has("ln2_post.hook_out")
    return letter in ("e", "f") and (attention_only or parallel or post_norm)


def hook_name(stage: Stage, layer: Layer) -> str:
    """Name the hook point that carries a stage on this kind of model."""
    return stage.bridge if isinstance(layer, BridgeLayer) else stage.hooked


def vectors(stage: Stage, layer: Layer, seen: Tensor) -> Float[Tensor, "batch pos width"]:
    """Turn what a stage's hook point carries into one vector per position.

    Heads are concatenated, as in the published figure (its caption's mean over heads is this map
    divided by the number of heads); HookedTransformer's learned norm weight is put back.
    """
    if seen.ndim == 4:
        return rearrange(seen, "batch pos head d_head -> batch pos (head d_head)")
    if stage.norm is None or isinstance(layer, BridgeLayer):
        return seen
    norm = getattr(layer.block, stage.norm)
    seen = seen * norm.w if hasattr(norm, "w") else seen
    return seen + norm.b if hasattr(norm, "b") else seen
