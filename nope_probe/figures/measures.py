"""Shares, interactions and measures of the positional pattern -> plotly figures over layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import qualitative

from nope_probe.components import INK, SOURCES
from nope_probe.conditions import kept_name
from nope_probe.figures.dots import (
    BOUNDS,
    FLAT_NOTE,
    LEGEND_ROW,
    MOST_TICKS,
    Dots,
    interval_dots,
    mark_empty_layers,
    marker,
    over_layers,
)
from nope_probe.figures.intervals import (
    FLOOR,
    NO_PATTERN,
    axis_range,
    bound_columns,
    estimates_of,
    is_noise,
)
from nope_probe.figures.names import colour, words
from nope_probe.figures.style import (
    BLANK,
    DIVERGING,
    SEQUENTIAL,
    Grid,
    Trace,
    add_slider,
    colour_bar,
    draw_guide,
    inside,
    layer_colours,
    patch,
    place,
    scatter,
    set_axes,
    tinted,
)
from nope_probe.figures.words import ATTENTION, MEASURES
from nope_probe.stages import LETTERS

CONTROLS = ("amplitude", "locality", "non_relative")
SHAPES = [name for name in MEASURES if not name.startswith("amplitude_")]  # with a panel each
MOST_INTERACTIONS = 24
X_TITLE = "share of the pattern"
# The part of a share in each column, and how opaque its tone is.
BAR_PARTS = {"share_first": ("first key", 1.0), "share_others": ("other keys", 0.45)}
LOSSES = ("lost", "amplification")  # some replacements have only these columns
PLAYER_PARTS = {
    "lost": "lost without it",
    "amplification": "amplification",
    "share": "Shapley share",
    "alone": "there alone",
}


def source_shares(table: pd.DataFrame) -> go.Figure:
    """Draw each source's share of the pattern, per layer.

    Where a first key stands apart, a layer has one bar, in which a source has two tones: its part
    at the first key and its part among the other keys. Elsewhere sources are dots with intervals,
    beside their RMS in nats.

    Args:
        table: `sources.csv`: layer, term, rms (nats) and share, each with its bounds; the term
            `position`, the sum of all terms but content, is not drawn.
    """
    terms = table[table["term"] != "position"]
    title = "The sources of the positional pattern, per layer"
    if "share_first" in terms and terms["share_first"].fillna(0).any():
        return _share_bars(terms, title)
    panels = {
        "share of the pattern": _by_name(terms, "term", "share"),
        "RMS, nats": _by_name(terms, "term", "rms"),
    }
    return over_layers(panels, title=title)


def _share_bars(terms: pd.DataFrame, title: str) -> go.Figure:
    """Draw a bar per layer; parts against the pattern hang below zero."""
    layers = sorted(terms["layer"].astype(int).unique().tolist())
    names = list(dict.fromkeys(terms["term"]))
    traces = []
    for (column, (where, tone)), name in product(BAR_PARTS.items(), names):
        rows = terms[terms["term"] == name].set_index("layer").reindex(layers).reset_index()
        values, lows, highs = estimates_of(rows, column)
        label = f"{words(name)}, {where}"
        traces.append(
            {
                "type": "bar",
                "name": label,
                "x": layers,
                "y": values,
                "customdata": np.stack([lows, highs], -1),
                "hovertemplate": "L%{x}: %{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})"
                f"<extra>{label}</extra>",
                "marker": {"color": tinted(colour(name), tone), "line": {"width": 0}},
            }
        )
    wide = Grid(
        columns=1, panel=300, x_title="layer", bottom=60 + LEGEND_ROW * -(-len(traces) // 4)
    )
    below = 60 + 20 * len(traces)  # a phone shows one name in a row
    layout = place(title, [X_TITLE], wide, panel=240, left=44, bottom=below)
    deep = len(layers) > MOST_TICKS
    layout |= {"barmode": "relative", "bargap": 0.15 if deep else 0.5}
    ticks = -(-len(layers) // MOST_TICKS)
    set_axes(layout, "x", showgrid=False, zeroline=False, tick0=0, dtick=ticks)
    set_axes(layout, "y", tickformat=".0%", zerolinewidth=2, nticks=6)
    mark_empty_layers(layout, {X_TITLE: _by_name(terms, "term", "share")})
    return go.Figure(traces, layout)


def player_shares(table: pd.DataFrame) -> go.Figure:
    """Draw each player's share, the loss without it, its part alone, and its amplification.

    Args:
        table: the rows of `players.csv` of one player set. Every value of the column `replacement`
            has a row of panels, on the scales of the first row. A replacement without shares shows
            only losses.
    """
    groups = _by_replacement(table)
    columns = [column for column in PLAYER_PARTS if column == "lost" or table[column].notna().any()]
    panels = {
        (f"{name}: " if name else "") + PLAYER_PARTS[column]: _players(rows, column)
        for name, rows in groups.items()
        for column in columns
        if column in LOSSES or rows["share"].notna().any()
    }
    return over_layers(
        panels,
        title="The players' parts in the positional pattern, per layer",
        columns=len(columns) if len(groups) > 1 else None,
        unmarked=[t for t in panels if t.endswith((PLAYER_PARTS["alone"], "amplification"))],
        same_y=[range(place, len(panels), len(columns)) for place in range(len(columns))],
    )


def _players(rows: pd.DataFrame, column: str) -> list[Dots]:
    """Return a part of the players, without players whose part is undefined, perhaps all."""
    series = _by_name(rows, "player", column)
    known = [dots for dots in series if not np.isnan(dots.estimates[0]).all()]
    return known or series


def _by_replacement(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each replacement by name; a single replacement has an empty name."""
    if "replacement" not in table or table["replacement"].nunique() < 2:
        return {"": table}
    return {str(name): rows for name, rows in table.groupby("replacement", sort=False)}


