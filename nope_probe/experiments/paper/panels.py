"""The paper's published panels as numbers (`PANELS.md` says how they were read, and how well)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from jaxtyping import Float

COLOURS = 256
Cells = Float[np.ndarray, "row col"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One published heat map.

    Attributes:
        key: its name, such as `figure2/alpha=0/layer1`.
        values: what its colours stand for; NaN where nothing is drawn.
        low, high: the ends of its colour bar, beyond which the paper clipped.
        kind: `score`, `normalised` (both in nats) or `gram`.
    """

    key: str
    values: Cells
    low: float
    high: float
    kind: str

    @property
    def step(self) -> float:
        """What one of the 256 colours spans."""
        return (self.high - self.low) / COLOURS


@cache
def published(figure: str) -> dict[str, Panel]:
    """Return the published panels of a figure by the rest of their name; none where none is kept.

    Example:
        >>> panel = published("figure3")["a"]
        >>> panel.values.shape, panel.kind, published("figure11")
        ((50, 50), 'gram', {})
    """
    from safetensors import safe_open

    file = resources.files("nope_probe.experiments.paper").joinpath("panels.safetensors")
    with resources.as_file(file) as path, safe_open(path, "numpy") as packed:
        about = json.loads(packed.metadata()["panels"])
        ours = [key for key in about if key.startswith(f"{figure}/")]
        return {
            key.removeprefix(f"{figure}/"): _panel(key, packed.get_tensor(key), about[key])
            for key in sorted(ours, key=_natural)
        }


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """Return a key to sort by, in which `layer10` follows `layer9`."""
    parts = key.replace("layer", "layer/").split("/")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _panel(key: str, held: np.ndarray, about: dict[str, Any]) -> Panel:
    low, high = about["low"], about["high"]
    values = held.astype(np.float64)
    if held.dtype == np.uint8:  # the numbers of colours
        values = low + (values + 0.5) * (high - low) / COLOURS
    if about["causal"]:
        values = np.where(np.tri(len(values), dtype=bool), values, np.nan)
    return Panel(key=key, values=values, low=low, high=high, kind=about["kind"])
