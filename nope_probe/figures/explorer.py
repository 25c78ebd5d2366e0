"""Maps in one piece of HTML: the explorer, whose switches remove components, and all heads' maps.

The page holds the maps as bytes and needs no kernel, library or network, so the explorer works in
notebooks, in reports and as a file. The maps of all heads are thumbnails of 8-bit codes; a click or
Enter enlarges a thumbnail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.components import are_sources
from nope_probe.figures.intervals import FLOOR, symmetric
from nope_probe.figures.names import colour, words
from nope_probe.figures.packed import Maps, asset, encoded, pack, quantise, script
from nope_probe.figures.panels import RowMaps, pool
from nope_probe.figures.style import STOPS
from nope_probe.figures.words import BOTH_WAYS
from nope_probe.files import local_path

MAX_BYTES = 4_900_000  # size of an explorer in a notebook or a file
SMALLEST = 8  # cells along an axis; no map is pooled below this
HEIGHT = 760  # px of a frame until its script measures the content
MEASURES = ("amplitude", "locality", "share")
_SHOWN_MEASURES = [
    {"name": "amplitude", "label": "amplitude", "unit": "nats"},
    {"name": "locality", "label": "locality", "unit": BOTH_WAYS},
    {"name": "share", "label": "share of the intact pattern", "unit": ""},
]
HEADS_BYTES = 4_000_000  # size of all maps in base64
HEADS_POSITIONS = 256
FEW = 8  # up to this number of heads, thumbnails are larger

Patterns = Float[np.ndarray, "layer head query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class SwitchedMaps:
    """Patterns in every combination of removed players; the combination 0 is the intact model.

    Attributes:
        layers: the layers' numbers.
        panels: the names of the heads and their mean, or of runs.
        maps: nats; bit k of a combination's number says that player k is removed. NaN marks cells
            without a number, such as those of no earlier key.
        measures: amplitude, locality and share of the intact pattern, as a value and the ends of
            its 95% interval.
        block: positions per cell and axis; above 1 the maps are pooled.
        skip_keys: how many first positions the colours leave out.
    """

    layers: tuple[int, ...]
    panels: tuple[str, ...]
    maps: Maps
    measures: Float[np.ndarray, "combination layer panel 3 3"]
    block: int = 1
    skip_keys: int = 0

    def left(self, layer: int, panel: int) -> Float[np.ndarray, " combination"]:
        """Return the share of the intact pattern that each combination leaves of one map."""
        return self.measures[:, layer, panel, MEASURES.index("share"), 0]

    def pooled(self, block: int) -> SwitchedMaps:
        """Return the maps with cells that are means over square blocks of cells."""
        *outer, n, _ = self.maps.shape
        flat = pool(self.maps.reshape(-1, n, n), -(-n // block))
        maps = flat.values.reshape(*outer, *flat.values.shape[1:])
        return replace(self, maps=maps, block=self.block * flat.block)


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """A model's maps behind switches; a notebook shows it, and `save` writes it as a page.

    Attributes:
        title: the title.
        players: the components that each switch removes, by the player's name; bit 0 comes first.
        view: the patterns of all combinations.
        removed: the players that are removed at first.
        layer: the place, in `layers`, of the layer that is shown at first.
        note: a sentence about the run.
        beside: whether the panels are runs, whose maps stand beside each other.
        max_bytes: the largest size of the page; larger maps are pooled.
    """

    title: str
    players: Mapping[str, Sequence[str]]
    view: SwitchedMaps = field(repr=False)  # megabytes in a notebook's file
    removed: Sequence[str] = ()
    layer: int = 0
    note: str = ""
    beside: bool = False
    max_bytes: int = field(default=MAX_BYTES, repr=False)

    def html(self) -> str:
        """Return the explorer as a complete page, which loads nothing."""
        template, style = Template(asset("explorer.html")), asset("explorer.css")
        code = script("explorer.js")
        room = self.max_bytes - sum(map(len, (template.template, style, code)))
        view, packed = fitted(self.view, room)
        content = {
            "colours": STOPS,
            "players": [
                {
                    "name": name,
                    "label": words(name),
                    "colour": colour(name),
                    "components": list(parts),
                }
                for name, parts in self.players.items()
            ],
            "measures": _SHOWN_MEASURES,
            "beside": self.beside,
            "removed": self.combination,
            "layer": self.layer,
            "view": _content(view, packed),
        }
        page = template.substitute(
            title=escape(self.title),
            note=escape(f"{self.note} {_pooling_note(view)}".strip()),
            style=style,
            data=json.dumps(content, separators=(",", ":")).replace("</", "<\\/"),
            script=code,
        )
        # ASCII, because a page that embeds this may not declare its encoding.
        return page.encode("ascii", "xmlcharrefreplace").decode("ascii")

    def frame(self) -> str:
        """Return the explorer in a frame of its own, so that several stand in one page."""
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

    @property
    def combination(self) -> int:
        """The number of the combination that is shown at first."""
        return sum(1 << list(self.players).index(name) for name in self.removed)


def strongest_source(
    left: Float[np.ndarray, " player"], players: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the source whose removal leaves least of a pattern, in the form of `Explorer.removed`.

    If no player is a source, all players count. Without a pattern, the list is empty.

    Args:
        left: the share of the intact pattern that is left without each single player.
        players: the components of each player, by name.

    Example:
        >>> players = {"mask": ["mask"], "rope": ["rope"], "qk": ["w_q", "w_k"]}
        >>> strongest_source(np.array([0.9, 0.2, 0.0]), players)
        ['rope']
    """
    known = {name: share for name, share in zip(players, left, strict=True) if share == share}
    sources = [name for name in known if are_sources(players[name])]
    return sorted(sources or known, key=known.__getitem__)[:1]


def fitted(view: SwitchedMaps, max_bytes: int) -> tuple[SwitchedMaps, dict[str, Any]]:
    """Return a view and its bytes, pooled until they fit or a map is 8 cells wide."""
    shown, packed, block = view, pack(view.maps), 1
    while _n_bytes(packed) > max_bytes and shown.maps.shape[-1] > SMALLEST:
        block += 1
        shown = view.pooled(block)
        packed = pack(shown.maps)
    return shown, packed


def _n_bytes(packed: Mapping[str, Any]) -> int:
    return sum(len(packed[name]) for name in ("cells", "offsets", "scales"))


def _content(view: SwitchedMaps, packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a view in the form that the explorer's script reads."""
    return {
        "layers": view.layers,
        "panels": view.panels,
        "n": view.maps.shape[-1],
        "block": view.block,
        "skip": -(-view.skip_keys // view.block),
        **packed,
        "measures": encoded(view.measures, "<f4"),
    }


def _pooling_note(view: SwitchedMaps) -> str:
    if view.block == 1:
        return ""
    return (
        f"A cell is a mean over {view.block} × {view.block} positions; the numbers are of the "
        "whole maps."
    )


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
        heads: `heads.csv`: layer, head, and the amplitude with its bounds.
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


def positions_of_heads(n_maps: int, max_bytes: int = HEADS_BYTES) -> int:
    """Return how many positions each of n_maps maps may have.

    Example:
        >>> positions_of_heads(16), positions_of_heads(1024)
        (256, 76)
    """
    cells = max_bytes * 3 / 4 / n_maps  # a byte per cell, without cells above the diagonal
    return max(8, min(HEADS_POSITIONS, int(((8 * cells + 1) ** 0.5 - 1) / 2)))
