"""Maps -> plotly figures: score maps, sweeps of them, and term maps on one zero-centred scale.

Functions return a `go.Figure`, and `save` writes one with kaleido and Chrome. The query axis points
down and the key axis to the right; both count positions from 0. Cells without a number stay blank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
    Pooled,
    RowMaps,
    heat_map,
    panel_groups,
    place_squares,
    pool,
    pool_with_leads,
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
    ColourScale,
    Layout,
    PlotlyTrace,
    add_slider,
    colour_bar,
    colour_limits,
    finite,
    flattened,
    percentiles,
    plot_height,
    symmetric,
    widened,
)
from nope_probe.figures.words import CLIPPED, WITHIN
from nope_probe.files import NO_BROWSER, local_path, validate_image_name, validate_kaleido

if TYPE_CHECKING:
    from nope_probe.maps.maps import AttentionMaps, ScoreMaps

    Maps: TypeAlias = Float[Any, "layer row key_pos"] | ScoreMaps | AttentionMaps | RowMaps | Pooled
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
    by_layer, unit = np.stack([of.values for of in pooled], axis=1), _unit(first)
    what = "attention score" if unit == "nats" else unit
    title = title or f"Mean {what} of each query for each key"
    shown = by_layer[..., -(-pooled[0].skip_keys // pooled[0].block) :]
    limits = []
    for values, error in zip(shown, noise or [0.0] * len(shown), strict=True):
        bottom, top = percentiles(values, (clipped, 100 - clipped)).tolist()
        fitted = widened(bottom, top, max(NOISE_NATS, NOISE_ERRORS * error))
        limits.append(fitted if high is None else (0.0, high, False))
    numbers = _numbers(first, layers, len(limits))
    names = [plain(name) for name in named]
    if len(limits) > multiples:
        scales = np.array([(low, high) for low, high, _ in limits])
        titles = [names] * len(limits)
        return _layered(pooled, names, titles, title, SEQUENTIAL, scales, numbers, layer, unit=unit)
    labels = [f"L{number}" for number in numbers]
    if layers is None:
        labels = getattr(first, "names", labels)
    groups = [
        [
            Panel(
                name=f"{label}{', ' * bool(name)}{name}{FLAT_WORDS * is_flat}",
                values=values,
                low=low,
                high=high,
                unit=unit,
                positions=pooled[0].block * len(values),
            )
            for name, values in zip(names, of_layer, strict=True)
        ]
        for label, of_layer, (low, high, is_flat) in zip(labels, by_layer, limits, strict=True)
    ]
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
    pooled, first = _all_pooled(terms, max_positions, pool_with_leads)
    by_layer = np.stack([maps.values for maps in pooled], axis=1)
    floors = [max(NOISE_NATS, PALE * error) for error in noise or [0.0] * len(by_layer)]
    tops = [symmetric(values, floor) for values, floor in zip(by_layer, floors, strict=True)]
    numbers = _numbers(first, layers, len(tops))
    flat = flat or {}
    flat_first = flat.get(next(iter(terms)), ())
    limits = flattened(tops, [i for i, number in enumerate(numbers) if number in flat_first])
    note = f"<br><i>{WITHIN}</i>"
    titles = [
        [plain(words(name)) + (note if number in flat.get(name, ()) else "") for name in terms]
        for number in numbers
    ]
    names = [plain(words(name)) for name in terms]
    return _layered(pooled, names, titles, title, DIVERGING, limits, numbers, layer, rows)


def _numbers(maps: object, layers: Sequence[int] | None, n_layers: int) -> Sequence[int]:
    """Return the numbers of the layers of some maps."""
    known = getattr(maps, "layers", range(n_layers)) if layers is None else layers
    return [int(layer) for layer in known]


def _unit(maps: object) -> str:
    """Return what the cells of maps are: nats of scores, or weights."""
    return "attention weight" if hasattr(maps, "mean_over_heads") else "nats"


def _all_pooled(
    maps: Mapping[str, Maps], max_positions: int, pooling: Callable[[RowMaps, int], Pooled] = pool
) -> tuple[list[Pooled], Maps]:
    """Return pooled maps by their names' order, and the first of the maps.

    Raises:
        UserError: for what are no maps by name, or for maps of unlike sizes.
    """
    if not isinstance(maps, Mapping) or not maps:
        raise UserError(f"expected maps by name, such as {{'mask': maps}}, got {kind_of(maps)}")
    pooled = [_pooled(of_name, max_positions, pooling) for of_name in maps.values()]
    sizes = {name: [*of.values.shape] for name, of in zip(maps, pooled, strict=True)}
    if any(size != [*pooled[0].values.shape] for size in sizes.values()):
        raise UserError(f"the maps differ in their layers or positions: {sizes}")
    return pooled, next(iter(maps.values()))


def _pooled(
    maps: Maps, max_positions: int, pooling: Callable[[RowMaps, int], Pooled] = pool
) -> Pooled:
    """Return pooled maps of layers; for captured or simulated maps, of their mean."""
    if isinstance(maps, Pooled):
        return maps
    if isinstance(maps, RowMaps):
        return pooling(maps, max_positions)
    if hasattr(maps, "of_head"):
        values = np.asarray(getattr(maps, "mean_over_heads", maps.mean))
        queries, skip_keys = maps.query_positions.numpy(), maps.skip_keys
        return pooling(RowMaps(values=values, queries=queries, skip_keys=skip_keys), max_positions)
    cells = np.asarray(maps.mean if hasattr(maps, "folds") else maps)
    if cells.ndim != 3 or cells.dtype == object:
        raise UserError(f"expected {TAKEN}, got {kind_of(maps)}")
    return pooling(RowMaps(values=cells), max_positions)


def _layered(
    pooled: Sequence[Pooled],
    names: Sequence[str],
    titles: Sequence[Sequence[str]],
    title: str,
    colours: ColourScale,
    limits: Float[np.ndarray, "layer 2"],
    layers: Sequence[int],
    layer: int | None,
    rows: int = 1,
    unit: str = "nats",
) -> go.Figure:
    """Return a figure whose slider shows a layer of all maps, with that layer's colour limits.

    The maps are side by side; titles differ between layers.
    """
    n, first = len(pooled), 0 if layer is None else layers.index(layer)
    has_leads = any(maps.leads is not None for maps in pooled)
    tops = [largest_lead(pooled, place) for place in range(len(layers))] if has_leads else []
    traces: list[PlotlyTrace] = []
    for place, number in enumerate(layers):
        for panel, (maps, name) in enumerate(zip(pooled, names, strict=True)):
            traces += heat_map(
                maps.values[place],
                float(maps.block),
                panel,
                name=name or f"L{number}",
                value=f"%{{z:.3g}} {unit}",
                visible=place == first,
                leads=None if maps.leads is None else maps.leads[place],
            )
    figure = place_squares(
        title,
        titles[first],
        columns=n // rows if rows > 1 else n if n <= 5 else -(-n // 2),
        row_gap=64,
    )
    patches: list[Layout] = [
        {f"annotations[{i}].text": t for i, t in enumerate(of_layer)} for of_layer in titles
    ]
    below = -(BAR_DROP + AXES) / plot_height(figure)
    bar = colour_bar(unit, (0.53, 0.83) if has_leads else (0.35, 0.65), below)
    axis = {"colorbar": {**bar, "nticks": 6}, "colorscale": colours}
    figure.update_layout(coloraxis=axis | colour_limits(limits[first]))
    if has_leads:
        bar = colour_bar("first key's lead, nats", (0.17, 0.47), below)
        axis = {"colorbar": {**bar, "nticks": 6}, "colorscale": colours}
        figure.update_layout(coloraxis2=axis | colour_limits((-tops[first], tops[first])))
        for patch, top in zip(patches, tops, strict=True):
            patch |= colour_limits((-top, top), "coloraxis2.")
    add_slider(figure, layers, len(traces) // len(layers), first, limits, patches)
    figure.layout.meta["leads"] = tops
    return figure.add_traces(traces)


def largest_lead(pooled: Sequence[Pooled], place: int) -> float:
    """Return the largest of a layer's leads in all of its maps, nats; at least `NOISE_NATS`."""
    leads = [finite(maps.leads[place]) for maps in pooled if maps.leads is not None]
    return max([NOISE_NATS, *(float(np.abs(of_map).max(initial=0.0)) for of_map in leads)])


