"""Maps of all combinations as bytes: 16-bit cells with a scale per map, equal maps stored once."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import numpy as np
from jaxtyping import Float

Shape = Literal["full", "symmetric", "lower", "below"]
Maps = Float[np.ndarray, "combination layer panel query_pos key_pos"]
BLANK = -32768  # the code of a cell without a number
LARGEST = 32767  # the code of a map's largest absolute value


@dataclass(frozen=True, kw_only=True)
class PackedMaps:
    """Maps as the explorer's script reads them, all in base64 and little-endian.

    Attributes:
        cells: int16 codes of the cells that a panel's shape names, row by row; a value is its code
            times the map's scale, so it is off by at most half a scale.
        offsets: uint32, per map (combination, layer, panel) where its cells begin.
        scales: float32, per map.
        shapes: per panel which cells are stored: all, those of j <= i (which a symmetric map has
            twice), or those of j < i.
    """

    cells: str
    offsets: str
    scales: str
    shapes: tuple[Shape, ...]

    @property
    def n_bytes(self) -> int:
        """How many characters the maps take."""
        return len(self.cells) + len(self.offsets) + len(self.scales)


def pack(maps: Maps) -> PackedMaps:
    """Return maps as bytes; cells that are not finite are blank."""
    shapes = tuple(shape_of(maps[:, :, panel]) for panel in range(maps.shape[2]))
    inside = [_stored(shape, maps.shape[-1]) for shape in shapes]
    places: dict[tuple[bytes, float], int] = {}
    chunks: list[bytes] = []
    offsets, scales = [], []
    size = 0
    for index in np.ndindex(maps.shape[:3]):
        codes, scale = quantise(maps[index][inside[index[2]]])
        key = codes.tobytes(), scale
        if key not in places:
            places[key] = size
            chunks.append(key[0])
            size += len(codes)
        offsets.append(places[key])
        scales.append(scale)
    return PackedMaps(
        cells=b64encode(b"".join(chunks)).decode(),
        offsets=encoded(np.array(offsets), "<u4"),
        scales=encoded(np.array(scales), "<f4"),
        shapes=shapes,
    )


def quantise(
    values: Float[np.ndarray, " cell"],
) -> tuple[np.ndarray, float]:
    """Return 16-bit codes of values, and the number that a code is multiplied with.

    Example:
        >>> codes, scale = quantise(np.array([-2.0, np.nan, 1.0]))
        >>> codes.tolist(), round(scale * 32767, 6)
        ([-32767, -32768, 16384], 2.0)
    """
    known = np.isfinite(values)
    largest = float(np.abs(values[known]).max()) if known.any() else 0.0
    scale = float(np.float32(largest / LARGEST)) or 1.0
    codes = np.full(values.shape, BLANK, "<i2")
    codes[known] = np.clip(np.rint(values[known] / scale), -LARGEST, LARGEST)
    return codes, scale


def shape_of(maps: Float[np.ndarray, "*maps query_pos key_pos"]) -> Shape:
    """Return which cells hold all that there is in some maps.

    Example:
        >>> shape_of(np.ones((2, 3, 3))), shape_of(np.where(np.tri(3) > 0, 1, np.nan))
        ('symmetric', 'lower')
    """
    n = maps.shape[-1]
    above = ~np.tri(n, dtype=bool)
    if np.isnan(maps[..., above]).all():
        return "below" if np.isnan(maps[..., np.eye(n, dtype=bool)]).all() else "lower"
    same = np.array_equal(maps, np.swapaxes(maps, -1, -2), equal_nan=True)
    return "symmetric" if same else "full"


def _stored(shape: Shape, n: int) -> np.ndarray:
    """Return which cells are in the bytes of a map."""
    if shape == "full":
        return np.ones((n, n), bool)
    return np.tri(n, k=-1 if shape == "below" else 0, dtype=bool)


def encoded(values: np.ndarray, dtype: str) -> str:
    """Return numbers as base64 of one binary type."""
    return b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def asset(name: str) -> str:
    """Return the text of a file in this folder, such as `explorer.css`."""
    return resources.files("nope_probe.figures").joinpath(name).read_text("utf-8")


def script(name: str) -> str:
    """Return a script after the colours of maps, in a scope of its own: several share a page."""
    return f'"use strict";\n(() => {{\n{asset("colours.js")}{asset(name)}}})();\n'
