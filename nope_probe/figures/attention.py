"""All heads of a model on one map: position, information and the first key in their attention."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.components import INK
from nope_probe.figures.intervals import FLOOR, estimates_of
from nope_probe.figures.style import SEQUENTIAL, Grid, colour_bar, place

CELL = 32  # px a layer
LARGEST, SMALLEST = 18, 4  # px across, of the head with the most information and of any head
RING, GAP = 4, 3  # px of the ring of a head that gives the first key all of its weight, and inside
HOVER = (
    "L%{y}H%{x}<br>%{customdata[0]:.2f} nats above uniform attention<br>positional share "
    "%{customdata[1]:.0%} [%{customdata[2]:.0%}, %{customdata[3]:.0%}]<br>first key "
    "%{customdata[4]:.0%} of the weight<extra></extra>"
)


def attention_heads(table: pd.DataFrame) -> go.Figure:
    """Draw all heads, layer by head: where they look, and how much of it is position.

    A head's colour is the positional share of its information among the other keys, its area the
    information, and the width of its ring the first key's weight. Heads that see fewer than 8 keys
    at a time are left out.

    Args:
        table: `attention.csv`: layer, head, information (nats), positional_share and first_weight.
    """
    known = table.dropna(subset=["information"])
    information = known["information"].to_numpy(float).clip(0)
    first = known["first_weight"].to_numpy(float).clip(0, 1)
    share, low, high = estimates_of(known, "positional_share")
    largest = max(FLOOR, float(information.max(initial=0)))
    sizes = SMALLEST + (LARGEST - SMALLEST) * np.sqrt(information / largest)
    heads = {
        "type": "scatter",
        "mode": "markers",
        "x": known["head"].to_numpy(int),
        "y": known["layer"].to_numpy(int),
        "customdata": np.stack([information, share, low, high, first], -1),
        "hovertemplate": HOVER,
        "marker": {
            "size": sizes,
            "color": np.nan_to_num(share),
            "coloraxis": "coloraxis",
            "opacity": 1,  # bubbles are paler than the colour bar by default
        },
    }
    rings = {
        **{key: heads[key] for key in ("type", "mode", "x", "y")},
        "hoverinfo": "skip",
        "marker": {
            "size": sizes + 2 * GAP + RING,
            "color": "rgba(0,0,0,0)",
            "line": {"width": RING * first, "color": INK},
        },
    }
    n_layers = table["layer"].nunique()
    wide = Grid(
        columns=1, panel=max(160, CELL * n_layers), bottom=124, x_title="head", y_title="layer"
    )
    layout = place("Position in each head's attention", [""], wide, left=50)
    ticks = {"zeroline": False, "tickformat": "d"}
    ends = [-0.7, int(table["head"].max()) + 0.7]
    layout["xaxis"] |= {**ticks, "nticks": min(17, 1 + table["head"].nunique()), "range": ends}
    ends = [int(table["layer"].max()) + 0.7, int(table["layer"].min()) - 0.7]
    layout["yaxis"] |= {**ticks, "nticks": min(33, 1 + n_layers), "range": ends}
    layout["coloraxis"] = {
        "colorscale": SEQUENTIAL,
        "cmin": 0.0,
        "cmax": 1.0,
        "colorbar": {**colour_bar("positional share among the other keys"), "tickformat": ".0%"},
    }
    layout["meta"]["opens_heads"] = True
    return go.Figure([rings, heads], {**layout, "showlegend": False})
