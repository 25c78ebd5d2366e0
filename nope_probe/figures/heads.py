"""What removals from the first heads of an order cost: against k, and head by head."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import qualitative

from nope_probe.figures.dots import BOUNDS, curve_in_band
from nope_probe.figures.intervals import FLOOR, error_bars, estimates_of
from nope_probe.figures.measures import heat_of_heads
from nope_probe.figures.names import words
from nope_probe.figures.style import (
    PlotlyTrace,
    axis,
    place_panels,
    scatter,
)

COSTS = {
    "text": "text, nats",
    "copy_random": "second copy of random tokens, nats",
    "copy_text": "second copy of text, nats",
    "induction": "induction heads, fall of attention",
}


def cost_by_k(costs: pd.DataFrame, tests: pd.DataFrame) -> go.Figure:
    """Draw what removals cost against the number of heads, a line for each order.

    Bands are where 95% of as many heads drawn from the same layers are expected.

    Args:
        costs: `cost.csv`: removed, order, k, draw, measure, cost with its bounds.
        tests: `tests.csv`: removed, order, k, measure, chance with its bounds.
    """
    removals = [*costs["removed"].unique()]
    panels = {
        (removed, measure): f"without {words(removed)}: {title}"
        for removed in removals
        for measure, title in COSTS.items()
    }
    figure = place_panels(
        "What the first heads cost",
        [*panels.values()],
        panel=200,
        columns=2,
        x_title="first heads, k",
        bottom=100,
    )
    measured = costs[costs["draw"].isna()]
    for panel, (removed, measure) in enumerate(panels):
        for index, order in enumerate(measured["order"].unique()):
            colour = qualitative.Dark24[index % len(qualitative.Dark24)]
            figure.add_traces(
                [
                    *_band(_rows(tests, removed, order, measure), panel, order, colour),
                    _line(_rows(measured, removed, order, measure), panel, order, colour),
                ]
            )
    ticks = sorted(measured["k"].unique())
    for panel in range(len(panels)):
        figure.update_layout({f"xaxis{axis(panel)}": {"type": "log", "tickvals": ticks}})
    return figure


def _rows(table: pd.DataFrame, removed: str, order: str, measure: str) -> pd.DataFrame:
    of = (table["removed"] == removed) & (table["order"] == order) & (table["measure"] == measure)
    return table[of].sort_values("k")


def _band(rows: pd.DataFrame, panel: int, order: str, colour: str) -> list[PlotlyTrace]:
    return curve_in_band(
        rows["k"].to_numpy(),
        estimates_of(rows, "chance"),
        panel,
        label=f"heads of the same layers as {order}",
        hover=f"%{{x}} heads: %{{y:+.3g}} {BOUNDS}",
        line={"color": colour, "dash": "dot", "width": 1},
    )


def _line(rows: pd.DataFrame, panel: int, order: str, colour: str) -> PlotlyTrace:
    values, lows, highs = estimates_of(rows, "cost")
    return scatter(
        panel,
        f"first heads by {order}",
        f"first %{{x}}: %{{y:+.3g}} {BOUNDS}",
        mode="lines+markers",
        x=rows["k"].to_numpy(),
        y=values,
        customdata=np.stack([lows, highs], -1),
        error_y=error_bars(values, lows, highs),
        line={"color": colour},
    )


def single_costs(rows: pd.DataFrame, title: str) -> go.Figure:
    """Draw what each head alone costs on text and on the second copy of random tokens.

    Args:
        rows: `single.csv` of one removal and order: layer, head, measure, cost (nats).
        title: the figure's title.
    """
    n_layers, n_heads = int(rows["layer"].max()) + 1, int(rows["head"].max()) + 1
    table = rows[rows["measure"] == "copy_random"].pivot(
        index="layer", columns="head", values="cost"
    )
    table = table.reindex(index=range(n_layers), columns=range(n_heads))
    top = max(FLOOR, float(np.nan_to_num(table.abs().to_numpy(float)).max(initial=0)))
    return heat_of_heads(
        table,
        title,
        hover="%{z:+.3g} nats<extra>second copy</extra>",
        limits=(-top, top),
        unit="second copy of random tokens, nats",
    )
