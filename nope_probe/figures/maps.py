"""Maps -> plotly figures: score maps, sweeps of them, and term maps on one zero-centred scale.

Functions return a `go.Figure`, and `save` writes one with kaleido and Chrome. The query axis points
down and the key axis to the right; both count positions from 0. Cells without a number stay blank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.errors import UserError, kind_of
from nope_probe.figures.names import plain, words
from nope_probe.figures.panels import (
    AXES,
    BAR_DROP,
    MAX_POSITIONS,
    Panel,
    RowMaps,
    heat_map,
    largest_lead,
    panel_groups,
    place_squares,
    pool,
)
from nope_probe.figures.style import (
    DIVERGING,
    FLAT_WORDS,
    NOISE_ERRORS,
    NOISE_NATS,
    PALE,
    SEQUENTIAL,
    SLIDER,
    TITLE_HEIGHT,
    Layout,
    colour_bar,
    flattened,
    percentiles,
    plot_height,
    widened,
)
from nope_probe.figures.words import CLIPPED, WITHIN
from nope_probe.files import NO_BROWSER, local_path, validate_image

if TYPE_CHECKING:
    from nope_probe.maps.maps import AttentionMaps, ScoreMaps

    Maps: TypeAlias = Float[Any, "layer row key_pos"] | ScoreMaps | AttentionMaps | RowMaps
TAKEN = "maps of `capture_scores` or `capture_attention`, or mean scores [layer, row, key_pos]"
MAX_MULTIPLES = 4
WIDTH, SCALE = 1200, 2  # px, and a PNG's pixels per px


def score_maps(
    maps: Maps | Mapping[str, Maps],
    *,
    title: str = "",
    layer: int | None = None,
    layers: Sequence[int] | None = None,
    max_positions: int = MAX_POSITIONS,
    multiples: int = MAX_MULTIPLES,
    clipped: float = CLIPPED,
    noise: Sequence[float] = (),
    high: float | None = None,
) -> go.Figure:
    """Draw the scores, or attention weights, of each layer: side by side, or with a layer slider.

    Every layer has its own scale, because the level of scores, which softmax ignores, differs
    between layers. Several maps by name, such as those with and without the mask, share it. The
    scale leaves out the keys that count as first, whose scores would hide all others: `skip_keys`
    of captured maps and of `RowMaps`. A map whose cells differ by no more than their errors is
    drawn flat.

    Args:
        maps: the result of `capture_scores` or `capture_attention` (means over heads, or
            `maps.head(3, 4)` of one head), a simulation's estimate, or mean scores in nats, pooled
            or not; of chosen queries' rows, as `RowMaps`; or several of these by name.
        title: the figure's title.
        layer: the number of the layer that a slider shows first; the first by default.
        layers: the layers' numbers; by default those of captured maps, else from 0.
        max_positions: larger maps are pooled to this many positions.
        multiples: the largest number of layers that are drawn side by side.
        clipped: percentage of the cells beyond each colour limit.
        noise: each layer's standard error of a cell, nats.
        high: the upper end of one scale for all maps, from 0, as the paper draws them; nats.

    Example:
        >>> from nope_probe import capture_scores, figures, gaussian, load
        >>> vectors = gaussian(n_seqs=16, seq_len=11, d_model=64).inputs
        >>> maps = capture_scores(load("parameter-free", n_layers=2).model, vectors)
        >>> [panel.name for panel in figures.score_maps(maps).data]
        ['L0', 'L1']
    """
    named = maps if isinstance(maps, Mapping) else {"": maps}
    pooled, first = _all_pooled(named, max_positions)
    unit = "attention weight" if hasattr(first, "mean_over_heads") else "nats"
    what = "attention score" if unit == "nats" else unit
    title = title or f"Mean {what} of each query for each key"
    numbers, names = _numbers(first, layers, len(pooled[0].values)), [plain(name) for name in named]
    labels, has_slider = [f"L{number}" for number in numbers], len(numbers) > multiples
    if layers is None and not has_slider:
        labels = getattr(first, "names", labels)
    n_first, groups = -(-pooled[0].skip_keys // pooled[0].block), list[list[Panel]]()
    for place, label in enumerate(labels):
        shown = np.stack([maps.values[place, :, n_first:] for maps in pooled])
        bottom, top = percentiles(shown, (clipped, 100 - clipped)).tolist()
        floor = max(NOISE_NATS, NOISE_ERRORS * noise[place]) if noise else NOISE_NATS
        fitted = widened(bottom, top, floor)
        low, top, is_flat = fitted if high is None else (0.0, high, False)
        about = {"low": low, "high": top, "unit": unit}
        of_names = [", ".join(filter(None, (label, name))) + FLAT_WORDS * is_flat for name in names]
        called = [name or label for name in names] if has_slider else of_names
        groups.append(
            [maps.panel(place, name, **about) for name, maps in zip(called, pooled, strict=True)]
        )
    if has_slider:
        return _layered(groups, [names] * len(groups), title, numbers, layer)
    in_a_row = [[panel for group in groups for panel in group]]
    return panel_groups(groups if len(named) > 1 else in_a_row, title=title)


def term_maps(
    terms: Mapping[str, Maps],
    *,
    title: str,
    layer: int | None = None,
    layers: Sequence[int] | None = None,
    max_positions: int = MAX_POSITIONS,
    noise: Sequence[float] = (),
    flat: Mapping[str, Collection[int]] | None = None,
    rows: int = 1,
) -> go.Figure:
    """Draw terms of a pattern side by side, on one zero-centred scale, with a layer slider.

    Where keys count as first (`skip_keys` of captured maps and of `RowMaps`), a strip left of each
    map has the lead, with a scale and a colour bar for the leads. A layer whose first term does not
    exceed its noise is drawn on the scale of the strongest layer.

    Args:
        terms: maps by name (sources, mean and covariance terms, `intact`), nats, of one shape;
            pooled or not; of chosen queries' rows, as `RowMaps`.
        title: the figure's title.
        layer: the number of the layer that the slider shows first; the first by default.
        layers: the layers' numbers; by default those of captured maps, else from 0.
        max_positions: larger maps are pooled to this many positions.
        noise: each layer's standard error of a cell; colours span at least three standard errors,
            so that noise is pale.
        flat: by term, the numbers of the layers in which the term does not exceed its noise; the
            title names them.
        rows: the number of rows, of equal length, for the terms.

    Example:
        >>> import numpy as np
        >>> from nope_probe import figures
        >>> maps = {"mask": np.zeros((3, 7, 7)), "rope": np.ones((3, 7, 7))}
        >>> len(figures.term_maps(maps, title="Sources").data)
        6
    """
    pooled, first = _all_pooled(terms, max_positions, with_leads=True)
    by_layer = np.stack([maps.values for maps in pooled], axis=1)
    numbers, flat = _numbers(first, layers, len(by_layer)), flat or {}
    floors = [max(NOISE_NATS, PALE * error) for error in noise or [0.0] * len(by_layer)]
    tops = [
        max(floor, *percentiles(np.abs(values), (100 - CLIPPED,)).tolist())
        for values, floor in zip(by_layer, floors, strict=True)
    ]
    flat_first = flat.get(next(iter(terms)), ())
    tops = flattened(tops, [place for place, number in enumerate(numbers) if number in flat_first])
    names = [plain(words(name)) for name in terms]
    groups = [
        [
            maps.panel(place, name, low=-top, high=top, diverging=True)
            for name, maps in zip(names, pooled, strict=True)
        ]
        for place, top in enumerate(tops)
    ]
    note = f"<br><i>{WITHIN}</i>"
    titles = [
        [
            name + note * (number in flat.get(term, ()))
            for name, term in zip(names, terms, strict=True)
        ]
        for number in numbers
    ]
    return _layered(groups, titles, title, numbers, layer, rows)


def _numbers(maps: object, layers: Sequence[int] | None, n_layers: int) -> Sequence[int]:
    """Return the numbers of the layers of some maps."""
    known = getattr(maps, "layers", range(n_layers)) if layers is None else layers
    return [int(layer) for layer in known]


def _all_pooled(
    maps: Mapping[str, Maps], max_positions: int, with_leads: bool = False
) -> tuple[list[RowMaps], Maps]:
    """Return pooled maps by their names' order, and the first of the maps.

    Raises:
        UserError: for what are no maps by name, or for maps of unlike sizes.
    """
    if not isinstance(maps, Mapping) or not maps:
        raise UserError(f"expected maps by name, such as {{'mask': maps}}, got {kind_of(maps)}")
    pooled = [_pooled(of_name, max_positions, with_leads) for of_name in maps.values()]
    sizes = {name: [*of.values.shape] for name, of in zip(maps, pooled, strict=True)}
    if any(size != [*pooled[0].values.shape] for size in sizes.values()):
        raise UserError(f"the maps differ in their layers or positions: {sizes}")
    return pooled, next(iter(maps.values()))


def _pooled(maps: Maps, max_positions: int, with_leads: bool) -> RowMaps:
    """Return pooled maps of layers; for captured or simulated maps, of their mean."""
    if isinstance(maps, RowMaps):
        rows = maps
    elif hasattr(maps, "of_head"):
        values = np.asarray(getattr(maps, "mean_over_heads", maps.mean))
        queries, skip_keys = maps.query_positions.numpy(), maps.skip_keys
        rows = RowMaps(values=values, queries=queries, skip_keys=skip_keys)
    else:
        rows = RowMaps(values=np.asarray(maps.mean if hasattr(maps, "folds") else maps))
    if rows.values.ndim != 3 or rows.values.dtype == object:
        raise UserError(f"expected {TAKEN}, got {kind_of(maps)}")
    return pool(rows, max_positions, with_leads)


def _layered(
    groups: Sequence[Sequence[Panel]],
    titles: Sequence[Sequence[str]],
    title: str,
    layers: Sequence[int],
    layer: int | None,
    rows: int = 1,
) -> go.Figure:
    """Return a figure whose slider shows the maps of a layer, with that layer's colour limits.

    Args:
        groups: the maps of each layer, which are on one scale.
        titles: their titles, which differ between layers.
        title: the figure's title.
        layers: the numbers of the layers.
        layer: the layer that is shown first; the first by default.
        rows: the number of rows, of equal length, for the maps.
    """
    n, first, unit = len(groups[0]), 0 if layer is None else layers.index(layer), groups[0][0].unit
    columns = n // rows if rows > 1 else n if n <= 5 else -(-n // 2)
    figure = place_squares(title, titles[first], columns=columns, row_gap=64)
    scales = [(group[0].low, group[0].high) for group in groups]
    bars = [("coloraxis", unit, 0.5, scales)]
    tops = [largest_lead(group) for group in groups if any(x.leads is not None for x in group)]
    if tops:
        ends = [(-top, top) for top in tops]
        bars = [
            ("coloraxis", unit, 0.68, scales),
            ("coloraxis2", "first key's lead, nats", 0.32, ends),
        ]
    patches: list[Layout] = [
        {f"annotations[{place}].text": text for place, text in enumerate(of_layer)}
        for of_layer in titles
    ]
    colours = {"colorscale": DIVERGING if groups[0][0].diverging else SEQUENTIAL}
    below = -(BAR_DROP + AXES) / plot_height(figure)
    for name, of, middle, limits in bars:
        bar = colour_bar(of, (middle - 0.15, middle + 0.15), below) | {"nticks": 6}
        low, high = limits[first]
        figure.update_layout({name: colours | {"colorbar": bar, "cmin": low, "cmax": high}})
        for patch, (low, high) in zip(patches, limits, strict=True):
            patch |= {f"{name}.cmin": low, f"{name}.cmax": high}
    traces = [
        trace
        for place, group in enumerate(groups)
        for at, panel in enumerate(group)
        for trace in heat_map(panel, at, visible=place == first)
    ]
    figure.add_traces(traces)
    meta = {"n_layers": len(layers), "first": first, "patches": patches}
    figure.update_layout(meta=meta | {"scales": scales, "leads": tops})
    figure.by_layer = dict(zip(map("L{}".format, layers), groups, strict=True))
    return _with_slider(figure, layers)


def _with_slider(figure: go.Figure, layers: Sequence[int]) -> go.Figure:
    """Add the layer slider below the panels; traces go by layer, then panel."""
    meta, steps, below = figure.layout.meta, [], figure.layout.margin.b
    per_layer = len(figure.data) // len(layers)
    for place, (layer, patch) in enumerate(zip(layers, meta["patches"], strict=True)):
        visible = [shown == place for shown in range(len(layers)) for _ in range(per_layer)]
        step = {"label": str(layer), "method": "update", "args": [{"visible": visible}, patch]}
        steps.append(step)
    where = {"x": 0, "len": 1, "y": -below / plot_height(figure), "yanchor": "top"}
    look = {"currentvalue": {"prefix": "L"}, "pad": {"t": 0, "b": 0}}
    # The margin grows by the slider's height, so that the panels keep their size.
    return figure.update_layout(
        sliders=[{"active": meta["first"], "steps": steps, **where, **look}],
        margin_b=below + SLIDER,
        height=figure.layout.height + SLIDER,
    )


def unfold_layers(figure: go.Figure) -> go.Figure:
    """Return a figure of all layers' maps, on separate colour scales, instead of a slider.

    A figure without a slider comes back as it is.

    Example:
        >>> from nope_probe import figures
        >>> one = figures.term_maps({"all": np.ones((3, 5, 5))}, title="pattern")
        >>> [panel.name for panel in unfold_layers(one).data]
        ['L0', 'L1', 'L2']
    """
    by_layer = getattr(figure, "by_layer", {})
    if len(by_layer) < 2:
        return figure
    groups = [
        [replace(panel, name=f"{of}, {panel.name}" if len(group) > 1 else of) for panel in group]
        for of, group in by_layer.items()
    ]
    return panel_groups(groups, title=figure.layout.title.text or "")


def save(figure: go.Figure, path: str | Path) -> Path:
    """Draw a figure into a file for print, on white, without title and sliders.

    A slider over layers becomes a panel for each layer. Each panel has a separate colour scale.

    Args:
        figure: any figure of `nope_probe.figures`, which is not changed; a plotly copy of one has
            only the layer that its slider shows.
        path: a .pdf, .png or .svg file, 1200 px wide (a PNG has twice as many pixels), which is
            overwritten.

    Returns:
        The path.

    Raises:
        UserError: for another ending, if kaleido or Chrome is missing, or if the file cannot be
            written.
    """
    return export(go.Figure(without_title(unfold_layers(figure))), Path(path))


def export(figure: go.Figure, path: Path) -> Path:
    """Draw a figure into a file, on white and without its buttons and sliders.

    Args:
        figure: any figure of this project; it is not changed.
        path: a .pdf, .png or .svg file, which is overwritten.

    Returns:
        The path, absolute.

    Raises:
        UserError: for another ending, if kaleido or Chrome is missing, or if the file cannot be
            written.
    """
    path = local_path(path)
    validate_image(path)
    still = go.Figure(without_controls(figure))
    still.update_layout(paper_bgcolor="white", updatemenus=(), overwrite=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        still.write_image(path, width=WIDTH, height=still.layout.height, scale=SCALE)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except RuntimeError as error:
        raise UserError(NO_BROWSER) from error
    return path


def without_controls(figure: go.Figure) -> Layout:
    """Return a figure's `data` and `layout` without sliders and their space."""
    spec = figure.to_plotly_json()
    layout = spec["layout"]
    if layout.pop("sliders", ()):
        layout["margin"]["b"] -= SLIDER
        layout["height"] -= SLIDER
    return spec


def without_title(figure: go.Figure) -> Layout:
    """Return a figure's `data` and `layout` without its title and sliders, and their space."""
    spec = without_controls(figure)
    layout = spec["layout"]
    if layout.get("title", {}).pop("text", None):
        layout["margin"]["t"] -= TITLE_HEIGHT
        layout["height"] -= TITLE_HEIGHT
    return spec
