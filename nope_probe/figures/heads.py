"""What removals from the first heads of an order cost: against k, and head by head."""

from __future__ import annotations

from itertools import cycle, product

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import qualitative

from nope_probe.figures.dots import BOUNDS, curve_in_band, interval_dots
from nope_probe.figures.intervals import estimates_of, reach_of
from nope_probe.figures.measures import cells_of_heads, heat_of_heads
from nope_probe.figures.names import words
from nope_probe.figures.style import PlotlyTrace, draw_panels

COSTS = {
    "text": "text, nats",
    "copy_random": "second copy of random tokens, nats",
    "copy_text": "second copy of text, nats",
    "induction": "induction heads, fall of attention",
}


def cost_by_k(costs: pd.DataFrame, tests: pd.DataFrame) -> go.Figure:
    """Draw what removals cost against the number of heads, a line for each order.

    Bands reach from the lowest to the highest of as many other heads.

    Args:
        costs: `cost.csv`: removed, order, k, draw, measure, cost with its bounds.
        tests: `tests.csv`: removed, order, k, measure, chance with its bounds.
    """
    measured, panels = costs[costs["draw"].isna()], dict[str, list[PlotlyTrace]]()
    for removed, measure in product(costs["removed"].unique(), COSTS):
        traces = panels[f"without {words(removed)}: {COSTS[measure]}"] = []
        for order, ink in zip(measured["order"].unique(), cycle(qualitative.Dark24), strict=False):
            chances, of_order = (
                _rows(table, removed=removed, order=order, measure=measure)
                for table in (tests, measured)
            )
            traces += curve_in_band(
                chances["k"].to_numpy(),
                estimates_of(chances, "chance"),
                label=f"other heads than by {order}",
                hover=f"%{{x}} heads: %{{y:+.3g}} {BOUNDS}",
                line={"color": ink, "dash": "dot", "width": 1},
            )
            line = interval_dots(
                of_order["k"].to_numpy(),
                estimates_of(of_order, "cost"),
                label=f"first heads by {order}",
                hover=f"first %{{x}}: %{{y:+.3g}} {BOUNDS}",
                marker={"color": ink},
                mode="lines+markers",
            )
            traces.append(line)
    return draw_panels(
        "What the first heads cost",
        panels,
        panel=200,
        columns=2,
        x_title="first heads, k",
        bottom=100,
    ).update_xaxes(type="log", tickvals=sorted(measured["k"].unique()))


def _rows(table: pd.DataFrame, **values: str) -> pd.DataFrame:
    """Return the rows that have some values, by k."""
    return table[(table[[*values]] == pd.Series(values)).all(axis=1)].sort_values("k")


def single_costs(rows: pd.DataFrame, title: str) -> go.Figure:
    """Draw what each head alone costs on the second copy of random tokens.

    Args:
        rows: `single.csv` of one removal: layer, head, measure, cost (nats) with its bounds.
        title: the figure's title.
    """
    shown = rows[rows["measure"] == "copy_random"]
    cells = cells_of_heads(shown, "cost", f"%{{z:+.3g}} nats {BOUNDS}<extra>second copy</extra>")
    top = reach_of(shown["cost"].to_numpy(float))
    return heat_of_heads(cells, title, (-top, top), "second copy of random tokens, nats")
