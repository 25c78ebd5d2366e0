"""Measures of the positional pattern, of heads and of stages -> plotly figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.components import INK, SOURCES
from nope_probe.conditions import kept_name
from nope_probe.figures.dots import (
    BOUNDS,
    Dots,
    interval_dots,
    over_layers,
)
from nope_probe.figures.intervals import (
    FLOOR,
    bound_columns,
    estimates_of,
)
from nope_probe.figures.names import colour, words
from nope_probe.figures.style import (
    BLANK,
    DIVERGING,
    SEQUENTIAL,
    Grid,
    colour_bar,
    draw_guide,
    place,
    set_axes,
)
from nope_probe.figures.words import ATTENTION, MEASURES
from nope_probe.stages import LETTERS

CONTROLS = ("amplitude", "locality", "non_relative")
SHAPES = [  # with a panel each; edge contrasts are the paper's
    name for name in MEASURES if not name.startswith(("amplitude_", "edge_contrast"))
]


def pattern_measures(table: pd.DataFrame, intact: str) -> go.Figure:
    """Draw each measure of the pattern over layers, with and without its sources.

    Args:
        table: `pattern.csv`: layer, kept, and each measure with its bounds.
        intact: the table's value of `kept` for the intact model.
    """
    series = [
        Dots(table[table["kept"] == kept], name, label=label)
        for kept, (name, label) in _without_sources(intact).items()
        if kept in set(table["kept"])
    ]
    title = "Measures of the positional pattern, per layer"
    return over_layers(_by_measure(SHAPES, series), title, columns=4)


def _by_measure(names: Iterable[str], series: Sequence[Dots]) -> dict[str, list[Dots]]:
    """Return a panel for each measure that all tables have, with all series."""
    return {
        MEASURES[name].title: [replace(dots, column=name) for dots in series]
        for name in names
        if all(name in dots.rows for dots in series)
    }


def _without_sources(intact: str) -> dict[str, tuple[str, str]]:
    """Return the name (for the colour) and label of each model to draw, by kept components.

    The models are the intact model, and the models without each source and without all sources.
    """
    parts = intact.split("+")
    shown = {intact: ("intact", words("intact"))}
    sources = [name for name in SOURCES if name in parts]
    for gone in sources:
        shown[kept_name({*parts} - {gone})] = (gone, f"without {words(gone)}")
    if len(sources) > 1:
        shown[kept_name({*parts} - {*sources})] = ("content", "without either")
    return shown


def controls(table: pd.DataFrame, intact: str) -> go.Figure:
    """Draw measures of the pattern on shuffled tokens, and on text without skipping keys.

    Args:
        table: `controls.csv`: layer, tokens (text or shuffled), skip_keys, kept, and the measures.
        intact: the table's value of `kept` for the intact model.
    """
    shown, series = _without_sources(intact), []
    for (kept, tokens, skip), rows in table.groupby(["kept", "tokens", "skip_keys"], sort=False):
        if kept in shown:
            name, label = shown[kept]
            keys = "all keys" if skip == 0 else f"keys from {skip}"
            hollow = tokens != "text"
            series.append(Dots(rows, name, label=f"{label}, {tokens}, {keys}", hollow=hollow))
    title = "The positional pattern in the controls, per layer"
    return over_layers(_by_measure(CONTROLS, series), title)


def mask_effect(table: pd.DataFrame) -> go.Figure:
    """Draw the RMS of the non-relative part with and without the mask, and the difference.

    Args:
        table: `non_relative.csv`: layer, tokens, and with_mask, without_mask and difference with
            their bounds, in nats.
    """
    strength, difference = [], []
    for tokens, rows in table.groupby("tokens", sort=False):
        hollow = tokens == "shuffled"
        strength += [
            Dots(rows, "intact", "with_mask", f"with the mask, {tokens}", hollow),
            Dots(rows, "mask", "without_mask", f"without it, {tokens}", hollow),
        ]
        difference.append(Dots(rows, "mask", "difference", f"difference, {tokens}", hollow))
    panels = {"RMS of the non-relative part, nats": strength, "with less without, nats": difference}
    return over_layers(panels, "The mask's effect on the non-relative part, per layer")


RUNS = ("circle", "circle-open", "square", "square-open", "diamond", "diamond-open")


def compared_measures(runs: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Draw each measure of the pattern over layers; markers tell the runs apart.

    Args:
        runs: the rows of each run by its name: `layer`, and each measure with its bounds. A measure
            that a run lacks is not drawn.
    """
    series = [
        Dots(rows, "intact", label=label, marker={"symbol": symbol})
        for (label, rows), symbol in zip(runs.items(), cycle(RUNS), strict=False)
    ]
    title = "Measures of the positional pattern, per layer"
    return over_layers(_by_measure(SHAPES, series), title, columns=4)


