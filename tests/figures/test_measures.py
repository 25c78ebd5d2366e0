"""Measures of patterns, heads and stages: over layers, in controls and during training."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.maps import text_of

from nope_probe.analyses.pattern import Measures
from nope_probe.components import COMPONENTS, INK, TABLE
from nope_probe.figures.measures import (
    STAGE_MEASURES,
    controls,
    head_map,
    mask_effect,
    pattern_measures,
    stage_measures,
    training_dynamics,
)
from nope_probe.figures.words import MEASURES


def pattern_table(kept: list[str]) -> pd.DataFrame:
    rows = []
    for layer in (1, 2):
        for index, name in enumerate(kept):
            row = {"layer": layer, "kept": name, "tokens": "text", "skip_keys": index % 2}
            for measure in MEASURES:
                row |= {measure: layer + index, f"{measure}_low": 0.0, f"{measure}_high": 9.0}
            rows.append(row)
    return pd.DataFrame(rows)


def test_measures_are_drawn_with_and_without_each_source() -> None:
    kept = ["mask+rope+w_q", "rope+w_q", "mask+w_q", "w_q", "mask+rope"]
    figure = pattern_measures(pattern_table(kept), "mask+rope+w_q")
    first = [trace for trace in figure.data if trace.xaxis == "x"]
    assert [trace.name for trace in first] == [
        "intact model",
        "without causal mask",
        "without RoPE",
        "without either",
    ]
    assert [trace.y[0] for trace in first] == [1, 2, 3, 4]
    assert len(figure.data) == 4 * len(MEASURES)


def test_shuffled_tokens_have_open_markers() -> None:
    table = pattern_table(["mask", "none"])
    table.loc[table["kept"] == "none", "tokens"] = "shuffled"
    figure = controls(table, "mask")
    assert figure.data[0].name == "intact model, text, all keys"
    assert figure.data[1].name == "without causal mask, shuffled, keys from 1"
    assert not figure.data[0].marker.symbol.endswith("-open")
    assert figure.data[1].marker.symbol.endswith("-open")


def test_the_masks_effect_is_drawn_with_without_and_paired() -> None:
    rows = [
        {"layer": 0, "tokens": tokens}
        | {f"{name}{end}": value for end in ("", "_low", "_high") for name, value in values.items()}
        for tokens, values in (
            ("text", {"with_mask": 0.3, "without_mask": 0.2, "difference": 0.1}),
            ("shuffled", {"with_mask": 0.5, "without_mask": 0.1, "difference": 0.4}),
        )
    ]
    figure = mask_effect(pd.DataFrame(rows))
    drawn = {trace.name: (trace.xaxis, trace.y[0]) for trace in figure.data}
    assert drawn == {
        "with the mask, text": ("x", 0.3),
        "without it, text": ("x", 0.2),
        "with the mask, shuffled": ("x", 0.5),
        "without it, shuffled": ("x", 0.1),
        "difference, text": ("x2", 0.1),
        "difference, shuffled": ("x2", 0.4),
    }


def test_training_dynamics_draws_a_line_per_layer_and_model_on_a_log_axis() -> None:
    rows = [(step, layer, step * layer) for step in (0, 2, 20) for layer in (1, 2)]
    table = pd.DataFrame(rows, columns=["step", "layer", "amplitude"])
    figure = training_dynamics({"nope-tiny": table, "rope-tiny": table})
    assert text_of(figure) == ["nope-tiny", "rope-tiny"]
    assert len(figure.data) == 4
    assert figure.layout.xaxis.type == figure.layout.xaxis2.type == "log"
    assert list(figure.data[1].x) == [1, 2, 20], "step 0 is left of the first step"
    assert list(figure.data[1].y) == [0, 4, 40]
    assert figure.layout.yaxis2.matches == "y"


def heads(**values: Any) -> pd.DataFrame:
    table = pd.DataFrame({"layer": [1, 1, 2, 2], "head": [1, 2, 1, 2], **values})
    for name in values:
        table[f"{name}_low"], table[f"{name}_high"] = table[name] - 1, table[name] + 1
    return table


def test_a_head_map_has_a_row_per_layer_and_a_column_per_head_and_leaves_out_no_pattern():
    figure = head_map(heads(relative_r2=[0.2, 0.3, np.nan, 0.7]), "relative_r2")
    np.testing.assert_array_equal(figure.data[0].z, [[0.2, 0.3], [np.nan, 0.7]])
    assert figure.layout.yaxis.autorange == "reversed"
    signed = head_map(heads(edge_contrast=[0.2, -0.5, 0.1, 0.3]), "edge_contrast").layout.coloraxis
    assert (signed.cmin, signed.cmax) == (-0.5, 0.5), "signed measures are coloured around zero"
    assert signed.colorbar.title.text == MEASURES["edge_contrast"].unit == "nats"


def test_a_measure_that_heads_do_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"expected a measure of amplitude, .*, got 'height'"):
        head_map(heads(amplitude=[1.0, 2.0, 3.0, 4.0]), "height")


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


def test_every_measure_of_the_analysis_has_a_label_and_a_caption() -> None:
    assert list(MEASURES) == list(Measures.__dataclass_fields__)
    assert len({each.title for each in MEASURES.values()}) == len(MEASURES)
    assert all(each.caption.endswith(".") for each in MEASURES.values())


def test_every_component_has_words_a_colour_and_a_marker() -> None:
    assert set(COMPONENTS) <= set(TABLE)
    assert all(TABLE[name].colour != INK for name in COMPONENTS)
