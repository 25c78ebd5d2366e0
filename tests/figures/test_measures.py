"""Measures of patterns, heads and stages: over layers, in controls and during training."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.analyses.pattern import Measures
from nope_probe.figures.measures import (
    controls,
    head_map,
    mask_effect,
    pattern_measures,
)
from nope_probe.figures.names import TABLE
from nope_probe.figures.words import MEASURES
from nope_probe.removal import COMPONENTS, INK


def pattern_table(removed: list[str]) -> pd.DataFrame:
    bounds = {
        f"{measure}{end}": value
        for measure in MEASURES
        for end, value in (("_low", 0.0), ("_high", 9.0))
    }
    return pd.DataFrame(
        [
            {"layer": layer, "removed": name} | bounds | dict.fromkeys(MEASURES, layer + index)
            for layer in (1, 2)
            for index, name in enumerate(removed)
        ]
    )


def test_measures_are_drawn_with_and_without_each_source() -> None:
    figure = pattern_measures(pattern_table(["intact", "mask", "rope", "mask+rope", "w_q"]))
    first = [trace for trace in figure.data if trace.xaxis == "x"]
    assert [trace.name for trace in first] == [
        "intact model",
        "without causal mask",
        "without RoPE",
        "without any source",
    ]
    assert [trace.y[0] for trace in first] == [1, 2, 3, 4]
    assert len(figure.data) == 4 * len(MEASURES)


def test_a_measure_that_no_layer_has_is_not_drawn() -> None:
    table = pattern_table(["intact"]).assign(lead=np.nan)
    assert len(pattern_measures(table).data) == len(MEASURES) - 1


def test_shuffled_tokens_have_open_markers() -> None:
    figure = controls(pattern_table(["intact", "mask"]), pattern_table(["intact", "mask", "rope"]))
    assert [trace.name for trace in figure.data[:4]] == [
        "intact model, in order",
        "without causal mask, in order",
        "intact model, shuffled",
        "without causal mask, shuffled",
    ]
    is_open = [trace.marker.symbol.endswith("-open") for trace in figure.data[:4]]
    assert is_open == [False, False, True, True]


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


def test_a_head_map_has_a_row_per_layer_and_a_column_per_head_and_leaves_out_no_pattern():
    table = pd.DataFrame({"layer": [1, 1, 2, 2], "head": [1, 2, 1, 2]})
    table["relative_r2"], table["locality"] = [0.2, 0.3, np.nan, 0.7], [0.2, -0.5, 0.1, 0.3]
    for name in ("relative_r2", "locality"):
        table[f"{name}_low"], table[f"{name}_high"] = table[name] - 1, table[name] + 1
    figure = head_map(table, "relative_r2")
    np.testing.assert_array_equal(figure.data[0].z, [[0.2, 0.3], [np.nan, 0.7]])
    assert figure.layout.yaxis.autorange == "reversed"
    signed = head_map(table, "locality").layout.coloraxis
    assert signed.cmin == -signed.cmax, "signed measures are coloured around zero"
    assert signed.colorbar.title.text == MEASURES["locality"].unit
    with pytest.raises(ValueError, match=r"expected a measure of lead, .*, got 'height'"):
        head_map(table, "height")


def test_every_measure_has_a_title_and_every_component_a_colour() -> None:
    assert list(MEASURES) == list(Measures.__dataclass_fields__)
    assert len({measure.title for measure in MEASURES.values()}) == len(MEASURES)
    assert all(TABLE[name].colour != INK for name in COMPONENTS)
