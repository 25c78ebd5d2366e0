"""The positional pattern of every head: thumbnails, each of which a click or Enter enlarges.

The maps are in the page as bytes: it needs no kernel, no library and no network.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.explorer import asset, encoded, quantise, script
from nope_probe.figures.intervals import FLOOR, symmetric
from nope_probe.figures.style import STOPS
from nope_probe.maps.downsample import pool

MAX_BYTES = 4_000_000  # of all maps in base64
MAX_POSITIONS = 256
FEW = 8  # heads, whose thumbnails are larger

Patterns = Float[np.ndarray, "layer head query_pos key_pos"]


def head_maps(patterns: Patterns, heads: pd.DataFrame, max_bytes: int = MAX_BYTES) -> str:
    """Return an element of a page with all heads' maps behind thumbnails, pooled until they fit.

    Args:
        patterns: each head's positional pattern, nats; NaN where there is nothing.
        heads: `heads.csv`: layer, head, and the amplitude with its bounds.
        max_bytes: how many characters all maps may take.
    """
    n_layers, n_heads, n, _ = patterns.shape
    pooled = pool(patterns.reshape(-1, n, n), positions_of_heads(n_layers * n_heads, max_bytes))
    size, block = pooled.values.shape[-1], pooled.block
    below = pooled.values[:, np.tri(size, dtype=bool)]
    codes, scales = zip(*(quantise(cells, "i1") for cells in below), strict=True)
    rows = heads.sort_values(["layer", "head"])
    content = {
        "colours": STOPS,
        "n": size,
        "block": block,
        "n_positions": n,
        "layers": list(range(n_layers)),
        "n_heads": n_heads,
        "amplitudes": [float(f"{max(0.0, value):.3g}") for value in rows["amplitude"]],
        "noise": [not low > 0 for low in rows["amplitude_low"]],
        "cells": encoded(np.stack(codes), "i1"),
        "scales": encoded(np.array(scales), "<f4"),
        "limits": encoded(np.array([symmetric(cells, FLOOR) for cells in below]), "<f4"),
    }
    cell = f"<p>A cell is a mean over {block} × {block} positions.</p>" if block > 1 else ""
    few = " few" if n_heads <= FEW else ""
    return (
        f'<div class="heads{few}"><style>{asset("head_maps.css")}</style>'
        '<p><label><input type="checkbox"> same colours in every head</label></p>'
        f"{cell}"
        f'<script type="application/json">{json.dumps(content, separators=(",", ":"))}</script>'
        f"<script>{script('head_maps.js')}</script></div>"
    )


def positions_of_heads(n_maps: int, max_bytes: int = MAX_BYTES) -> int:
    """Return how many positions each of so many maps may have.

    Example:
        >>> positions_of_heads(16), positions_of_heads(1024)
        (256, 76)
    """
    cells = max_bytes * 3 / 4 / n_maps  # a byte each, those above the diagonal left out
    return max(8, min(MAX_POSITIONS, int(((8 * cells + 1) ** 0.5 - 1) / 2)))
