"""The positional pattern of every head: thumbnails, each of which a click or Enter enlarges.

The maps are in the page as bytes: it needs no kernel, no library and no network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.explorer_bytes import asset, encoded, script
from nope_probe.figures.intervals import CLIPPED, FLOOR
from nope_probe.figures.style import STOPS
from nope_probe.maps.downsample import Pooled, pool

MAX_BYTES = 4_000_000  # of all maps in base64
MAX_POSITIONS = 256
FEW = 8  # heads, whose thumbnails are larger
BLANK = -128  # the code of a cell without a number
LARGEST = 127  # the code of a map's largest absolute value

Patterns = Float[np.ndarray, "layer head query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class HeadMaps:
    """The maps of all heads, behind thumbnails.

    Attributes:
        pooled: patterns in nats, layer by layer; NaN where there is nothing.
        n_heads: heads in a layer.
        n_positions: positions before pooling.
        amplitudes: RMS of each head's pattern, nats, corrected for noise.
        noise: whether each head's pattern does not exceed its noise.
    """

    pooled: Pooled
    n_heads: int
    n_positions: int
    amplitudes: Float[np.ndarray, " map"]
    noise: tuple[bool, ...]

    def html(self) -> str:
        """Return the thumbnails as an element of a page."""
        content = json.dumps(self._content(), separators=(",", ":"))
        few = " few" if self.n_heads <= FEW else ""
        return (
            f'<div class="heads{few}"><style>{asset("head_maps.css")}</style>'
            '<p><label><input type="checkbox"> same colours in every head</label></p>'
            f'<script type="application/json">{content}</script>'
            f"<script>{script('head_maps.js')}</script></div>"
        )

    def _content(self) -> dict[str, Any]:
        maps = self.pooled.values
        n = maps.shape[-1]
        below = maps[:, np.tri(n, dtype=bool)]
        largest = np.abs(np.nan_to_num(below)).max(axis=1, initial=0.0)
        codes = np.full(below.shape, BLANK, np.int8)
        known = np.isfinite(below)
        scaled = below / np.maximum(largest, np.finfo(np.float32).tiny)[:, None]
        codes[known] = np.rint(LARGEST * scaled[known])
        return {
            "colours": STOPS,
            "n": n,
            "block": self.pooled.block,
            "n_positions": self.n_positions,
            "layers": list(range(len(maps) // self.n_heads)),
            "n_heads": self.n_heads,
            "amplitudes": [float(f"{max(0.0, each):.3g}") for each in self.amplitudes],
            "noise": list(self.noise),
            "cells": encoded(codes, "i1"),
            "largest": encoded(largest, "<f4"),
            "limits": encoded(np.array([_limit(each) for each in below]), "<f4"),
        }


def head_maps(patterns: Patterns, heads: pd.DataFrame, max_bytes: int = MAX_BYTES) -> HeadMaps:
    """Return the maps of all heads behind thumbnails, pooled until they fit.

    Args:
        patterns: each head's positional pattern, nats; NaN where there is nothing.
        heads: `heads.csv`: layer, head, and the amplitude with its bounds.
        max_bytes: how many characters all maps may take.
    """
    n_layers, n_heads, n, _ = patterns.shape
    pooled = pool(patterns.reshape(-1, n, n), positions_of_heads(n_layers * n_heads, max_bytes))
    rows = heads.sort_values(["layer", "head"])
    return HeadMaps(
        pooled=pooled,
        n_heads=n_heads,
        n_positions=n,
        amplitudes=rows["amplitude"].to_numpy(float),
        noise=tuple(not low > 0 for low in rows["amplitude_low"]),
    )


def positions_of_heads(n_maps: int, max_bytes: int = MAX_BYTES) -> int:
    """Return how many positions each of so many maps may have.

    Example:
        >>> positions_of_heads(16), positions_of_heads(1024)
        (256, 76)
    """
    cells = max_bytes * 3 / 4 / n_maps  # a byte each, those above the diagonal left out
    return max(8, min(MAX_POSITIONS, int(((8 * cells + 1) ** 0.5 - 1) / 2)))


def _limit(cells: Float[np.ndarray, " cell"]) -> float:
    known = np.abs(cells[np.isfinite(cells)])
    return max(FLOOR, float(np.percentile(known, 100 - CLIPPED)) if known.size else 0.0)
