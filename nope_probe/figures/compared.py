"""Measures of several runs over layers -> a plotly figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import dots, over_layers
from nope_probe.figures.words import MEASURES

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
