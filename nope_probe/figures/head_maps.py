"""The positional pattern of every head: thumbnails, each of which a click or Enter enlarges.

The maps are in the page as bytes: it needs no kernel, no library and no network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.explorer import asset, encoded, quantise, script
from nope_probe.figures.intervals import FLOOR, symmetric
from nope_probe.figures.style import STOPS
from nope_probe.maps.downsample import Pooled, pool

MAX_BYTES = 4_000_000  # of all maps in base64
MAX_POSITIONS = 256
FEW = 8  # heads, whose thumbnails are larger

Patterns = Float[np.ndarray, "layer head query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class HeadMaps:
    """The maps of all heads, behind thumbnails.

    Attributes:
        pooled: patterns in nats, layer by layer; NaN where there is nothing.
        layers: the layers' numbers.
        n_heads: heads in a layer.
        n_positions: positions before pooling.
        amplitudes: RMS of each head's pattern, nats, corrected for noise.
        noise: whether each head's pattern does not exceed its noise.
    """

    pooled: Pooled
    layers: tuple[int, ...]
    n_heads: int
    n_positions: int
    amplitudes: Float[np.ndarray, " map"]
    noise: tuple[bool, ...]

    def html(self) -> str:
        """Return the thumbnails as an element of a page."""
        maps = self.pooled.values
        n = maps.shape[-1]
        below = maps[:, np.tri(n, dtype=bool)]
        codes, scales = zip(*(quantise(cells, "i1") for cells in below), strict=True)
        content = {
            "colours": STOPS,
            "n": n,
            "block": self.pooled.block,
            "n_positions": self.n_positions,
            "layers": list(self.layers),
            "n_heads": self.n_heads,
            "amplitudes": [float(f"{max(0.0, each):.3g}") for each in self.amplitudes],
            "noise": list(self.noise),
            "cells": encoded(np.stack(codes), "i1"),
            "scales": encoded(np.array(scales), "<f4"),
            "limits": encoded(np.array([symmetric(cells, FLOOR) for cells in below]), "<f4"),
        }
        few = " few" if self.n_heads <= FEW else ""
        return (
            f'<div class="heads{few}"><style>{asset("head_maps.css")}</style>'
            '<p><label><input type="checkbox"> same colours in every head</label></p>'
            f'<script type="application/json">{json.dumps(content, separators=(",", ":"))}</script>'
            f"<script>{script('head_maps.js')}</script></div>"
        )


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
        layers=tuple(rows["layer"].unique().tolist()),
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
