"""Find where a decoder's positional attention pattern comes from: the mask, RoPE or the weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nope_probe.analyses.attribution import attribute
    from nope_probe.analyses.pattern import measure
    from nope_probe.data.sequences import sequences
    from nope_probe.hooks.ablation import Ablation, ablated
    from nope_probe.hooks.capture import capture_scores, capture_stages
    from nope_probe.models.load import load
    from nope_probe.models.parameter_free import parameter_free

_HOME = {
    "load": "nope_probe.models.load",
    "parameter_free": "nope_probe.models.parameter_free",
    "sequences": "nope_probe.data.sequences",
    "capture_scores": "nope_probe.hooks.capture",
    "capture_stages": "nope_probe.hooks.capture",
    "Ablation": "nope_probe.hooks.ablation",
    "ablated": "nope_probe.hooks.ablation",
    "measure": "nope_probe.analyses.pattern",
    "attribute": "nope_probe.analyses.attribution",
}

__version__ = "0.1.0"
__all__ = [
    "Ablation",
    "ablated",
    "attribute",
    "capture_scores",
    "capture_stages",
    "load",
    "measure",
    "parameter_free",
    "sequences",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: TransformerLens takes seconds to load."""
    if name not in _HOME:
        raise AttributeError(f"nope_probe has no {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
