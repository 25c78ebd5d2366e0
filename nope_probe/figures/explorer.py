"""The explorer: a model's maps without what a reader removes, in one piece of HTML.

The page holds the maps as bytes and needs no kernel, library or network, so the explorer works in
notebooks, in reports and as a file.
"""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import numpy as np
from jaxtyping import Float

from nope_probe.figures.names import colour
from nope_probe.figures.panels import pool
from nope_probe.figures.style import STOPS
from nope_probe.files import local_path

MAX_BYTES = 4_900_000  # size of an explorer in a notebook or a file
SMALLEST = 8  # cells along an axis; no map is pooled below this
HEIGHT = 760  # px of a frame until its script measures the content
MEASURES = [
    {"name": "lead", "label": "first key leads by", "unit": "nats"},
    {"name": "amplitude", "label": "pattern of other keys", "unit": "nats"},
    {"name": "kept", "label": "of the intact pattern, kept", "unit": "nats"},
]
PackedMaps = Float[np.ndarray, "combination layer panel query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class RemovedMaps:
    """Leads and patterns without some components; the first condition is the intact model.

    Attributes:
        conditions: what is removed, by name.
        labels: the same in words.
        layers: the layers' numbers.
        panels: the names of the heads and their mean.
        maps: the patterns, nats; NaN marks cells without a number, such as the first key's.
        leads: the first key's lead in each row, nats.
        measures: lead, amplitude, and how much of the intact pattern is kept, nats, as a value and
            the ends of its 95% interval.
        block: positions per cell and axis; above 1 the maps are pooled.
    """

    conditions: tuple[str, ...]
    labels: tuple[str, ...]
    layers: tuple[int, ...]
    panels: tuple[str, ...]
    maps: PackedMaps
    leads: Float[np.ndarray, "condition layer panel query_pos"]
    measures: Float[np.ndarray, "condition layer panel 3 3"]
    block: int = 1

    def pooled(self, block: int) -> RemovedMaps:
        """Return the maps with cells that are means over square blocks of cells."""
        *outer, n, _ = self.maps.shape
        flat = pool(self.maps.reshape(-1, n, n), -(-n // block))
        maps = flat.values.reshape(*outer, *flat.values.shape[1:])
        spread = np.repeat(self.leads.reshape(-1, n, 1), n, -1)
        leads = pool(spread, -(-n // block)).values[..., 0].reshape(*outer, -1)
        return replace(self, maps=maps, leads=leads, block=self.block * flat.block)


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """A model's maps without what a reader chooses; `save` writes it as a page.

    Attributes:
        title: the title.
        view: the leads and patterns in all conditions.
        removed: the place, in `conditions`, of what is removed at first.
        layer: the place, in `layers`, of the layer that is shown at first.
        note: sentences about the maps.
        max_bytes: the largest size of the page; larger maps are pooled.
    """

    title: str
    view: RemovedMaps = field(repr=False)  # megabytes in a notebook's file
    removed: int = 0
    layer: int = 0
    note: str = ""
    max_bytes: int = field(default=MAX_BYTES, repr=False)

    def html(self) -> str:
        """Return the explorer as a complete page, which loads nothing."""
        template, style = Template(asset("explorer.html")), asset("explorer.css")
        code = script("explorer.js")
        room = self.max_bytes - sum(map(len, (template.template, style, code)))
        view, packed = fitted(self.view, room)
        averaged = (
            f"A cell is a mean over {view.block} × {view.block} positions; the numbers are of the "
            "whole maps."
        )
        content = {
            "colours": STOPS,
            "choices": [
                {"name": name, "label": label, "colour": colour(name)}
                for name, label in zip(view.conditions, view.labels, strict=True)
            ],
            "measures": MEASURES,
            "removed": self.removed,
            "layer": self.layer,
            "view": {
                "layers": view.layers,
                "panels": view.panels,
                "n": view.maps.shape[-1],
                "block": view.block,
                **packed,
                "leads": encoded(view.leads, "<f4"),
                "measures": encoded(view.measures, "<f4"),
            },
        }
        page = template.substitute(
            title=escape(self.title),
            note=escape(f"{self.note} {averaged if view.block > 1 else ''}".strip()),
            style=style,
            data=json.dumps(content, separators=(",", ":")).replace("</", "<\\/"),
            script=code,
        )
        # ASCII, because a page that embeds this may not declare its encoding.
        return page.encode("ascii", "xmlcharrefreplace").decode("ascii")

    def frame(self) -> str:
        """Return the explorer in a frame, so that one page can have several."""
        label, page = escape(self.title), escape(self.html())
        style = f"width:100%;height:{HEIGHT}px;border:0"
        return f'<iframe class="explorer" title="{label}" style="{style}" srcdoc="{page}"></iframe>'

    def _repr_html_(self) -> str:
        return self.frame()

    def save(self, path: str | Path) -> Path:
        """Write the explorer as an HTML page, and return its path."""
        path = local_path(path)
        path.write_text(self.html(), encoding="utf-8")
        return path


def fitted(view: RemovedMaps, max_bytes: int) -> tuple[RemovedMaps, dict[str, str]]:
    """Return a view and its bytes, pooled until they fit or a map is 8 cells wide."""
    shown, packed, block = view, pack(view.maps), 1
    while sum(map(len, packed.values())) > max_bytes and shown.maps.shape[-1] > SMALLEST:
        block += 1
        shown = view.pooled(block)
        packed = pack(shown.maps)
    return shown, packed


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


def quantise(values: Float[np.ndarray, " cell"]) -> tuple[np.ndarray, float]:
    """Return 16-bit codes of a map's cells, and the scale by which codes are multiplied.

    The lowest code marks a cell without a number.

    Example:
        >>> codes, scale = quantise(np.array([-2.0, np.nan, 1.0]))
        >>> codes.tolist(), round(scale * 32767, 6)
        ([-32767, -32768, 16384], 2.0)
    """
    blank, top = -32768, 32767
    known = np.isfinite(values)
    largest = float(np.abs(values[known]).max(initial=0.0))
    scale = float(np.float32(largest / top)) or 1.0
    codes = np.full(values.shape, blank, "<i2")
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
