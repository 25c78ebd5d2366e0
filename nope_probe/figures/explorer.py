"""Maps in one piece of HTML: the explorer, of what is removed, and all heads' maps.

The page holds the maps as bytes and needs no kernel, library or network, so the explorer works in
notebooks, in reports and as a file. The maps of all heads are thumbnails of 8-bit codes; a click or
Enter enlarges a thumbnail.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.limits import FLOOR, symmetric
from nope_probe.figures.names import colour
from nope_probe.figures.packed import PackedMaps, asset, encoded, pack, quantise, script
from nope_probe.figures.panels import RowMaps, pool
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
HEADS_BYTES = 4_000_000  # size of all maps in base64
HEADS_POSITIONS = 256
FEW = 8  # up to this number of heads, thumbnails are larger

Patterns = Float[np.ndarray, "layer head query_pos key_pos"]


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


def head_maps(
    patterns: Patterns | RowMaps,
    heads: pd.DataFrame,
    max_bytes: int = HEADS_BYTES,
    what: str = "positional pattern",
    measure: str = "RMS",
) -> str:
    """Return an element of a page with all heads' maps behind thumbnails, pooled until they fit.

    Args:
        patterns: each head's positional pattern, nats; NaN marks cells without a number. Of chosen
            queries' rows, as `RowMaps`.
        heads: `head_pattern.csv`: layer, head, and the amplitude with its bounds.
        max_bytes: the number of characters that all maps may take.
        what: the maps are called.
        measure: the amplitudes are.
    """
    maps = patterns if isinstance(patterns, RowMaps) else RowMaps(values=patterns)
    n_layers, n_heads, n_rows, n = maps.values.shape
    flat = replace(maps, values=maps.values.reshape(-1, n_rows, n))
    pooled = pool(flat, positions_of_heads(n_layers * n_heads, max_bytes))
    size, block = pooled.values.shape[-1], pooled.block
    below = pooled.values[:, np.tri(size, dtype=bool)]
    codes, scales = zip(*(quantise(cells, "i1") for cells in below), strict=True)
    rows = heads.sort_values(["layer", "head"])
    content = {
        "colours": STOPS,
        "n": size,
        "block": block,
        "n_positions": n,
        "layers": [int(layer) for layer in rows["layer"].unique()],
        "n_heads": n_heads,
        "what": what,
        "measure": measure,
        "amplitudes": [float(f"{max(0.0, value):.3g}") for value in rows["amplitude"]],
        "noise": [not low > 0 for low in rows["amplitude_low"]],
        "cells": encoded(np.stack(codes), "i1"),
        "scales": encoded(np.array(scales), "<f4"),
        "limits": encoded(
            np.array([symmetric(cells, FLOOR, beyond=1.0) for cells in below]), "<f4"
        ),
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


def weight_maps(weights: RowMaps, heads: pd.DataFrame, max_bytes: int) -> str:
    """Return `head_maps` of mean weights, as the logarithm of their ratio to uniform weights.

    Args:
        weights: of each head, [layer, head, row, key_pos]; 0 where a query sees no key.
        heads: `attention.csv`: layer, head, and the information with its bounds.
        max_bytes: the number of characters that all maps may take.
    """
    seen = weights.values > 0
    with np.errstate(divide="ignore"):
        ratios = np.log(weights.values * seen.sum(-1, keepdims=True).clip(1))
    names = {"information": "amplitude", "information_low": "amplitude_low"}
    return head_maps(
        replace(weights, values=np.where(seen, ratios, np.nan)),
        heads[["layer", "head", *names]].rename(columns=names),
        max_bytes,
        what="attention",
        measure="above uniform",
    )


def positions_of_heads(n_maps: int, max_bytes: int = HEADS_BYTES) -> int:
    """Return how many positions each of n_maps maps may have.

    Example:
        >>> positions_of_heads(16), positions_of_heads(1024)
        (256, 76)
    """
    cells = max_bytes * 3 / 4 / n_maps  # a byte per cell, without cells above the diagonal
    return max(8, min(HEADS_POSITIONS, int(((8 * cells + 1) ** 0.5 - 1) / 2)))
