"""The first sentences and table of a run of ablate, and the terminal, from tables made by hand."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nope_probe.reports.page import Headline
from nope_probe.run.folder import Run
from nope_probe.studies import ablate, ablate_page
from nope_probe.studies.page import print_report
from tests.support.manifests import manifest_of

MANIFEST: dict[str, Any] = {
    "model": {"name": "some-model", "depth": 30},
    "layers": [0, 1],
    "positional_sources": ["mask", "rope"],
    "replacements": ["mean"],
    "removed": ["w_q", "w_k", "w_q+w_k", "w_o"],
    "settings": {"folds": 8, "seq_len": 64, "n_seqs": 96, "data": "shipped"},
    "skip_keys": 1,
    "seconds": 3.0,
}
VALUES = {  # measured on L3 of SmolLM2: lead and kept
    "intact": (6.16, 0.95),
    "mask": (-0.98, 1.02),
    "rope": (4.02, -0.03),
    "mask+rope": (-0.07, -0.01),
    "w_q": (5.66, 0.93),
    "w_k": (-0.59, 0.51),
    "w_q+w_k": (-1.12, 1.01),
    "w_o": (-0.92, 1.01),
}


def bounds(name: str, value: float, half: float = 0.01) -> dict[str, float]:
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def tables(
    values: dict[str, tuple[float, float]] = VALUES, replacement: str = "mean"
) -> dict[str, pd.DataFrame]:
    """Return the tables of a run of two layers; L0 has a tenth of L1's lead and pattern."""
    pattern, means = [], []
    for removed, (lead, kept) in values.items():
        named = {"removed": removed, "replacement": replacement if "w_" in removed else "none"}
        means.append(
            named
            | bounds("lead", lead / 2)
            | bounds("kept", kept / 2)
            | bounds("non_relative", 0.05)
            | {"lead_layers": 2, "lead_below_half": 1, "kept_layers": 2, "kept_below_half": 0}
            | bounds("loss", 3.0)
            | bounds("cost", math.nan if "mask" in removed else 0.5 * (removed != "intact"))
        )
        for layer, times in ((0, 0.1), (1, 1.0)):
            row = {"layer": layer, **named, **bounds("lead", times * lead)}
            row |= bounds("amplitude", times * 0.95) | bounds("kept", times * kept)
            row |= bounds("locality", -0.3) | bounds("monotonicity", 0.5)
            pattern.append(row | bounds("relative_r2", 0.9) | bounds("non_relative", 0.1))
    of = [{"layer": layer, "of": "lead", "term": "mask"} | bounds("size", 1.0) for layer in (0, 1)]
    return {
        "pattern": pd.DataFrame(pattern).sort_values("layer", kind="stable"),
        "over_layers": pd.DataFrame(means),
        "terms": pd.DataFrame(of),
    }


def lead(given: dict[str, pd.DataFrame], **manifest: Any) -> Headline:
    return ablate_page.headline(Run(manifest=manifest_of(**MANIFEST | manifest), tables=given))


def shown(
    capsys: pytest.CaptureFixture[str], given: dict[str, pd.DataFrame], verbose: bool = False
) -> list[str]:
    """Return the lines that a run prints, with single spaces."""
    run = Run(
        manifest=manifest_of(**MANIFEST), tables=given | {"offsets": pd.DataFrame({"term": []})}
    )
    print_report(ablate.report(run), run.manifest, Path("runs/x"), verbose)
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_the_sentence_and_the_table_are_filled_in_from_the_rows_of_the_shown_layer() -> None:
    result = lead(tables())
    assert result.sentence == (
        "L1's first key leads by 6.2 nats: -1.0 without the causal mask, 4.0 without RoPE, -0.1 "
        "without both. Of the order of its other keys, 0.95 nats strong, 1.02 is there without "
        "the causal mask, -0.03 without RoPE, -0.01 without both."
    )
    assert result.table.columns.tolist() == [
        "L1 (largest lead and order)\nat 64 tokens, nats ±95%",
        "first key's\nlead",
        "order of\nother keys",
        "not a\nfunction of\ndistance",
        "cost",
    ]
    assert result.table.to_numpy().tolist() == [
        ["intact", "6.16±0.01", "0.95±0.01", "0.10±0.01", ""],
        ["without the causal mask", "-0.98±0.01", "1.02±0.01", "0.10±0.01", ""],
        ["without RoPE", "4.02±0.01", "-0.03±0.01", "0.10±0.01", "0.50±0.01"],
        ["without both", "-0.07±0.01", "-0.01±0.01", "0.10±0.01", ""],
        ["with constant queries (W_Q)", "5.66±0.01", "0.93±0.01", "0.10±0.01", "0.50±0.01"],
        ["with constant keys (W_K)", "-0.59±0.01", "0.51±0.01", "0.10±0.01", "0.50±0.01"],
        ["with both constant", "-1.12±0.01", "1.01±0.01", "0.10±0.01", "0.50±0.01"],
        ["attention writes a constant (W_O)", "-0.92±0.01", "1.01±0.01", "0.10±0.01", "0.50±0.01"],
    ]
    assert "Cost: the rise of the loss from 3.00, empty with" in result.caption


def test_a_run_of_all_layers_shows_their_mean() -> None:
    result = lead(tables(), settings=MANIFEST["settings"] | {"layers": "all"})
    assert result.sentence.startswith(
        "In the mean of 2 layers, the first key leads by 3.1 nats: -0.5 without the causal mask"
    )
    assert result.table.columns[0] == "mean of 2 layers\nat 64 tokens, nats ±95%"
    assert result.table.iloc[0].tolist()[1:] == ["3.08±0.01", "0.47±0.01", "0.05±0.01", ""]


def test_noise_and_what_was_not_measured_are_said_in_words() -> None:
    given = tables()
    given["pattern"].loc[:, ["non_relative_low", "kept"]] = [-0.1, math.nan]
    given["over_layers"] = given["over_layers"].drop(columns=["loss", "cost"])
    result = lead(given)
    assert result.table.iloc[1].tolist()[1:] == ["-0.98±0.01", "within noise"]
    assert "Cost" not in result.caption


def test_another_replacement_is_named_and_a_first_key_that_trails_has_its_sign() -> None:
    values = {"intact": (-8.2, 5.2), "mask": (-1.0, 0.02), "w_q+w_k": (0.0, 0.1)}
    result = lead(tables(values, "identity"), positional_sources=["mask"])
    assert result.sentence == (
        "L1's first key has a lead of -8.2 nats: -1.0 without the causal mask. Of the order of its "
        "other keys, 5.20 nats strong, 0.02 is there without the causal mask."
    )
    assert (
        result.table.iloc[2, 0] == "with the query-key circuit (W_Q with W_K) replaced by identity"
    )


def test_noise_is_not_called_a_pattern() -> None:
    given = tables()
    given["pattern"]["amplitude_low"] = -1.0
    result = lead(given)
    assert "some-model shows no positional pattern" in result.sentence
    assert result.table is None


def test_the_terminal_shows_sentence_table_and_path_and_all_else_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, tables())
    assert len(lines) < 25
    assert lines[-1] == "open runs/x/report.html"
    row = "1, lead, mask 1 [0.99, 1.01]"
    assert row not in lines
    lines = shown(capsys, tables(), verbose=True)
    assert row in lines
    assert any(line.startswith("Layers and heads count from 0") for line in lines)
    assert lines[-1] == "open runs/x/report.html"
