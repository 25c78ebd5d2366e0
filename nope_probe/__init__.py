"""Find where a decoder's positional attention pattern comes from: the mask, RoPE or the weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nope_probe import figures as figures
    from nope_probe.analyses.attention import AttentionSplit as AttentionSplit
    from nope_probe.analyses.attention import split_attention as split_attention
    from nope_probe.analyses.attribution import LayerValues as LayerValues
    from nope_probe.analyses.attribution import Values as Values
    from nope_probe.analyses.attribution import attribute as attribute
    from nope_probe.analyses.attribution import attribute_heads as attribute_heads
    from nope_probe.analyses.parameter_free.simulation import Simulation as Simulation
    from nope_probe.analyses.parameter_free.simulation import simulate_scores as simulate_scores
    from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec as ParameterFreeSpec
    from nope_probe.analyses.parameter_free.theory import theory_scores as theory_scores
    from nope_probe.analyses.pattern import Measures as Measures
    from nope_probe.analyses.pattern import measure as measure
    from nope_probe.analyses.pattern import measure_heads as measure_heads
    from nope_probe.data.sequences import Sequences as Sequences
    from nope_probe.data.sequences import gaussian as gaussian
    from nope_probe.data.sequences import sequences as sequences
    from nope_probe.figures.attention import Why as Why
    from nope_probe.figures.text_view import TextView as TextView
    from nope_probe.hooks.ablation import ablated as ablated
    from nope_probe.hooks.reading.attention import capture_attention as capture_attention
    from nope_probe.hooks.reading.calibration import calibrate as calibrate
    from nope_probe.hooks.reading.capture import capture_losses as capture_losses
    from nope_probe.hooks.reading.capture import capture_scores as capture_scores
    from nope_probe.hooks.reading.capture import capture_stages as capture_stages
    from nope_probe.hooks.removing.edited_weights import untrained as untrained
    from nope_probe.hooks.removing.removals import Ablation as Ablation
    from nope_probe.hooks.removing.replacements import Calibration as Calibration
    from nope_probe.maps.centred import row_centred as row_centred
    from nope_probe.maps.maps import AttentionMaps as AttentionMaps
    from nope_probe.maps.maps import ScoreMaps as ScoreMaps
    from nope_probe.maps.maps import StageMaps as StageMaps
    from nope_probe.models.info import LoadedModel as LoadedModel
    from nope_probe.models.load import load as load
    from nope_probe.models.parameter_free import build as build
    from nope_probe.models.parameter_free import parameter_free as parameter_free
    from nope_probe.run.folder import Run as Run
    from nope_probe.run.folder import read_run as read_run
    from nope_probe.studies.ablation.heads import head_scores as head_scores
    from nope_probe.studies.ablation.study import run_ablations as run_ablations
    from nope_probe.studies.attention.study import AttentionStudy as AttentionStudy
    from nope_probe.studies.attention.study import run_attention as run_attention
    from nope_probe.studies.behaviour.study import run_behaviour as run_behaviour
    from nope_probe.studies.circuit_run import run_circuit as run_circuit
    from nope_probe.studies.compare.analyse import difference as difference
    from nope_probe.studies.heads.study import run_heads as run_heads
    from nope_probe.studies.trace.study import run_trace as run_trace

_NAMES = {
    "nope_probe.analyses.attention": "AttentionSplit split_attention",
    "nope_probe.analyses.attribution": "LayerValues Values attribute attribute_heads",
    "nope_probe.analyses.parameter_free.simulation": "Simulation simulate_scores",
    "nope_probe.analyses.parameter_free.spec": "ParameterFreeSpec",
    "nope_probe.analyses.parameter_free.theory": "theory_scores",
    "nope_probe.analyses.pattern": "Measures measure measure_heads",
    "nope_probe.data.sequences": "Sequences gaussian sequences",
    "nope_probe.studies.ablation.heads": "head_scores",
    "nope_probe.studies.ablation.study": "run_ablations",
    "nope_probe.studies.attention.study": "AttentionStudy run_attention",
    "nope_probe.studies.behaviour.study": "run_behaviour",
    "nope_probe.studies.circuit_run": "run_circuit",
    "nope_probe.studies.compare.analyse": "difference",
    "nope_probe.studies.heads.study": "run_heads",
    "nope_probe.studies.trace.study": "run_trace",
    "nope_probe.figures.attention": "Why",
    "nope_probe.figures.text_view": "TextView",
    "nope_probe.hooks.ablation": "ablated",
    "nope_probe.hooks.reading.attention": "capture_attention",
    "nope_probe.hooks.reading.calibration": "calibrate",
    "nope_probe.hooks.reading.capture": "capture_losses capture_scores capture_stages",
    "nope_probe.hooks.removing.edited_weights": "untrained",
    "nope_probe.hooks.removing.removals": "Ablation",
    "nope_probe.hooks.removing.replacements": "Calibration",
    "nope_probe.maps.centred": "row_centred",
    "nope_probe.maps.maps": "AttentionMaps ScoreMaps StageMaps",
    "nope_probe.models.info": "LoadedModel",
    "nope_probe.models.load": "load",
    "nope_probe.models.parameter_free": "build parameter_free",
    "nope_probe.run.folder": "Run read_run",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__version__ = "0.2.0"
__all__ = sorted(["figures", *_HOME])


def __getattr__(name: str) -> Any:
    """Import a public name on first use: TransformerLens takes seconds to import."""
    if name == "figures":
        return import_module("nope_probe.figures")
    if name not in _HOME:
        raise AttributeError(f"nope_probe has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})
