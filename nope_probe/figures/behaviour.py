"""Behaviour in each condition -> plotly figures: losses by position, decodability, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import (
    BOUNDS,
    Dots,
    curve_in_band,
    fit_axes,
    interval_dots,
    marker,
    over_layers,
)
from nope_probe.figures.intervals import estimates_of
from nope_probe.figures.names import colour, symbol, words
from nope_probe.figures.style import (
    GUIDE,
    PlotlyTrace,
    draw_panels,
)
from nope_probe.removal import INTACT, Condition, replaced_by

DASHED = ("diamond", "triangle-down", "x", "cross")  # markers of components with dashed lines
PANELS = ("without sources", "without weights or MLPs")


def loss_by_position(table: pd.DataFrame, *, title: str, trained: int | None = None) -> go.Figure:
    """Draw the mean loss at each position, a line with a 95% band per condition.

    Args:
        table: `loss_by_position.csv` or `extrapolation.csv`: condition, position, loss, loss_low,
            loss_high, in nats.
        title: the figure's title.
        trained: the trained context, in tokens, which a vertical line marks; None for no line.
    """
    panels = {
        title: [
            trace
            for name in conditions
            for trace in _loss_curve(table[table["condition"] == name], name)
        ]
        for title, conditions in _panels(list(dict.fromkeys(table["condition"]))).items()
    }
    figure = draw_panels(
        title,
        panels,
        zoom="xy",
        columns=len(panels),
        panel=320,
        x_title="position in the window",
        y_title="loss, nats",
        bottom=110,
    )
    return figure if trained is None else figure.add_vline(float(trained), line=GUIDE)


def _loss_curve(rows: pd.DataFrame, name: str) -> list[PlotlyTrace]:
    """Return a condition's loss with its band; colour is not the only sign."""
    is_dashed = name != INTACT.name and symbol(component(name)) in DASHED
    return curve_in_band(
        rows["position"].to_numpy(int),
        estimates_of(rows, "loss"),
        label=label(name),
        hover=f"position %{{x}}: %{{y:.3g}} nats {BOUNDS}",
        line={
            "color": colour(component(name)),
            "width": 1.5,
            "dash": "dash" if is_dashed else "solid",
        },
    )


def _panels(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Return the conditions that remove only sources, and all others; `intact` is in both."""
    removing = [c for c in conditions if c != INTACT.name]
    only_sources = [c for c in removing if Condition.parse(component(c)).are_sources]
    others = [c for c in removing if c not in only_sources]
    intact = [c for c in conditions if c == INTACT.name]
    groups = dict(zip(PANELS, (only_sources, others), strict=True))
    return {name: [*intact, *group] for name, group in groups.items() if group} or {"": intact}


def label(name: str) -> str:
    """Return a condition's name in the legend.

    Example:
        >>> label("intact"), label("mask+rope")
        ('intact model', 'without mask + RoPE')
    """
    return words(name) if name == INTACT.name else f"without {removed(name)}"


def removed(name: str) -> str:
    """Return the components that a condition removes, and the replacement if its name has it.

    Example:
        >>> removed("mask+rope"), removed("w_q:mean")
        ('mask + RoPE', 'W_Q (mean)')
    """
    components, replacement = replaced_by(name)
    return f"{words(components)} ({replacement})" if replacement else words(components)


def component(name: str) -> str:
    """Return the component that gives a condition its colour and marker."""
    return replaced_by(name)[0]


def decodability(table: pd.DataFrame) -> go.Figure:
    """Draw the distance between the decoded and the true index, for each layer's residual stream.

    Open markers are the model with random weights; the dots of shuffled targets are at chance.

    Args:
        table: `decodability.csv`: layer, condition, and distance, null and untrained with their
            bounds, in positions.
    """
    groups = _panels(list(dict.fromkeys(table["condition"])))
    panels = {title: _decoded(table, conditions) for title, conditions in groups.items()}
    heading = "Mean distance of the decoded from the true position, per layer"
    figure = over_layers(panels, heading, same_y=[range(len(panels))])
    figure.update_yaxes(title={"text": "positions"})
    figure.update_traces(showlegend=False, selector=lambda dots: "open" in dots.marker.symbol)
    return figure


def _decoded(table: pd.DataFrame, conditions: Sequence[str]) -> list[Dots]:
    series = []
    for name in conditions:
        rows = table[table["condition"] == name]
        series.append(Dots(rows, component(name), "distance", label(name)))
        if rows["untrained"].notna().all():
            series.append(
                Dots(rows, component(name), "untrained", f"untrained, {label(name)}", hollow=True)
            )
    null = table[table["condition"] == INTACT.name]
    return [*series, Dots(null, "content", "null", "shuffled targets")]


def differences(
    table: pd.DataFrame, titles: Mapping[str, str], units: Mapping[str, str]
) -> go.Figure:
    """Draw each measure's change in every condition, with 95% intervals; the intact model is at 0.

    Args:
        table: `behaviour.csv`: measure, condition, and difference with its bounds.
        titles: the panels' titles by measure, in their order.
        units: the measures' units, which the x axes name; after a semicolon, which way is worse.
            Panels of a unit have one scale.
    """
    known = table.dropna(subset=["difference"])
    shown = [name for name in titles if name in set(known["measure"])]
    conditions = [name for name in dict.fromkeys(table["condition"]) if name != INTACT.name]
    by_measure = [known[known["measure"] == measure] for measure in shown]
    panels = {
        titles[measure]: [
            interval_dots(
                [label(condition)] * len(rows),
                estimates_of(rows, "difference"),
                label=label(condition),
                hover=f"%{{x:.3g}} {BOUNDS}",
                marker=marker(component(condition), 8),
                sideways=True,
            )
            for condition in conditions
            if len(rows := of_measure[of_measure["condition"] == condition])
        ]
        for measure, of_measure in zip(shown, by_measure, strict=True)
    }
    figure = draw_panels(
        "What each removal changes, less the intact model",
        panels,
        columns=min(3, len(shown)),
        panel=max(120, 22 * len(conditions)),
        zoom="y",
        shared_y=True,
        bottom=90,
        row_gap=86,
    )
    for x_axis, name in zip(figure.select_xaxes(), shown, strict=False):
        x_axis.title.text = units[name]
    names = [label(condition) for condition in reversed(conditions)]
    figure.update_yaxes(categoryarray=names, range=[-0.5, len(names) - 0.5])
    figure.update_xaxes(zerolinewidth=2, nticks=4, rangemode="tozero")
    scales = [units[name].partition(";")[0] for name in shown]
    alike = [[at for at, of in enumerate(scales) if of == unit] for unit in dict.fromkeys(scales)]
    ends = [estimates_of(rows, "difference") for rows in by_measure]
    fit_axes(figure, "x", ends, alike)
    return figure.update_layout(showlegend=False)