def compared_sources(runs: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Draw each source's share of the pattern over layers, in its colour; markers are the runs'.

    Args:
        runs: the rows of each run's `sources.csv` by its name.
    """
    markers = dict(zip(runs, cycle(RUNS), strict=False))
    terms = dict.fromkeys(term for rows in runs.values() for term in rows["term"])
    series = [
        Dots(
            rows[rows["term"] == term],
            term,
            "share",
            f"{words(term)}, {label}",
            marker={"symbol": markers[label]},
        )
        for term in terms
        if term != "position"
        for label, rows in runs.items()
        if term in {*rows["term"]}
    ]
    title = "The sources of the positional pattern, per layer"
    return over_layers({"share of the pattern": series}, title)


HEAD_MEASURES = ("amplitude", "locality", "relative_r2")
ABOUT = {**{name: MEASURES[name] for name in HEAD_MEASURES}, **ATTENTION}
CELL = 26  # px


def head_map(table: pd.DataFrame, measure: str) -> go.Figure:
    """Draw a measure of all heads; a head without a value stays blank.

    Args:
        table: `heads.csv`: layer, head, and each measure with its bounds.
        measure: a key of `ABOUT`.

    Raises:
        ValueError: for a measure that does not exist.
    """
    if measure not in ABOUT:
        raise ValueError(f"expected a measure of {', '.join(ABOUT)}, got {measure!r}")
    about = ABOUT[measure]
    columns = (measure, *bound_columns(measure))
    values, *bounds = (
        table.pivot(index="layer", columns="head", values=column) for column in columns
    )
    n_layers, n_heads = values.shape
    heads = {
        "type": "heatmap",
        "z": values.to_numpy(float),
        "x": [int(head) for head in values.columns],
        "y": [int(layer) for layer in values.index],
        "customdata": np.stack([bound.to_numpy(float) for bound in bounds], -1),
        "coloraxis": "coloraxis",
        "hoverongaps": False,
        "hovertemplate": f"L%{{y}}H%{{x}}<br>%{{z:.3g}} {BOUNDS}<extra>{about.title}</extra>",
    }
    wide = Grid(
        columns=1, panel=max(160, CELL * n_layers), bottom=124, x_title="head", y_title="layer"
    )
    layout = place(f"Each head's {about.title}", [""], wide, left=50)
    ticks = {"showgrid": False, "zeroline": False, "tickformat": "d"}
    layout["xaxis"] |= {**ticks, "nticks": min(17, 1 + n_heads)}
    layout["yaxis"] |= {**ticks, "autorange": "reversed", "nticks": min(33, 1 + n_layers)}
    known = np.abs(values.to_numpy(float))
    # Colours of a signed measure run around zero, of other measures from zero on.
    top = 1.0 if about.bounded else max(FLOOR, float(np.nan_to_num(known).max(initial=0.0)))
    layout["coloraxis"] = {
        "colorscale": DIVERGING if about.signed else SEQUENTIAL,
        "cmin": -top if about.signed else 0.0,
        "cmax": top,
        "colorbar": colour_bar(about.unit),
    }
    return go.Figure(heads, {**layout, "plot_bgcolor": BLANK})


STAGE_MEASURES = ("locality", "monotonicity")


def stage_measures(table: pd.DataFrame, removed: tuple[str, ...] = ()) -> go.Figure:
    """Draw locality and monotonicity of each stage's map, with 95% intervals.

    Args:
        table: `stages.csv`: model (intact or ablated), stage, and the measures with their bounds.
        removed: the components that the ablation removed; the first fixes the colour.
    """
    wide = Grid(columns=2, panel=240, gap=0.08, x_title="stage")
    titles = [MEASURES[measure].title for measure in STAGE_MEASURES]
    title = "Measures of each stage's positional pattern"
    layout, traces = place(title, titles, wide, "x", columns=1, panel=200, left=44), []
    for panel, measure in enumerate(STAGE_MEASURES):
        for model, rows in table.groupby("model", sort=False):
            ablated = model == "ablated"
            ink = colour(removed[0]) if ablated and removed else INK
            shape = "circle-open" if ablated else "circle"
            traces.append(
                interval_dots(
                    rows["stage"].tolist(),
                    estimates_of(rows, measure),
                    panel,
                    label=f"without {' + '.join(map(words, removed))}"
                    if ablated
                    else words("intact"),
                    hover="(%{x}): %{y:.2f}",
                    marker={"color": ink, "size": 9, "symbol": shape},
                    mode="lines+markers",
                    line={"color": ink, "width": 1, "dash": "dot" if ablated else "solid"},
                )
            )
        draw_guide(layout, panel, y=MEASURES[measure].neutral)
    set_axes(layout, "x", type="category", categoryorder="array", categoryarray=list(LETTERS))
    layout["yaxis"]["range"], layout["yaxis2"]["range"] = [-1.08, 1.08], [-0.04, 1.04]
    return go.Figure(traces, layout)
