"""Measures of the pattern: over layers, in controls and during training."""

import pandas as pd
from support.maps import text_of

from nope_probe.figures.measures import (
    controls,
    mask_effect,
    pattern_measures,
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
