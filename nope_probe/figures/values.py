"""Leads and patterns under interventions, and the exact terms of scores, in nats -> figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import BOUNDS, interval_cells
from nope_probe.figures.intervals import bound_columns, interval_of, interval_text
from nope_probe.figures.limits import padded_range
from nope_probe.figures.names import row_name, words
from nope_probe.figures.style import BLANK, GUIDE, PlotlyTrace, colour_axis, draw_panels, scatter
from nope_probe.figures.words import QUESTIONS, reader_of
from nope_probe.removal import SOURCES, Condition

DASHES = ("solid", "dash", "dot", "dashdot")  # of the lines of several replacements
CELL, MOST = 18, 1400  # px: a head's row at most, and all rows
FEW = 4  # bands whose names are written along the axis


def head_values(table: pd.DataFrame) -> go.Figure:
    """Draw each head's value without a source against its value in the intact model, nats.

    A panel for each source, and for all of them together, of the lead and of what is kept of the
    pattern. On the diagonal nothing is lost; on the zero line all is lost.

    Args:
        table: `head_pattern.csv`: layer, head, removed, and lead and kept with their bounds, nats.
    """
    conditions = [
        name
        for name in table["removed"].unique()
        if name != "intact" and {*Condition.parse(name)} <= {*SOURCES}
    ]
    single = [name for name in conditions if len(Condition.parse(name)) == 1]
    shown = [*single, *conditions[-1:]] if len(single) > 1 else single
    places, panels = ["layer", "head"], dict[str, list[PlotlyTrace]]()
    intact = table[table["removed"] == "intact"].set_index(places)
    lines = list[tuple[float, float]]()
    for name, title in QUESTIONS.items():
        known = intact[intact[name].notna()]
        if known.empty:
            continue
        for condition in shown:
            left = table[table["removed"] == condition].set_index(places).loc[known.index]
            panels[f"{title}, {row_name(condition, among=conditions)}"] = [
                scatter(
                    "heads",
                    "%{text}",
                    x=known[name],
                    y=left[name],
                    text=[
                        _of_head(place, name, known.loc[place], left.loc[place])
                        for place in known.index
                    ],
                    mode="markers",
                    marker={
                        "color": [layer for layer, _ in known.index],
                        "coloraxis": "coloraxis",
                        "size": 8,
                        "line": {"width": 0.5, "color": BLANK},
                        "opacity": 0.85,
                    },
                    showlegend=False,
                )
            ]
            lines.append(padded_range([*known[name], *left[name]]) or (0.0, 1.0))
    figure = draw_panels(
        "Each head's value without a source",
        panels,
        columns=max(1, len(shown)),
        panel=300,
        x_title="intact, nats",
        y_title="without it, nats",
        bottom=124,
    )
    for place, (low, high) in enumerate(lines, 1):
        number = "" if place == 1 else place
        figure.add_shape(
            type="line", x0=low, x1=high, y0=low, y1=high, line=GUIDE,
            xref=f"x{number}", yref=f"y{number}",
        )  # fmt: skip
    figure.update_yaxes(zerolinewidth=2)
    limits = float(table["layer"].min()), max(1.0, float(table["layer"].max()))
    return figure.update_layout(coloraxis=colour_axis(limits, "layer"))


def _of_head(
    place: tuple[int, int], name: str, intact: Mapping[Any, Any], left: Mapping[Any, Any]
) -> str:
    """Return the hover text of a head."""
    head = reader_of({"layer": place[0], "head": place[1]})
    texts = (interval_text(interval_of(row, name), "z.2f", " nats") for row in (intact, left))
    return "<br>".join([head, *map(": ".join, zip(("intact", "without it"), texts, strict=True))])


def head_bands(
    table: pd.DataFrame, wavelengths: Mapping[str, tuple[float, float]] | None = None
) -> go.Figure:
    """Draw each head's lead, and what is kept of its pattern, without each band of RoPE, nats.

    Args:
        table: `head_pattern.csv`; bands of RoPE are among what is removed.
        wavelengths: the shortest and the longest wavelength of each band, in tokens.
    """
    is_band = [name not in SOURCES and len(Condition.parse(name)) == 1 for name in table["removed"]]
    ends, bands = wavelengths or {}, table[is_band]
    heads = bands[["layer", "head"]].drop_duplicates().reset_index(drop=True)
    names = [str(name) for name in bands["removed"].unique()]
    labels = [f"L{layer}H{head}" for layer, head in heads.to_numpy()]
    panels: dict[str, list[PlotlyTrace]] = {}
    for name, title in QUESTIONS.items():
        cells = bands.pivot(index=["layer", "head"], columns="removed").reindex(
            index=pd.MultiIndex.from_frame(heads),
            columns=pd.MultiIndex.from_product([(name, *bound_columns(name)), names]),
        )
        trace = interval_cells(
            cells.to_numpy(float).reshape(len(heads), 3, -1).swapaxes(0, 1),
            f"%{{text}}, %{{x}}<br>%{{z:.3g}} {BOUNDS}<extra></extra>",
            x=[band_label(name, ends) for name in names],
            text=[[label] * len(names) for label in labels],
        )
        panels[f"{title}, nats"] = [trace]
    row, upright = max(5, min(CELL, MOST // len(heads))), len(names) > FEW
    figure = draw_panels(
        "Heads without a band",
        panels,
        columns=2,
        panel=max(160, row * len(heads)),
        bottom=230 if upright else 170,
        x_title="wavelength, tokens" if ends else "band of RoPE",
    )
    first = heads.index[~heads["layer"].duplicated()]
    figure.update_xaxes(type="category", showgrid=False, tickangle=-90 if upright else None)
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        tickvals=first.tolist(),
        ticktext=[labels[row] for row in first],
    )
    top = float(np.nanquantile(np.abs(bands[[*QUESTIONS]].to_numpy(float)), 0.99))
    return figure.update_layout(coloraxis=colour_axis((-top, top), "nats"), plot_bgcolor=BLANK)


def band_label(name: str, wavelengths: Mapping[str, tuple[float, float]]) -> str:
    """Return a band of RoPE by its wavelengths in tokens, or by its name where they are unknown.

    Example:
        >>> band_label("rope[0:2]", {"rope[0:2]": (6.283, 9.004)}), band_label("rope_high", {})
        ('6.3–9', 'rope_high')
    """
    if name not in wavelengths:
        return words(name)
    return "–".join(f"{float(f'{x:.2g}'):,g}" for x in dict.fromkeys(wavelengths[name]))
