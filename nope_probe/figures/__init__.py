"""Figures of maps, values and measures: functions from values to a `plotly` figure.

Maps are arrays, tensors or the result of a capture; tables are those of a run or a study. No figure
needs torch except `explore`, which runs a model in every combination of removed components.
`explore` and `of_run` live in `studies`, and this file only names them.

Example:
    >>> import numpy as np
    >>> from nope_probe import figures
    >>> figures.score_maps(np.zeros((2, 5, 5))).layout.yaxis.title.text
    'query position'
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "nope_probe.studies.explore": "explore",
    "nope_probe.studies.page": "of_run",
    "nope_probe.figures.stages": "circuit",
    "nope_probe.figures.explorer": "Explorer",
    "nope_probe.figures.image": "save",
    "nope_probe.figures.maps": "score_maps term_maps",
    "nope_probe.figures.panels": "RowMaps",
    "nope_probe.figures.values": "head_values",
    "nope_probe.figures.views": "draw",
    "nope_probe.figures.words": "View",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a figure on first use, because plotly takes a while and tables do not need it."""
    if name not in _HOME:
        raise AttributeError(f"nope_probe.figures has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})
