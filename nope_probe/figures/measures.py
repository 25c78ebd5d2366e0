"""Measures of the pattern -> plotly figures: over layers, in controls, in training, of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from nope_probe.components import SOURCES, kept_name, words
from nope_probe.figures.dots import dots, over_layers
from nope_probe.figures.grid import Grid, axis, place
from nope_probe.figures.style import SEQUENTIAL
from nope_probe.figures.words import MEASURES

CONTROLS = ("amplitude", "locality", "non_relative")


def pattern_measures(table: pd.DataFrame, intact: str) -> go.Figure:
    """Draw each measure of the pattern over layers, with and without its sources.

    Args:
        table: `pattern.csv`: layer, kept, and each measure with its bounds.
        intact: what the intact model keeps, as the table writes it.
    """
    shown = _without_sources(intact)
    rows = {kept: table[table["kept"] == kept] for kept in shown if kept in set(table["kept"])}
    panels = {
        about.title: [dots(rows[kept], shown[kept][0], measure, shown[kept][1]) for kept in rows]
        for measure, about in MEASURES.items()
        if measure in table
    }
    return over_layers(panels, "Measures of the positional pattern, per layer", columns=4)


def _without_sources(intact: str) -> dict[str, tuple[str, str]]:
    """Return by kept components the name (for the colour) and label of each model to draw.

    These are the intact model, and the models without each source and without all sources.
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
        intact: what the intact model keeps, as the table writes it.
    """
    shown = _without_sources(intact)
    kinds: list[tuple[tuple[str, str], str, int, pd.DataFrame]] = [
        (shown[str(kept)], str(tokens), int(str(skip)), rows)
        for (kept, tokens, skip), rows in table.groupby(["kept", "tokens", "skip_keys"], sort=False)
        if str(kept) in shown
    ]
    panels = {
        MEASURES[measure].title: [
            dots(
                rows,
                name,
                measure,
                label=f"{label}, {tokens}, {'all keys' if skip == 0 else f'keys from {skip}'}",
                hollow=tokens != "text",
            )
            for (name, label), tokens, skip, rows in kinds
        ]
        for measure in CONTROLS
        if measure in table
    }
    return over_layers(panels, "The positional pattern in the controls, per layer")


def mask_effect(table: pd.DataFrame) -> go.Figure:
    """Draw the RMS of the non-relative part with and without the mask, and the difference.

    Args:
        table: `non_relative.csv`: layer, tokens, and with_mask, without_mask and difference with
            their bounds, in nats.
    """
    kinds = {str(tokens): rows for tokens, rows in table.groupby("tokens", sort=False)}
    columns = {"with_mask": ("intact", "with the mask"), "without_mask": ("mask", "without it")}
    strength, difference = [], []
    for tokens, rows in kinds.items():
        hollow = tokens == "shuffled"
        for column, (name, label) in columns.items():
            strength.append(dots(rows, name, column, f"{label}, {tokens}", hollow))
        difference.append(dots(rows, "mask", "difference", f"difference, {tokens}", hollow))
    panels = {"RMS of the non-relative part, nats": strength, "with less without, nats": difference}
    return over_layers(panels, "The mask's effect on the non-relative part, per layer")


def training_dynamics(tables: Mapping[str, pd.DataFrame], measure: str = "amplitude") -> go.Figure:
    """Draw a measure of the pattern over training: one line per layer, models side by side.

    Step 0, which a log axis cannot show, is drawn to the left of the first step.

    Args:
        tables: `dynamics.csv` by model: step, layer, and each measure.
        measure: which measure to draw.
    """
    layers = sorted({int(each) for table in tables.values() for each in table["layer"]})
    colours = sample_colorscale(SEQUENTIAL, list(np.linspace(0.05, 0.85, max(2, len(layers)))))
    figure = go.Figure()
    for panel, table in enumerate(tables.values()):
        for index, layer in enumerate(layers):
            rows = table[table["layer"] == layer]
            line = _line(rows, measure, panel, layer)
            figure.add_trace(line.update(line={"color": colours[index], "width": 2}))
    wide = Grid(
        columns=len(tables),
        panel=320,
        shared_y=True,
        x_title="training step (log scale)",
        y_title=MEASURES[measure].title,
    )
    title = f"The positional pattern during training: {MEASURES[measure].label} per layer"
    place(figure, title, list(tables), wide, replace(wide, columns=1, panel=240))
    figure.update_xaxes(type="log", dtick=1)
    figure.update_layout(
        {f"yaxis{axis(panel)}": {"matches": "y"} for panel in range(1, len(tables))}
    )
    return figure


def _line(rows: pd.DataFrame, measure: str, panel: int, layer: int) -> go.Scatter:
    steps = rows["step"].to_numpy(float)
    first = steps[steps > 0].min(initial=np.inf)
    return go.Scatter(
        x=np.where(steps > 0, steps, first / 2 if np.isfinite(first) else 0.5),
        y=rows[measure].to_numpy(float),
        customdata=steps,
        mode="lines+markers",
        marker={"size": 5},
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        name=f"L{layer}",
        legendgroup=f"L{layer}",
        showlegend=panel == 0,
        hovertemplate=f"step %{{customdata:.0f}}: %{{y:.3g}}<extra>L{layer}</extra>",
    )


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One run's measures.

    Attributes:
        label: its name in the legend.
        colour: its colour.
        rows: `layer`, and each measure with its bounds.
    """

    label: str
    colour: str
    rows: pd.DataFrame


def compared_measures(runs: Sequence[Series], measures: Sequence[str]) -> go.Figure:
    """Draw each measure of the pattern over layers, one series for each run.

    Args:
        runs: the runs.
        measures: the measures to draw, by their names in the tables.
    """
    panels = {
        MEASURES[name].title: [dots(each.rows, "intact", name, each.label) for each in runs]
        for name in measures
    }
    figure = over_layers(panels, "Measures of the positional pattern, per layer", columns=4)
    for index, trace in enumerate(figure.data):
        run = index % len(runs)
        trace.marker.update(color=runs[run].colour, symbol=SYMBOLS[run % len(SYMBOLS)])
    return figure