def mean_covariance_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the exact terms' shares and RMS, per layer, and the dimensions of the mean keys.

    Args:
        table: `mean_covariance.csv`: layer, term, and share, rms (nats) and dimensions, each with
            its bounds.
    """
    terms = table.assign(term=table["term"].map(term_entry))
    panels = {
        "share of the pattern": _by_name(terms, "term", "share"),
        "RMS, nats": _by_name(terms, "term", "rms"),
        "dimensions of the mean keys": _by_name(
            terms[terms["term"] == "mean_term"], "term", "dimensions"
        ),
    }
    return over_layers(panels, title="The exact terms of the scores")


def term_entry(term: str) -> str:
    """Return the name of a term of `mean_covariance.csv` in the table of components."""
    return f"{term}_term" if term in ("mean", "covariance") else term


def interactions(table: pd.DataFrame, layer: int = 0) -> go.Figure:
    """Draw the shares that players add only together, with a layer slider.

    If there are many, only the interactions with the largest shares in any layer are drawn.

    Args:
        table: the rows of `interactions.csv` of one player set; `players` are joined by `+`. Every
            value of the column `replacement` has a panel, on a common scale.
        layer: the layer that the slider shows first.
    """
    sizes = table["share"].abs().groupby(table["players"]).max().fillna(0)
    names = sizes.sort_values(ascending=False, kind="stable").index[:MOST_INTERACTIONS][::-1]
    layers = sorted(int(number) for number in table["layer"].unique())
    groups = _by_replacement(table)
    traces, patches = [], []
    for number in layers:
        shares = [
            estimates_of(rows[rows["layer"] == number].set_index("players").reindex(names), "share")
            for rows in groups.values()
        ]
        for panel, estimates in enumerate(shares):
            trace = _interaction_dots([words(name) for name in names], estimates, number, panel)
            traces.append({**trace, "visible": number == layer})
        ends = np.concatenate(shares, axis=1)
        limits = axis_range(*ends)
        ranged = {"xaxis.autorange": True} if limits is None else {"xaxis.range": list(limits)}
        patches.append({**ranged, f"annotations[{len(groups)}].visible": is_noise(*ends)})
    wide = Grid(
        columns=len(groups),
        panel=30 + 22 * len(names),
        left=210,
        x_title=X_TITLE,
        shared_y=True,
    )
    layout = place("Interactions of players", list(groups), wide, "xy", columns=1, left=175)
    layout["annotations"].append({**inside(0), **FLAT_NOTE})
    set_axes(layout, "x", tickformat=".0%", zeroline=True, zerolinewidth=2, nticks=5, tickangle=0)
    set_axes(layout, "y", tickfont={"size": 11})
    first = layers.index(layer)
    add_slider(layout, layers, len(groups), first, patches=patches)
    patch(layout, patches[first])
    return go.Figure(traces, {**layout, "showlegend": False})


def _interaction_dots(
    names: Sequence[str], shares: Float[np.ndarray, "3 name"], layer: int, panel: int
) -> Trace:
    """Return a layer's shares; if all are undefined, return words that say so."""
    drawn: dict[str, object] = {}
    if np.isnan(shares).all():
        drawn = {"x": np.zeros(len(names)), "mode": "text", "text": NO_PATTERN}
    return interval_dots(
        names,
        shares,
        panel,
        label=f"L{layer}",
        hover=f"%{{y}}<br>%{{x:.3g}} {BOUNDS}",
        marker=marker("interaction", 8),
        sideways=True,
        **drawn,
    )


