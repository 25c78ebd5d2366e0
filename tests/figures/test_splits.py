"""Figures of splits draw every number of their table."""

import numpy as np
import pandas as pd

from nope_probe.figures.shares import band_amplitudes, offset_profiles


def test_each_band_is_a_bar_with_its_interval_in_its_layers_panel():
    table = pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "band": ["4-8", "unrotated", "4-8", "unrotated"],
            "amplitude": [1.0, 2.0, 3.0, 5.0],
            "amplitude_low": [0.5, 1.5, 2.0, 4.0],
            "amplitude_high": [1.5, 3.0, 3.5, 7.0],
            "share": [0.25, 0.75, 0.5, 0.5],
        }
    )
    first, second = band_amplitudes(table).data
    assert list(first.x) == ["4-8", "unrotated"]
    assert list(second.y) == [3.0, 5.0]
    assert list(second.error_y.array) == [0.5, 2.0]
    assert list(second.error_y.arrayminus) == [1.0, 1.0]
    assert (first.xaxis, second.xaxis) == ("x", "x2")
    assert list(first.customdata) == [25.0, 75.0]


def test_each_term_is_a_line_within_its_bounds_and_is_named_once():
    offsets = [1, 2, 3]
    parts = [
        pd.DataFrame({"layer": layer, "term": term, "offset": offsets, "mean": np.arange(3.0)})
        for layer in (0, 1)
        for term in ("score", "all", "rope")
    ]
    table = pd.concat(parts).assign(
        mean_low=lambda t: t["mean"] - 1, mean_high=lambda t: t["mean"] + 2
    )
    figure = offset_profiles(table)
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    areas = [trace for trace in figure.data if trace.fill == "toself"]
    assert len(lines) == len(areas) == 6
    assert [line.name for line in lines if line.showlegend] == [
        "scores",
        "positional pattern",
        "RoPE",
    ]
    for line, area in zip(lines, areas, strict=True):
        assert list(line.y) == [0.0, 1.0, 2.0]
        assert list(area.x) == [1, 2, 3, 3, 2, 1]
        assert list(area.y) == [-1.0, 0.0, 1.0, 4.0, 3.0, 2.0]
        assert (line.xaxis, line.legendgroup) == (area.xaxis, area.legendgroup)
