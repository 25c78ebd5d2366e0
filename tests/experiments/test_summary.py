"""The first sentence and table of a run, and the terminal, from tables written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.ablation import sections
from nope_probe.experiments.sections import print_report
from nope_probe.reports.page import Lead
from nope_probe.runtime.folder import Run

MANIFEST: dict[str, Any] = {
    "model": {"name": "some-model"},
    "conditions": ["mask+rope", "rope"],
    "replacements": ["identity"],
    "player_sets": {"circuits": ["mask", "qk", "ov"]},
    "conjunctions": {"circuits": [1]},
    "settings": {"folds": 8, "seq_len": 64},
    "skip_keys": 1,
    "seconds": 3.0,
}
PLAYER_NUMBERS = ["share", "lost", "alone", "amplification"]


def interval(name: str, value: float, half: float) -> dict[str, float]:
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def two_layers(labels: list[dict[str, Any]], **estimates: tuple[float, float]) -> pd.DataFrame:
    """A table of two layers: in each, a row per group of labels, with estimates (half widths)."""
    rows = []
    for layer in (0, 1):
        for group in labels:
            row = {"layer": layer, **group}
            for name, numbers in estimates.items():
                row |= interval(name, *numbers)
            rows.append(row)
    return pd.DataFrame(rows)


def tables(amplitude: float = 0.5) -> dict[str, pd.DataFrame]:
    pattern = two_layers([{"kept": "mask+rope"}], amplitude=(amplitude, 0.1), locality=(-0.3, 0.1))
    pattern.loc[0, ["amplitude", "amplitude_low", "amplitude_high"]] -= amplitude / 2
    shares = {"content": 0.02, "mask": -0.12, "rope": 1.1, "mask_x_rope": 0.0, "position": 0.98}
    terms = [{"term": term, **interval("share", size, 0.01)} for term, size in shares.items()]
    players = [
        {"player_set": "circuits", "player": player, "replacement": "identity"}
        | interval("lost", size, 0.1)
        for player, size in (("mask", 0.05), ("qk", 0.9), ("ov", -0.4))
    ]
    parts = {"share": (1 / 3, 0.01), "alone": (0.1, 0.01), "amplification": (5.0, 0.5)}
    effect = {"with_mask": (0.3, 0.01), "without_mask": (0.2, 0.01), "difference": (0.1, 0.01)}
    return {
        "pattern": pattern,
        "sources": two_layers(terms, rms=(0.2, 0.01)),
        "players": two_layers(players, **parts),
        "non_relative": two_layers([{"tokens": "text"}], **effect),
        "controls": pd.DataFrame(columns=["layer", "tokens", "skip_keys", "kept", "amplitude"]),
    }


def lead(manifest: dict[str, Any], tables: dict[str, pd.DataFrame]) -> Lead:
    return sections.lead(sections.Findings(Run(manifest=manifest, tables=tables)))


def shown(
    capsys: pytest.CaptureFixture[str], tables: dict[str, pd.DataFrame], verbose: bool = False
) -> list[str]:
    """Return the lines that a run prints, with single spaces."""
    run = Run(manifest=MANIFEST, tables=tables | {"offsets": pd.DataFrame({"term": []})})
    print_report(sections.report(run), MANIFEST, Path("runs/x"), verbose)
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_the_lead_names_who_makes_the_strongest_layer_and_what_is_lost_without_each() -> None:
    result = lead(MANIFEST, tables())
    assert result.sentence == (
        "RoPE makes the positional pattern of L1: 110% [109, 111] of its 0.5 nats at 64 tokens."
    )
    assert result.table.to_numpy().tolist() == [
        ["causal mask", "5%", "unclear: the interval is too wide"],
        ["W_Q and W_K", "90%", "needed"],
        ["W_V and W_O", "-40%", "works against the pattern"],
    ]
    assert result.table.columns.tolist() == ["L1, what is lost without", "identity", "verdict"]


def with_parts(**first: float) -> dict[str, pd.DataFrame]:
    """Return tables whose shares have parts at the first key, as given, and among the others."""
    given = tables()
    sources = given["sources"]
    for end in ("", "_low", "_high"):
        sources[f"share_first{end}"] = sources["term"].map(first).fillna(0.0)
        sources[f"share_others{end}"] = sources[f"share{end}"] - sources[f"share_first{end}"]
    return given


def test_the_makers_at_the_first_key_and_among_the_others_are_named_where_they_differ() -> None:
    sources_alone = MANIFEST | {"player_sets": {"players": ["mask", "rope"]}}
    result = lead(sources_alone, with_parts(mask=0.2, mask_x_rope=0.2))
    assert result.sentence == (
        "RoPE makes L1's pattern among the other keys, mask and RoPE together its preference for "
        "the first key: 40% of 0.5 nats at 64 tokens."
    )
    assert result.table.iloc[0].tolist() == ["RoPE", "110%", "0%", "110%"]
    assert result.table.columns.tolist()[1:] == ["all keys", "first key", "other keys"]
    little = lead(sources_alone, with_parts(mask=0.02, rope=0.02))
    assert little.sentence.startswith("RoPE makes the positional pattern of L1: 110%")
    most = lead(sources_alone, with_parts(rope=1.1, mask=-0.12))
    assert most.sentence.startswith("RoPE makes L1's preference for the first key: 110%")


def test_noise_is_not_called_a_pattern() -> None:
    result = lead(MANIFEST, tables(amplitude=0.05))
    assert "some-model shows no positional pattern" in result.sentence
    assert result.table.empty


def test_the_terminal_shows_sentence_table_and_path_and_all_else_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, tables())
    assert len(lines) < 12
    assert lines[-1] == "open runs/x/report.html"
    assert "1, rope 110.0% [109.0, 111.0] 0.2 [0.19, 0.21]" not in lines
    lines = shown(capsys, tables(), verbose=True)
    assert "1, rope 110.0% [109.0, 111.0] 0.2 [0.19, 0.21]" in lines
    assert any(line.startswith("Layers and heads count from 0") for line in lines)
    assert lines[-1] == "open runs/x/report.html"


def test_empty_shares_are_shown_as_no_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    given = tables()
    given["sources"].loc[given["sources"]["layer"] == 1, ["share", "share_low", "share_high"]] = (
        np.nan
    )
    text = "\n".join(shown(capsys, given, verbose=True))
    assert text.count("no pattern 0.2 [0.19, 0.21]") == 5  # the four terms and their sum


def test_players_are_listed_with_what_is_lost_alone_and_shared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = tables()
    players = given["players"]
    players.loc[players["player"] == "qk", ["alone", "amplification"]] = np.nan
    players.loc[players["layer"] == 0, PLAYER_NUMBERS] = np.nan
    lines = shown(capsys, given, verbose=True)
    assert "1, ov, identity -40.0% [-50.0, -30.0] 33.3% [32.3, 34.3]" in lines
    assert "0, mask, identity no pattern no pattern" in lines
    assert "1, qk, identity" in lines, "blank where undefined though a share is"