def unfold_layers(figure: go.Figure) -> go.Figure:
    """Return a figure of all layers' maps, on separate colour scales, instead of a slider.

    A figure without a slider, or of curves, comes back as it is.

    Example:
        >>> from nope_probe import figures
        >>> one = figures.term_maps({"all": np.ones((3, 5, 5))}, title="pattern")
        >>> [panel.name for panel in unfold_layers(one).data]
        ['L0', 'L1', 'L2']
    """
    meta = figure.layout.meta or {}
    scales = meta.get("scales") or []
    if len(scales) < 2:
        return figure
    per_layer = len(figure.data) // len(scales)
    slider = figure.layout.sliders[0]
    labels = [f"{slider.currentvalue.prefix}{step.label}" for step in slider.steps]
    groups: list[list[Panel]] = []
    for place, (label, (low, high)) in enumerate(zip(labels, scales, strict=True)):
        traces = figure.data[place * per_layer : (place + 1) * per_layer]
        maps = [trace for trace in traces if trace.coloraxis == "coloraxis"]
        leads = {trace.xaxis: trace.z[:, 0] for trace in traces if trace.coloraxis == "coloraxis2"}
        groups.append(
            [
                Panel(
                    name=f"{label}, {trace.name}" if len(maps) > 1 else label,
                    values=np.asarray(trace.z),
                    low=low,
                    high=high,
                    diverging=figure.layout.coloraxis.colorscale == tuple(DIVERGING),
                    positions=round(trace.dy * len(trace.z)),
                    leads=leads.get(trace.xaxis),
                    largest_lead=meta["leads"][place] if leads else 1.0,
                )
                for trace in maps
            ]
        )
    return panel_groups(groups, title=figure.layout.title.text or "")


def save(figure: go.Figure, path: str | Path) -> Path:
    """Draw a figure into a file for print, on white, without title and sliders.

    A slider over layers becomes a panel for each layer. Each panel has a separate colour scale.

    Args:
        figure: any figure of `nope_probe.figures`; it is not changed.
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
    validate_image_name(path)
    validate_kaleido()
    still = go.Figure(without_controls(figure)).update_layout(paper_bgcolor="white")
    still.layout.updatemenus = ()
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
