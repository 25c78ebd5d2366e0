"""Maps -> plotly figures: score maps, and rows of term maps on one zero-centred scale.

Every function takes values and gives a `go.Figure`; none shows or writes. The query axis points
down, the key axis right, both count positions from 0; cells without a number stay blank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figure_style import (
    BLANK,
    DIVERGING,
    MAX_MULTIPLES,
    SEQUENTIAL,
    Grid,
    add_meta,
    axis,
    place,
    words,
)

MAX_POSITIONS = 256
CLIPPED = 0.5


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Maps whose cells are means over square blocks of positions.

    Attributes:
        values: nats (or what the maps held); NaN where a block holds no number.
        block: positions per block and axis; 1 if nothing was pooled.
    """

    values: Float[np.ndarray, "layer query_block key_block"]
    block: int


def pool(maps: Float[np.ndarray, "layer query_pos key_pos"], max_positions: int) -> Pooled:
    """Average square blocks of cells until no axis is longer than max_positions.

    A block's mean leaves out cells without a number, such as those above the diagonal: a block that
    the diagonal cuts is the mean of what lies below. The last block may be smaller.

    Raises:
        ValueError: if max_positions is below 1.
    """
    if max_positions < 1:
        raise ValueError(f"expected at least 1 position, got {max_positions}")
    block = -(-maps.shape[-1] // max_positions)
    if block == 1:
        return Pooled(values=maps.astype(np.float32), block=1)
    known = np.isfinite(maps)
    sums = _block_sums(np.where(known, maps, 0.0), block)
    counts = _block_sums(known, block)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return Pooled(values=means.astype(np.float32), block=block)


def _block_sums(cells: np.ndarray, block: int) -> np.ndarray:
    rows = np.add.reduceat(cells, np.arange(0, cells.shape[1], block), axis=1, dtype=np.float64)
    return np.add.reduceat(rows, np.arange(0, cells.shape[2], block), axis=2)


def row_centred(
    maps: Float[np.ndarray, "layer query_pos key_pos"], skip_keys: int = 0
) -> Float[np.ndarray, "layer query_pos key_pos"]:
    """Take from each row its mean over skip_keys <= j < i: what attention can see of a score map.

    The same as `analyses.pattern.row_centred`, here without torch. Other cells become NaN.
    """
    inside = np.tri(*maps.shape[-2:], k=-1, dtype=bool)
    inside[:, :skip_keys] = False
    sums = np.where(inside, maps, 0.0).sum(-1, keepdims=True, dtype=np.float64)
    means = sums / np.maximum(inside.sum(-1, keepdims=True), 1)
    return np.where(inside, maps - means, np.nan).astype(np.float32)


def score_maps(
    maps: Float[np.ndarray, "layer query_pos key_pos"],
    *,
    title: str = "Mean attention score of each query for each key",
    max_positions: int = MAX_POSITIONS,
) -> go.Figure:
    """Draw the score map of each layer: side by side up to 4 layers, else with a layer slider.

    Args:
        maps: mean scores, nats; layers are counted from 1 in the figure.
        max_positions: larger maps are pooled to this many positions.
    """
    pooled = pool(maps, max_positions)
    if len(maps) > MAX_MULTIPLES:
        figure = _layered([pooled], [""], SEQUENTIAL, limits(pooled.values))
        _place_maps(figure, title, [""])
        return figure
    figure = go.Figure()
    names = [f"layer {layer}" for layer in range(1, len(maps) + 1)]
    for index, name in enumerate(names):
        figure.add_trace(_heat(pooled, index, index, name, f"coloraxis{axis(index)}"))
    _place_maps(figure, title, names)
    _own_colour_bars(figure, len(names))
    return figure


def term_maps(
    terms: Mapping[str, Float[np.ndarray, "layer query_pos key_pos"]],
    *,
    title: str,
    layer: int = 1,
    max_positions: int = MAX_POSITIONS,
) -> go.Figure:
    """Draw terms of a pattern in one row, on one zero-centred scale, with a layer slider.

    Args:
        terms: maps by name (sources, players, routes, `all`), nats; all of one shape.
        layer: which layer is seen first, from 1.
        max_positions: larger maps are pooled to this many positions.

    Raises:
        ValueError: if there is no term.
    """
    if not terms:
        raise ValueError("expected at least one term map")
    pooled = [pool(maps, max_positions) for maps in terms.values()]
    widest = np.stack([_symmetric(np.stack(row)) for row in zip(*(p.values for p in pooled))])
    names = [words(name) for name in terms]
    figure = _layered(pooled, names, DIVERGING, widest, first=layer)
    _place_maps(figure, title, names)
    return figure


def limits(maps: Float[np.ndarray, "layer row column"]) -> Float[np.ndarray, "layer 2"]:
    """Give each map's colour limits: the percentiles that clip 1/2% of the cells at either end."""
    return np.stack([_percentiles(each, (CLIPPED, 100 - CLIPPED)) for each in maps])


def _symmetric(values: np.ndarray) -> np.ndarray:
    top = _percentiles(np.abs(values), (100 - CLIPPED,))[0] or 1.0
    return np.array([-top, top])


def _percentiles(values: np.ndarray, at: Sequence[float]) -> np.ndarray:
    known = values[np.isfinite(values)]
    return np.percentile(known, at) if known.size else np.zeros(len(at))


def _heat(pooled: Pooled, layer: int, panel: int, name: str, coloraxis: str) -> go.Heatmap:
    start, about = (pooled.block - 1) / 2, "≈ " if pooled.block > 1 else ""
    cells = f" (mean of {pooled.block} × {pooled.block})" if pooled.block > 1 else ""
    return go.Heatmap(
        z=pooled.values[layer],
        x0=start,
        dx=pooled.block,
        y0=start,
        dy=pooled.block,
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        coloraxis=coloraxis,
        name=name,
        hoverongaps=False,
        hovertemplate=(
            f"query {about}%{{y:.0f}}<br>key {about}%{{x:.0f}}"
            f"<br>%{{z:.3g}} nat{cells}<extra>{name}</extra>"
        ),
    )


def _layered(
    pooled: Sequence[Pooled], names: Sequence[str], scale: str, limits: np.ndarray, first: int = 1
) -> go.Figure:
    """One trace per layer and panel, of which a slider shows one layer, with that layer's scale."""
    n_layers = len(pooled[0].values)
    figure = go.Figure()
    for layer in range(n_layers):
        for panel, (maps, name) in enumerate(zip(pooled, names, strict=True)):
            trace = _heat(maps, layer, panel, name or f"layer {layer + 1}", "coloraxis")
            figure.add_trace(trace.update(visible=layer + 1 == first))
    steps = [_step(layer, n_layers, len(pooled), limits[layer]) for layer in range(n_layers)]
    figure.update_layout(
        coloraxis=_coloraxis(scale, limits[first - 1]),
        sliders=[{"active": first - 1, "currentvalue": {"prefix": "layer "}, "steps": steps}],
    )
    add_meta(figure, n_layers=n_layers, first=first)
    return figure


def _step(layer: int, n_layers: int, panels: int, limits: np.ndarray) -> dict[str, object]:
    visible = [each == layer for each in range(n_layers) for _ in range(panels)]
    scale = {"coloraxis.cmin": float(limits[0]), "coloraxis.cmax": float(limits[1])}
    return {"label": str(layer + 1), "method": "update", "args": [{"visible": visible}, scale]}


def _coloraxis(scale: str, limits: np.ndarray) -> dict[str, object]:
    bar = {"orientation": "h", "thickness": 10, "title": {"text": "nats", "side": "bottom"}}
    low, high = float(limits[0]), float(limits[1])
    return {"colorscale": scale, "cmin": low, "cmax": high, "colorbar": bar}


def _place_maps(figure: go.Figure, title: str, panels: Sequence[str]) -> None:
    wide = Grid(columns=max(2, min(len(panels), 5)), row_height=300, bottom=150)
    narrow = Grid(columns=2 if len(panels) > 1 else 1, row_height=250, bottom=150)
    place(figure, title, panels, wide, narrow)
    figure.update_layout(plot_bgcolor=BLANK)
    for index in range(len(panels)):
        x, y = f"xaxis{axis(index)}", f"yaxis{axis(index)}"
        figure.update_layout(
            {
                x: {"title": "key position", "constrain": "domain", "showgrid": False},
                y: {
                    "title": "query position" if index == 0 else None,
                    "autorange": "reversed",
                    "scaleanchor": f"x{axis(index)}",
                    "constrain": "domain",
                    "showgrid": False,
                },
            }
        )


def _own_colour_bars(figure: go.Figure, panels: int) -> None:
    for index in range(panels):
        figure.update_layout({f"coloraxis{axis(index)}": {"colorscale": SEQUENTIAL}})
