"""Find where a decoder's positional attention pattern comes from: the mask, RoPE or the weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nope_probe import figures
    from nope_probe.analyses.attribution import attribute
    from nope_probe.analyses.parameter_free.simulation import simulate_scores
    from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
    from nope_probe.analyses.parameter_free.theory import theory_scores
    from nope_probe.analyses.pattern import measure
    from nope_probe.analyses.shapley import player_set
    from nope_probe.components import Ablation
    from nope_probe.data.sequences import gaussian, sequences
    from nope_probe.experiments.ablation.study import run_ablations
    from nope_probe.experiments.behaviour.run import run_behaviour
    from nope_probe.hooks.ablation import ablated
    from nope_probe.hooks.reading.calibration import calibrate
    from nope_probe.hooks.reading.capture import capture_losses, capture_scores, capture_stages
    from nope_probe.maps.centred import row_centred
    from nope_probe.models.load import load
    from nope_probe.models.parameter_free import build, parameter_free
    from nope_probe.runtime.folder import read_run

_HOME = {
    "load": "nope_probe.models.load",
    "parameter_free": "nope_probe.models.parameter_free",
    "build": "nope_probe.models.parameter_free",
    "sequences": "nope_probe.data.sequences",
    "gaussian": "nope_probe.data.sequences",
    "Ablation": "nope_probe.components",
    "ablated": "nope_probe.hooks.ablation",
    "calibrate": "nope_probe.hooks.reading.calibration",
    "capture_losses": "nope_probe.hooks.reading.capture",
    "capture_scores": "nope_probe.hooks.reading.capture",
    "capture_stages": "nope_probe.hooks.reading.capture",
    "measure": "nope_probe.analyses.pattern",
    "row_centred": "nope_probe.maps.centred",
    "run_behaviour": "nope_probe.experiments.behaviour.run",
    "run_ablations": "nope_probe.experiments.ablation.study",
    "attribute": "nope_probe.analyses.attribution",
    "player_set": "nope_probe.analyses.shapley",
    "simulate_scores": "nope_probe.analyses.parameter_free.simulation",
    "theory_scores": "nope_probe.analyses.parameter_free.theory",
    "ParameterFreeSpec": "nope_probe.analyses.parameter_free.spec",
    "read_run": "nope_probe.runtime.folder",
}

__version__ = "0.2.0"
__all__ = [
    "Ablation",
    "ParameterFreeSpec",
    "ablated",
    "attribute",
    "build",
    "calibrate",
    "capture_losses",
    "capture_scores",
    "capture_stages",
    "figures",
    "gaussian",
    "load",
    "measure",
    "parameter_free",
    "player_set",
    "read_run",
    "row_centred",
    "run_ablations",
    "run_behaviour",
    "sequences",
    "simulate_scores",
    "theory_scores",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: TransformerLens takes seconds to import."""
    if name == "figures":
        return import_module("nope_probe.figures")
    if name not in _HOME:
        raise AttributeError(f"nope_probe has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