def _by_name(table: pd.DataFrame, by: str, column: str) -> list[Dots]:
    return [Dots(rows, str(name), column) for name, rows in table.groupby(by, sort=False)]


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


def training_dynamics(tables: Mapping[str, pd.DataFrame], measure: str = "amplitude") -> go.Figure:
    """Draw a measure of the pattern over training: a line per layer, models side by side.

    Step 0 is drawn to the left of the first step, because a log axis cannot show it.

    Args:
        tables: `dynamics.csv` by model: step, layer, and each measure.
        measure: the measure to draw.
    """
    layers = sorted({int(layer) for table in tables.values() for layer in table["layer"]})
    traces = []
    for panel, table in enumerate(tables.values()):
        for layer, ink in zip(layers, layer_colours(len(layers)), strict=True):
            rows = table[table["layer"] == layer]
            steps = rows["step"].to_numpy(float)
            first = steps[steps > 0].min(initial=np.inf)
            trace = scatter(
                panel,
                f"L{layer}",
                "step %{customdata:.0f}: %{y:.3g}",
                x=np.where(steps > 0, steps, first / 2 if np.isfinite(first) else 0.5),
                y=rows[measure].to_numpy(float),
                customdata=steps,
                mode="lines+markers",
                line={"color": ink, "width": 2},
                marker={"size": 5},
            )
            traces.append(trace)
    wide = Grid(
        columns=len(tables),
        panel=320,
        shared_y=True,
        x_title="training step (log scale)",
        y_title=MEASURES[measure].title,
    )
    title = f"The positional pattern during training: {MEASURES[measure].label} per layer"
    layout = place(title, list(tables), wide, "y", columns=1, panel=240)
    set_axes(layout, "x", type="log", dtick=1)
    return go.Figure(traces, layout)


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


def compared_measures(runs: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Draw each measure of the pattern over layers, a series per run.

    Args:
        runs: the rows of each run by its name: `layer`, and each measure with its bounds. A measure
            that a run lacks is not drawn.
    """
    markers = [
        {"color": colour, "symbol": symbol}
        for colour, symbol in zip(qualitative.Safe, cycle(SYMBOLS), strict=False)
    ]
    series = [
        Dots(rows, "intact", label=label, marker=marker)
        for (label, rows), marker in zip(runs.items(), cycle(markers), strict=False)
    ]
    title = "Measures of the positional pattern, per layer"
    return over_layers(_by_measure(SHAPES, series), title, columns=4)


HEAD_MEASURES = ("amplitude", "locality", "relative_r2", "edge_contrast")
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
