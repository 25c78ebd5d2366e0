"""Measures of each stage's pattern."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from nope_probe.components import TABLE
from nope_probe.figures.measures import STAGE_MEASURES, stage_measures

Row = tuple[str, str, float, float, float]


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """A table of stages whose measures all have the same values: model, stage, value, bounds."""
    columns = ["model", "stage", "value", "low", "high"]
    frame = pd.DataFrame(list(rows), columns=columns)
    for name in STAGE_MEASURES:
        frame[name], frame[f"{name}_low"] = frame["value"], frame["low"]
        frame[f"{name}_high"] = frame["high"]
    return frame


def test_each_stages_measures_are_drawn_with_their_intervals() -> None:
    rows = [("intact", "f", 0.9, 0.8, 0.95), ("intact", "g", -0.2, -0.3, -0.1)]
    trace = stage_measures(table(rows)).data[0]
    assert list(trace.x) == ["f", "g"]
    assert list(trace.y) == [0.9, -0.2]
    np.testing.assert_allclose(trace.error_y.arrayminus, [0.1, 0.1])


def test_a_dotted_line_marks_no_trend() -> None:
    lines = stage_measures(table([])).layout.shapes
    assert [(line.yref, line.y0) for line in lines] == [("y", 0.0), ("y2", 0.5)]


def test_the_ablated_model_has_open_markers_in_the_colour_of_what_is_removed() -> None:
    rows = [("intact", "f", 0.9, 0.8, 0.95), ("ablated", "f", 0.1, 0.0, 0.2)]
    intact, ablated = stage_measures(table(rows), ("mlp", "mask")).data[:2]
    assert (intact.name, ablated.name) == ("intact model", "without MLP + causal mask")
    assert (intact.marker.symbol, ablated.marker.symbol) == ("circle", "circle-open")
    assert ablated.marker.color == TABLE["mlp"].colour
