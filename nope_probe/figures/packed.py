"""Maps as bytes in a page, and the files of this folder that draw them there.

A cell is a 16-bit code times its map's scale, and equal maps are stored once.
"""

from __future__ import annotations

from base64 import b64encode
from importlib import resources

import numpy as np
from jaxtyping import Float

PackedMaps = Float[np.ndarray, "combination layer panel query_pos key_pos"]


def pack(maps: PackedMaps) -> dict[str, str]:
    """Return maps in the form that the explorer's script reads, in base64 and little-endian.

    Returns:
        `cells`: int16 codes of the cells j < i, row by row; a value is its code times the map's
        scale, so it is off by at most half a scale, and cells that are not finite are blank.
        `offsets`: uint32, the start of the cells of each map (combination, layer, panel).
        `scales`: float32, per map.
    """
    earlier = np.tri(maps.shape[-1], k=-1, dtype=bool)
    places: dict[tuple[bytes, float], int] = {}
    offsets, scales, size = [], [], 0
    for index in np.ndindex(maps.shape[:3]):
        codes, scale = quantise(maps[index][earlier])
        key = codes.tobytes(), scale
        if key not in places:
            places[key] = size
            size += len(codes)
        offsets.append(places[key])
        scales.append(scale)
    return {
        "cells": b64encode(b"".join(cells for cells, _ in places)).decode(),
        "offsets": encoded(np.array(offsets), "<u4"),
        "scales": encoded(np.array(scales), "<f4"),
    }


def quantise(values: Float[np.ndarray, " cell"], kind: str = "<i2") -> tuple[np.ndarray, float]:
    """Return codes of values, and the scale by which codes are multiplied.

    The lowest code marks a cell without a number.

    Args:
        values: the cells of a map.
        kind: the codes' type, a signed integer.

    Example:
        >>> codes, scale = quantise(np.array([-2.0, np.nan, 1.0]))
        >>> codes.tolist(), round(scale * 32767, 6)
        ([-32767, -32768, 16384], 2.0)
    """
    blank, top = np.iinfo(kind).min, np.iinfo(kind).max
    known = np.isfinite(values)
    largest = float(np.abs(values[known]).max(initial=0.0))
    scale = float(np.float32(largest / top)) or 1.0
    codes = np.full(values.shape, blank, kind)
    codes[known] = np.clip(np.rint(values[known] / scale), -top, top)
    return codes, scale


def encoded(values: np.ndarray, dtype: str) -> str:
    """Return numbers as base64 of one binary type."""
    return b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def asset(name: str) -> str:
    """Return the text of a file in this folder, such as `explorer.css`."""
    return resources.files("nope_probe.figures").joinpath(name).read_text("utf-8")


def script(name: str) -> str:
    """Return a script after the code that draws maps, in one scope, since several share a page."""
    return f'"use strict";\n(() => {{\n{asset("canvas.js")}{asset(name)}}})();\n'
