"""Find where a decoder's positional attention pattern comes from: the mask, RoPE or the weights."""

from importlib import import_module
from typing import Any

_NAMES = {  # public names by module, which are imported on first use: TransformerLens takes seconds
    "nope_probe": "figures",
    "nope_probe.analyses.attention": "AttentionSplit split_attention",
    "nope_probe.analyses.attribution": "LayerValues Values attribute attribute_heads",
    "nope_probe.analyses.parameter_free.simulation": "Simulation simulate_scores",
    "nope_probe.analyses.parameter_free.spec": "ParameterFreeSpec",
    "nope_probe.analyses.parameter_free.theory": "theory_scores",
    "nope_probe.analyses.pattern": "Measures measure measure_heads",
    "nope_probe.data.sequences": "Sequences gaussian sequences",
    "nope_probe.figures.attention": "Why",
    "nope_probe.figures.text_view": "TextView",
    "nope_probe.hooks.ablation": "ablated",
    "nope_probe.hooks.reading.attention": "capture_attention",
    "nope_probe.hooks.reading.calibration": "calibrate",
    "nope_probe.hooks.reading.capture": "capture_losses capture_scores capture_stages",
    "nope_probe.hooks.reading.need": "Needs capture_need",
    "nope_probe.hooks.removing.edited_weights": "untrained",
    "nope_probe.hooks.removing.removals": "Ablation",
    "nope_probe.hooks.removing.replacements": "Calibration",
    "nope_probe.maps.centred": "row_centred",
    "nope_probe.maps.maps": "AttentionMaps ScoreMaps StageMaps",
    "nope_probe.models.info": "LoadedModel",
    "nope_probe.models.load": "load",
    "nope_probe.models.parameter_free": "build parameter_free",
    "nope_probe.run.folder": "Run read_run",
    "nope_probe.studies.ablate_run": "run_ablations",
    "nope_probe.studies.attention": "text_view",
    "nope_probe.studies.attention_run": "explain run_attention",
    "nope_probe.studies.behaviour_run": "run_behaviour",
    "nope_probe.studies.circuit_run": "run_circuit",
    "nope_probe.studies.compare_run": "difference",
    "nope_probe.studies.head_scores": "head_scores",
    "nope_probe.studies.heads_run": "run_heads",
    "nope_probe.studies.trace_run": "run_trace",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__version__ = "0.2.0"
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"nope_probe has no {name!r}; it has {', '.join(__all__)}")
    home = _HOME[name]
    if home == __name__:  # a module of the package
        return import_module(f"{home}.{name}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})
