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
    "conditions": ["intact", "mask", "rope", "mask+rope", "w_q", "w_k", "w_q+w_k", "w_o"],
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
LAYERS = {"lead": 2, "kept": 2, "non_relative": 1}  # with values above their noise
LOST = {  # in how many of them less than half is left
    "mask": {"lead": 2, "non_relative": 1},
    "rope": {"kept": 2, "lead": 1, "non_relative": 1},
    "mask+rope": {"lead": 2, "kept": 2, "non_relative": 1},
    "w_k": {"lead": 2, "kept": 2},
    "w_o": {"lead": 2},
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
            | {f"{name}_layers": n for name, n in LAYERS.items()}
            | {f"{name}_below_half": LOST.get(removed, {}).get(name, 0) for name in LAYERS}
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
        "RoPE makes the order of the keys (2 of 2 layers). The causal mask makes the first key's "
        "lead over the others (2 of 2 layers). What is not a function of distance needs the causal "
        "mask (1 of 1 layer where it exceeds its noise) and RoPE (1). The order goes through keys "
        "that vary (W_K). The lead goes through keys that vary (W_K) and attention that writes "
        "what varies (W_O). None of them goes through queries that vary (W_Q) in most layers. Text "
        "costs more, in nats a token: 0.50 without RoPE."
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
    assert result.table.columns[0] == "mean of 2 layers\nat 64 tokens, nats ±95%"
    assert result.table.iloc[0].tolist()[1:] == ["3.08±0.01", "0.47±0.01", "0.05±0.01", ""]


def test_noise_and_what_was_not_measured_are_said_in_words() -> None:
    given = tables()
    given["pattern"].loc[:, ["non_relative_low", "kept"]] = [-0.1, math.nan]
    given["over_layers"] = given["over_layers"].drop(columns=["loss", "cost"])
    result = lead(given)
    assert result.table.iloc[1].tolist()[1:] == ["-0.98±0.01", "within noise"]
    assert "Cost" not in result.caption


def test_where_no_source_dominates_the_sentence_says_so_with_the_counts() -> None:
    given, means = tables(), tables()["over_layers"].set_index("removed", drop=False)
    means.loc["mask", ["lead_below_half", "kept_below_half"]] = [1, 0]  # half of them is not most
    means.loc["rope", "kept_below_half"] = 1
    means["non_relative_layers"] = 0
    said = lead(given | {"over_layers": means.reset_index(drop=True)}).sentence.split(". ")
    assert said[:3] == [
        "No source alone makes the order of the keys in most layers: the causal mask (0 of 2 "
        "layers) and RoPE (1)",
        "No source alone makes the first key's lead over the others in most layers: the causal "
        "mask (1 of 2 layers) and RoPE (1)",
        "What is not a function of distance exceeds its noise in no layer",
    ]


def test_another_replacement_is_named_and_a_first_key_that_trails_has_its_sign() -> None:
    values = {"intact": (-8.2, 5.2), "mask": (-1.0, 0.02), "w_k": (0.0, 0.1), "w_q+w_k": (0, 0.1)}
    result = lead(tables(values, "identity"), positional_sources=["mask"])
    assert "The order and the lead go through W_K as trained." in result.sentence
    assert result.table.iloc[0, 1] == "-8.20±0.01"
    names = result.table.iloc[2:, 0].tolist()
    of_circuit = "with the query-key circuit (W_Q with W_K) replaced by identity"
    assert names == ["with W_K replaced by identity", of_circuit]


def test_a_layers_makers_are_named_with_what_is_left_without_each_source() -> None:
    given = tables()
    given["pattern"].loc[given["pattern"]["layer"] == 0, "kept_low"] = -1.0
    section = ablate_page.maker_section(Run(manifest=manifest_of(**MANIFEST), tables=given))
    of_layer, of_other = section.table.iloc[1].tolist(), section.table.iloc[0].tolist()
    assert of_layer == [
        "L1",
        "mask: 6.16; -0.98 without mask, 4.02 without RoPE",
        "RoPE: 0.95; 1.02 without mask, -0.03 without RoPE",
        "no source alone: 0.10; 0.10 without mask, 0.10 without RoPE",
    ]
    assert (of_other[0], of_other[2]) == ("L0", "within noise")


def test_noise_is_not_called_a_pattern() -> None:
    given = tables()
    given["pattern"]["amplitude_low"] = -1.0
    result = lead(given)
    assert result.sentence == (
        "some-model shows no positional pattern in its mean over heads that exceeds the noise, so "
        "no source makes one. Single heads may have one: --per-head shows them. The causal mask "
        "makes the first key's lead over the others (2 of 2 layers)."
    )
    assert result.table is None
    given["over_layers"]["lead_layers"] = 1  # half of the layers is not most
    assert lead(given).sentence.endswith("--per-head shows them.")


def test_the_terminal_shows_sentence_table_and_path_and_all_else_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, tables())
    assert len(lines) <= 27  # three of the headings, two of a name
    assert lines[-1] == "open runs/x/report.html"
    row = "1, lead, mask 1 [0.99, 1.01]"
    assert row not in lines
    lines = shown(capsys, tables(), verbose=True)
    assert row in lines
    assert any(line.startswith("Layers and heads count from 0") for line in lines)
    assert lines[-1] == "open runs/x/report.html"
