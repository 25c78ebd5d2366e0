"""Measures of the positional pattern, of heads and of stages -> plotly figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import BOUNDS, Dots, interval_cells, over_layers
from nope_probe.figures.intervals import bound_columns, reach_of
from nope_probe.figures.names import words
from nope_probe.figures.style import (
    BLANK,
    Extent,
    PlotlyTrace,
    colour_axis,
    draw_panels,
)
from nope_probe.figures.words import ATTENTION, MEASURES
from nope_probe.removal import INTACT, Condition

CONTROLS = ("lead", "amplitude", "locality", "non_relative")


def pattern_measures(table: pd.DataFrame) -> go.Figure:
    """Draw the measures of lead and pattern over layers, with and without the sources.

    Args:
        table: `pattern.csv`: layer, removed, and each measure with its bounds.
    """
    series = [
        Dots(rows, name, label=label) for name, label, rows in _without_sources(table).values()
    ]
    title = "Measures of lead and pattern, per layer"
    return over_layers(_by_measure(MEASURES, series), title, columns=3)


def _by_measure(names: Iterable[str], series: Sequence[Dots]) -> dict[str, list[Dots]]:
    """Return a panel for each measure that all tables have somewhere, with all series."""
    return {
        MEASURES[name].title: [replace(dots, column=name) for dots in series]
        for name in names
        if all(name in dots.rows for dots in series)
        and any(dots.rows[name].notna().any() for dots in series)
    }


def _without_sources(table: pd.DataFrame) -> dict[str, tuple[str, str, pd.DataFrame]]:
    """Return the colour's name, label and rows of each model to draw, by what it lacks.

    The models are the intact model, and the models without each source and without all sources.
    """
    shown = {"intact": ("intact", words("intact"), table[table["removed"] == "intact"])}
    conditions = map(Condition.parse, table["removed"].unique())
    removed = [condition for condition in conditions if condition.are_sources]
    most = max(removed, key=len, default=INTACT)
    for name in (condition.name for condition in removed if len(condition) == 1):
        shown[name] = (name, f"without {words(name)}", table[table["removed"] == name])
    if len(most) > 1:
        rows = table[table["removed"] == most.name]
        shown[most.name] = ("without_sources", words("without_sources"), rows)
    return shown


def controls(table: pd.DataFrame, pattern: pd.DataFrame) -> go.Figure:
    """Draw measures of lead and pattern on shuffled tokens, and in the run.

    Args:
        table: `controls.csv`: layer, tokens, removed, and the measures.
        pattern: `pattern.csv`: the same on the run's tokens.
    """
    series = [
        Dots(rows, name, label=f"{label}, {tokens}", hollow=tokens == "shuffled")
        for tokens, of_tokens in (("in order", pattern), ("shuffled", table))
        for removed, (name, label, rows) in _without_sources(of_tokens).items()
        if removed in {*table["removed"]}
    ]
    title = "Lead and pattern in the control, per layer"
    return over_layers(_by_measure(CONTROLS, series), title, columns=2)


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


HEAD_MEASURES = ("lead", "amplitude", "locality", "relative_r2")
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
    cells = cells_of_heads(table, measure, f"%{{z:.3g}} {BOUNDS}<extra>{about.title}</extra>")
    # Colours of a signed measure run around zero, of other measures from zero on.
    top = 1.0 if about.bounded else reach_of(table[measure].to_numpy(float))
    limits = -top if about.signed else 0.0, top
    return heat_of_heads(cells, f"Each head's {about.title}", limits, about.shown_unit)


def cells_of_heads(rows: pd.DataFrame, column: str, hover: str) -> PlotlyTrace:
    """Return a number of all heads as a heat map; a head without a number stays blank.

    Args:
        rows: layer, head, and the number with its bounds.
        column: the number's.
        hover: the text below a head's name, in which `BOUNDS` are the bounds.
    """
    columns = (column, *bound_columns(column))
    cells = [rows.pivot(index="layer", columns="head", values=name) for name in columns]
    return interval_cells(
        np.array(cells, float),
        f"L%{{y}}H%{{x}}<br>{hover}",
        x=cells[0].columns.astype(int).tolist(),
        y=cells[0].index.astype(int).tolist(),
    )


def heat_of_heads(cells: PlotlyTrace, title: str, limits: Extent, unit: str) -> go.Figure:
    """Draw a number of all heads in colour.

    Args:
        cells: the numbers, as `cells_of_heads` returns them.
        title: the figure's title.
        limits: the colour limits.
        unit: the title of the colour bar.
    """
    figure = layers_by_heads(title, [cells], len(cells["y"]), len(cells["x"]), CELL)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False, autorange="reversed")
    return figure.update_layout(coloraxis=colour_axis(limits, unit), plot_bgcolor=BLANK)


def layers_by_heads(
    title: str, traces: Sequence[PlotlyTrace], n_layers: int, n_heads: int, cell: int
) -> go.Figure:
    """Return a panel of all heads, layer by head, with a row of some px for each layer."""
    figure = draw_panels(
        title,
        {"": traces},
        panel=max(160, cell * n_layers),
        bottom=124,
        x_title="head",
        y_title="layer",
    )
    figure.update_xaxes(zeroline=False, tickformat="d", nticks=min(17, 1 + n_heads))
    return figure.update_yaxes(zeroline=False, tickformat="d", nticks=min(33, 1 + n_layers))
