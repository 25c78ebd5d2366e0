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
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.components import are_sources
from nope_probe.figures.circuit_figure import formula
from nope_probe.figures.circuit_layout import OPERATIONS, narrow, wide
from nope_probe.figures.intervals import FLOOR, symmetric
from nope_probe.figures.names import colour, words
from nope_probe.figures.packed import Maps, asset, encoded, pack, quantise, script
from nope_probe.figures.panels import RowMaps, pool
from nope_probe.figures.style import STOPS
from nope_probe.figures.words import BOTH_WAYS
from nope_probe.files import local_path
from nope_probe.stages import LETTERS, SCORE_STAGES, STAGE_MEANINGS, Letter

MAX_BYTES = 4_900_000  # size of an explorer in a notebook or a file
SMALLEST = 8  # cells along an axis; no map is pooled below this
HEIGHT = 760  # px of a frame until its script measures the content
MEASURES = ("amplitude", "locality", "share")
_SHOWN_MEASURES = [  # the script writes the panel's unit after the amplitude
    {"name": "amplitude", "label": "amplitude", "unit": ""},
    {"name": "locality", "label": "locality", "unit": BOTH_WAYS},
    {"name": "share", "label": "share of the intact pattern", "unit": ""},
]
HEADS_BYTES = 4_000_000  # size of all maps in base64
HEADS_POSITIONS = 256
FEW = 8  # up to this number of heads, thumbnails are larger

Patterns = Float[np.ndarray, "layer head query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class SwitchedMaps:
    """Maps of every combination of removed players; the combination 0 is the intact model.

    Attributes:
        kind: patterns of heads, or the stages of blocks.
        layers: the layers' numbers.
        panels: the heads' names, or the stages' letters.
        maps: nats, or inner products; bit k of a combination's number says that player k is
            removed. NaN marks cells without a number.
        measures: amplitude, locality and share of the intact pattern, as a value and the ends of
            its 95% interval.
        block: positions per cell and axis; above 1 the maps are pooled.
        absent: per layer, the stages that it lacks, with the reasons.
        skip_keys: how many first positions the colours leave out.
        whole: for combinations that were also run on all sequences of a run, by number: the places
            in `maps` of the intact model and the combination on all sequences. This intact model
            is shown beside every combination.
        n_seqs: with such combinations, the number of sequences behind the other maps and behind
            these.
    """

    kind: Literal["pattern", "circuit"]
    layers: tuple[int, ...]
    panels: tuple[str, ...]
    maps: Maps
    measures: Float[np.ndarray, "combination layer panel 3 3"]
    block: int = 1
    absent: tuple[Mapping[str, str], ...] = ()
    skip_keys: int = 0
    whole: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    n_seqs: tuple[int, int] | None = None

    def beside(
        self, whole: SwitchedMaps, combinations: Sequence[int], n_seqs: tuple[int, int]
    ) -> SwitchedMaps:
        """Return these maps beside maps of all sequences of a run, in some combinations.

        Args:
            whole: the maps of all sequences, the intact model's first.
            combinations: the numbers of their combinations, 0 first.
            n_seqs: the number of sequences behind these maps, and behind `whole`.
        """
        first = len(self.maps)
        return replace(
            self,
            maps=np.concatenate([self.maps, whole.maps]),
            measures=np.concatenate([self.measures, whole.measures]),
            whole={number: (first, first + place) for place, number in enumerate(combinations)},
            n_seqs=n_seqs,
        )

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
        views: patterns, stages or both, of the same combinations.
        components: the components that the model has.
        removed: the players that are removed at first.
        layer: the place, in `layers`, of the layer that is shown at first.
        note: a sentence about the run.
        beside: whether the panels are runs, whose maps stand beside each other.
        max_bytes: the largest size of the page; larger maps are pooled.
    """

    title: str
    players: Mapping[str, Sequence[str]]
    views: tuple[SwitchedMaps, ...] = field(repr=False)  # megabytes in a notebook's file
    components: Sequence[str]
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
        views = [_content(view, packed) for view, packed in fitted(self.views, room)]
        known = (None, *self.components)
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
            "operations": {
                arrow: [(text, name) for text, name in operations if name in known]
                for arrow, operations in OPERATIONS.items()
            },
            "flows": {"wide": vars(wide()), "narrow": vars(narrow())},
            "beside": self.beside,
            "removed": self.combination,
            "layer": self.layer,
            "panel": self._first_panel(),
            "views": views,
        }
        page = template.substitute(
            title=escape(self.title),
            note=escape(" ".join([self.note, *_pooling_note(views)]).strip()),
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

    def _first_panel(self) -> int:
        """Return the panel that is shown at first: the mean over heads, or the last stage."""
        view = self.views[0]
        if view.kind == "pattern":
            return 0
        known = np.isfinite(view.maps[0, self.layer]).any(axis=(1, 2))
        return int(np.flatnonzero(known)[-1])


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


def fitted(
    views: Sequence[SwitchedMaps], max_bytes: int
) -> list[tuple[SwitchedMaps, dict[str, Any]]]:
    """Return views and their bytes, pooling the largest until all fit or are 8 cells wide."""
    blocks = [1 for _ in views]
    shown = [(view, pack(view.maps)) for view in views]
    while sum(sizes := [_n_bytes(packed) for _, packed in shown]) > max_bytes:
        can_shrink = [i for i, (view, _) in enumerate(shown) if view.maps.shape[-1] > SMALLEST]
        if not can_shrink:
            break
        largest = max(can_shrink, key=lambda index: sizes[index])
        blocks[largest] += 1
        view = views[largest].pooled(blocks[largest])
        shown[largest] = view, pack(view.maps)
    return shown


def _n_bytes(packed: Mapping[str, Any]) -> int:
    return sum(len(packed[name]) for name in ("cells", "offsets", "scales"))


def _content(view: SwitchedMaps, packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a view in the form that the explorer's script reads."""
    panels = zip(view.panels, packed["shapes"], strict=True)
    return {
        "kind": view.kind,
        "title": "Positional pattern" if view.kind == "pattern" else "Stages of the block",
        "layers": view.layers,
        "panels": [_panel(view.kind, name, shape) for name, shape in panels],
        "absent": view.absent or [{} for _ in view.layers],
        "n": view.maps.shape[-1],
        "block": view.block,
        "skip": -(-view.skip_keys // view.block),
        "whole": view.whole,
        "nSeqs": view.n_seqs,
        **{name: packed[name] for name in ("cells", "offsets", "scales")},
        "measures": encoded(view.measures, "<f4"),
    }


def _pooling_note(views: Sequence[Mapping[str, Any]]) -> list[str]:
    blocks = {view["kind"]: view["block"] for view in views if view["block"] > 1}
    names = {"pattern": "patterns", "circuit": "stages"}
    return [
        f"A cell of the {names[kind]} is a mean over {block} × {block} positions; the numbers are "
        "of the whole maps."
        for kind, block in blocks.items()
    ]


def _panel(kind: str, name: str, shape: str) -> dict[str, str]:
    if kind == "pattern":
        return {"name": name, "label": name, "shape": shape, "unit": "nats"}
    letter: Letter = next(known for known in LETTERS if known == name)
    return {
        "name": name,
        "label": f"({letter}) {STAGE_MEANINGS[letter]}",
        "shape": shape,
        "unit": "nats" if letter in SCORE_STAGES else "",
        "formula": f"<strong>({letter})</strong> {formula(letter)}",
    }


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
