"""The blocks of a HookedTransformer and of a TransformerBridge, read and written in the same way.

What differs between the blocks of the two kinds of model is in `hooked_layer.py` and
`bridge_layer.py`, what differs between whole models in `model.py`; no other file asks which kind a
model is.
"""

from __future__ import annotations

from nope_probe.hooks.base_layer import Layer
from nope_probe.hooks.bridge_layer import BridgeLayer
from nope_probe.hooks.hooked_layer import HookedLayer
from nope_probe.hooks.protocols import HookedModel


def layers_of(model: HookedModel) -> list[Layer]:
    """Return a model's blocks.

    Raises:
        TypeError: for anything else than a HookedTransformer or TransformerBridge.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None or not hasattr(model, "cfg"):
        raise TypeError(
            f"expected a HookedTransformer or TransformerBridge, got {type(model).__name__}"
        )
    kind = BridgeLayer if is_bridge(model) else HookedLayer
    return [kind(block, index, model.cfg) for index, block in enumerate(blocks)]


def is_bridge(model: HookedModel) -> bool:
    """Return whether a model is a TransformerBridge, not a HookedTransformer."""
    return hasattr(model, "original_model")
