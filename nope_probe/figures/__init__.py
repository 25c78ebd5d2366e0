"""Figures of maps, shares and measures: each takes values and returns a `plotly` figure.

Maps are arrays, tensors or what a capture returned; tables are those of a run or a study. None of
them needs torch, but for `explore`, which runs a model in every combination of removed components
and lives in `experiments`: this file only names it.

Example:
    >>> import numpy as np
    >>> from nope_probe import figures
    >>> figures.score_maps(np.zeros((2, 5, 5))).layout.yaxis.title.text
    'query position'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nope_probe.experiments.explore.run import explore
    from nope_probe.figures.behaviour import (
        decodability,
        differences,
        loss_by_position,
    )
    from nope_probe.figures.bridge import heads_and_behaviour, pattern_and_behaviour
    from nope_probe.figures.circuit_figure import circuit
    from nope_probe.figures.heads import head_map
    from nope_probe.figures.maps import score_maps, sweep_maps, term_maps
    from nope_probe.figures.measures import (
        controls,
        mask_effect,
        pattern_measures,
        training_dynamics,
    )
    from nope_probe.figures.shares import (
        interactions,
        mean_covariance_shares,
        player_shares,
        source_shares,
    )
    from nope_probe.figures.splits import band_amplitudes, offset_profiles
    from nope_probe.figures.stages import stage_measures
    from nope_probe.figures.theory import fixed_scale_maps

_HOME = {
    "band_amplitudes": "nope_probe.figures.splits",
    "circuit": "nope_probe.figures.circuit_figure",
    "controls": "nope_probe.figures.measures",
    "decodability": "nope_probe.figures.behaviour",
    "differences": "nope_probe.figures.behaviour",
    "explore": "nope_probe.experiments.explore.run",
    "fixed_scale_maps": "nope_probe.figures.theory",
    "head_map": "nope_probe.figures.heads",
    "heads_and_behaviour": "nope_probe.figures.bridge",
    "interactions": "nope_probe.figures.shares",
    "loss_by_position": "nope_probe.figures.behaviour",
    "mask_effect": "nope_probe.figures.measures",
    "mean_covariance_shares": "nope_probe.figures.shares",
    "offset_profiles": "nope_probe.figures.splits",
    "pattern_and_behaviour": "nope_probe.figures.bridge",
    "pattern_measures": "nope_probe.figures.measures",
    "player_shares": "nope_probe.figures.shares",
    "score_maps": "nope_probe.figures.maps",
    "source_shares": "nope_probe.figures.shares",
    "stage_measures": "nope_probe.figures.stages",
    "sweep_maps": "nope_probe.figures.maps",
    "term_maps": "nope_probe.figures.maps",
    "training_dynamics": "nope_probe.figures.measures",
}

__all__ = [
    "band_amplitudes",
    "circuit",
    "controls",
    "decodability",
    "differences",
    "explore",
    "fixed_scale_maps",
    "head_map",
    "heads_and_behaviour",
    "interactions",
    "loss_by_position",
    "mask_effect",
    "mean_covariance_shares",
    "offset_profiles",
    "pattern_and_behaviour",
    "pattern_measures",
    "player_shares",
    "score_maps",
    "source_shares",
    "stage_measures",
    "sweep_maps",
    "term_maps",
    "training_dynamics",
]


def __getattr__(name: str) -> Any:
    """Import a figure on first use."""
    if name not in _HOME:
        raise AttributeError(f"nope_probe.figures has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
