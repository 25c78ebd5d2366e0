"""The headlines and tables on the terminal, from tables written by hand."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nope_probe.experiments.ablation import sections
from nope_probe.experiments.ablation.player_sections import Findings
from nope_probe.experiments.ablation.sections import report
from nope_probe.experiments.circuit.sections import _stages_as_text
from nope_probe.experiments.circuit.sections import headline as circuit_headline
from nope_probe.experiments.scores.sections import headline as scores_headline
from nope_probe.experiments.sections import print_report
from nope_probe.runtime.folder import Run

MANIFEST: dict[str, Any] = {
    "model": {"name": "some-model"},
    "conditions": ["mask+rope", "rope"],
    "player_sets": {"circuits": ["mask", "qk", "ov"]},
    "conjunctions": {"circuits": [1]},
    "settings": {"folds": 8},
    "skip_keys": 1,
    "seconds": 3.0,
}


def interval(name: str, value: float, half: float) -> dict[str, float]:
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def tables(amplitude: float = 0.5) -> dict[str, pd.DataFrame]:
    whole = [
        {"layer": layer, "kept": "mask+rope"}
        | interval("amplitude", size, 0.1)
        | interval("locality", -0.3, 0.1)
        for layer, size in ((0, amplitude / 2), (1, amplitude))
    ]
    shares = {"content": 0.02, "mask": -0.12, "rope": 1.1, "mask_x_rope": 0.0, "position": 0.98}
    sources = [
        {"layer": layer, "term": term} | interval("rms", 0.2, 0.01) | interval("share", s, 0.01)
        for layer in (0, 1)
        for term, s in shares.items()
    ]
    lost = {"mask": 0.05, "qk": 0.9, "ov": -0.4}
    players = [
        {"layer": layer, "player_set": "circuits", "player": player}
        | interval("share", 1 / 3, 0.01)
        | interval("alone", 0.1, 0.01)
        | interval("lost", value, 0.1)
        | interval("amplification", 5.0, 0.5)
        for layer in (0, 1)
        for player, value in lost.items()
    ]
    effects = [
        {"layer": layer, "tokens": "text"}
        | interval("with_mask", 0.3, 0.01)
        | interval("without_mask", 0.2, 0.01)
        | interval("difference", 0.1, 0.01)
        for layer in (0, 1)
    ]
    names = ("pattern", "sources", "players", "non_relative", "controls")
    controls = pd.DataFrame(columns=["layer", "tokens", "skip_keys", "kept", "amplitude"])
    frames = (*map(pd.DataFrame, (whole, sources, players, effects)), controls)
    return dict(zip(names, frames, strict=True))


def headline(manifest: dict[str, Any], tables: dict[str, pd.DataFrame]) -> list[str]:
    return sections.headline(Findings(Run(manifest=manifest, tables=tables)))


def show(tables: dict[str, pd.DataFrame]) -> None:
    empty = {"offsets": pd.DataFrame({"term": [], "layer": []})}
    print_report(report(Run(manifest=MANIFEST, tables=tables | empty)), MANIFEST, Path("runs/x"))


def test_the_first_sentence_names_the_strongest_layer_and_its_sources_by_size():
    first = headline(MANIFEST, tables())[0]
    assert first.startswith("In L1 of some-model")
    assert "0.50 nats RMS [0.40, 0.60]" in first
    assert "prefers far keys (rank correlation with the key's position -0.30)" in first
    rope, mask = first.index("RoPE 110% [109, 111]"), first.index("the causal mask -12% [-13, -11]")
    assert rope < mask < first.index("the content of the text 2% [1, 3]")


def test_the_second_sentence_names_what_is_lost_and_what_grows():
    second = headline(MANIFEST, tables())[1]
    assert "loses 90% [80, 100] without the query-key circuit" in second
    assert "grows by 40% [30, 50] without the value-output circuit" in second


def test_equal_shares_are_called_no_measurement_of_equal_weight():
    assert "about 1/3: the signature of “all are needed”" in headline(MANIFEST, tables())[1]
    elsewhere = {**MANIFEST, "conjunctions": {"circuits": [0]}}
    assert "signature" not in headline(elsewhere, tables())[1]


def test_noise_is_not_called_a_pattern():
    [only] = headline(MANIFEST, tables(amplitude=0.05))
    assert only == (
        "some-model shows no positional pattern in its attention that exceeds the noise."
    )


def test_empty_shares_are_shown_as_no_pattern(capsys: pytest.CaptureFixture[str]):
    ours = tables()
    ours["sources"].loc[ours["sources"]["layer"] == 1, ["share", "share_low", "share_high"]] = (
        float("nan")
    )
    show(ours)
    shown = capsys.readouterr().out
    assert shown.count("no pattern") == 5  # the four terms and their sum
    assert "110.0 [109.0, 111.0]" in shown
    assert "0.300 +0.100 [+0.090, +0.110]" in " ".join(shown.split())


def test_controls_are_named_by_what_differs_from_the_run(capsys: pytest.CaptureFixture[str]):
    ours = tables()
    rows = [("shuffled", 0, 0.7), ("shuffled", 1, 0.6)]  # a run on shuffled tokens
    ours["controls"] = pd.DataFrame(
        {"layer": 1, "tokens": tokens, "skip_keys": skip, "kept": "mask+rope"}
        | interval("amplitude", size, 0.1)
        for tokens, skip, size in rows
    )
    show(ours)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "layer locality skip 0 shuffled non-relative by the mask" in lines
    assert "L0 -0.30 0.300 +0.100 [+0.090, +0.110]" in lines, "no control in L0"
    assert "L1 -0.30 0.700 0.600 0.300 +0.100 [+0.090, +0.110]" in lines


def test_circuit_prints_the_measures_of_every_stage() -> None:
    rows = [
        {"layer": 1, "stage": stage, "model": model}
        | interval("amplitude", 0.25 + shift, 0.05)
        | interval("locality", -0.5 + shift, 0.125)
        | interval("relative_r2", 0.75, 0.02)
        for model, shift in (("intact", 0.0), ("ablated", 0.5))
        for stage in "ab"
    ]
    intact = ["0.25 [0.20, 0.30]", "-0.50 [-0.62, -0.38]", "0.75 [0.73, 0.77]"]
    assert _stages_as_text(pd.DataFrame(rows[:2])).iloc[1].tolist() == ["(b)", *intact]
    both = _stages_as_text(pd.DataFrame(rows))
    assert both["stage"].tolist() == ["(a) intact", "(a) ablated", "(b) intact", "(b) ablated"]
    assert both.iloc[2].tolist()[1:] == intact


def test_players_are_listed_with_what_is_lost_alone_and_shared(capsys: pytest.CaptureFixture[str]):
    ours = tables()
    players, nan = ours["players"], float("nan")
    players.loc[players["player"] == "qk", ["alone", "amplification"]] = nan
    players.loc[players["layer"] == 0, ["share", "lost", "alone", "amplification"]] = nan
    show(ours)
    shown = " ".join(capsys.readouterr().out.split())
    assert "% of the part of the pattern that the causal mask brings" in shown
    assert "lost without alone Shapley share amplifies" in shown
    assert "ov -40 [-50, -30] 10 [9, 11] 33 [32, 34] 5.0 [4.5, 5.5]" in shown
    assert "L0 mask no pattern qk no pattern ov no pattern L1" in shown
    assert "qk 90 [80, 100] 33 [32, 34] ov" in shown, "blank where undefined though a share is"


@pytest.mark.parametrize(
    ("players", "subject"),
    [
        (["mask", "rope", "qk"], "The part of the pattern that the causal mask and RoPE bring "),
        (["mask", "qk", "ov"], "The part of the pattern that the causal mask brings "),
        (["qk", "ov"], "The pattern "),
    ],
)
def test_the_players_sentence_names_what_their_shares_are_of(players: list[str], subject: str):
    manifest = {**MANIFEST, "player_sets": {"circuits": players}}
    assert headline(manifest, tables())[1].startswith(f"{subject}loses")
    ours = tables()
    ours["players"]["share"] = float("nan")
    assert headline(manifest, ours)[1] == (
        f"{subject}does not exceed the noise: its players have no shares."
    )


def scores_tables(amplitude: float) -> dict[str, pd.DataFrame]:
    rows = [
        {"layer": layer, "head": head}
        | interval("amplitude", size, 0.1)
        | interval("locality", 0.4 - layer, 0.1)
        for layer, head, size in ((0, 3, amplitude / 2), (1, 2, amplitude), (2, 0, amplitude / 3))
    ]
    table = pd.DataFrame(rows)
    return {"pattern": table.drop(columns="head"), "heads": table}


def test_the_headline_of_scores_names_the_strongest_layer_and_head():
    assert scores_headline({"model": {"name": "m"}}, scores_tables(0.5)) == [
        "The positional pattern in the attention scores of m is strongest in L1, 0.500 [0.400, "
        "0.600] nats RMS, and prefers far keys (rank correlation with the key's position -0.60).",
        "Of all heads, L1H2 has the strongest positional pattern, 0.500 [0.400, 0.600] nats "
        "(locality -0.60).",
    ]


def test_scores_that_are_noise_have_no_pattern():
    assert scores_headline({"model": {"name": "m"}}, scores_tables(0.05)) == [
        "m shows no positional pattern in its attention that exceeds the noise."
    ]


def stages(**locality: tuple[float, float, float]) -> pd.DataFrame:
    names = ("locality", "locality_low", "locality_high")
    rows = [
        {"model": "intact", "stage": stage, **dict(zip(names, each, strict=True))}
        for stage, each in locality.items()
    ]
    return pd.DataFrame(rows)


CIRCUIT = {"layer": 1, "model": {"name": "m"}, "removed": [], "absent": {}}


def test_an_inversion_is_named_only_if_intervals_are_on_opposite_sides_of_zero() -> None:
    up, down, unsure = (0.9, 0.8, 0.95), (-0.2, -0.3, -0.1), (0.1, -0.1, 0.3)
    assert circuit_headline(CIRCUIT, stages(f=up, g=down, h=up)) == [
        "In L1 of m, near keys have larger values at (f) and (h); "
        "far keys have larger values at (g).",
        "The rank correlation of a value with its key's position is +0.90 at (f), -0.20 at (g), "
        "+0.90 at (h): the positional pattern is inverted at (g), after the FFN, and restored at "
        "(h), after the next norm.",
    ]
    assert (
        "not significantly restored" in circuit_headline(CIRCUIT, stages(f=up, g=down, h=unsure))[1]
    )
    assert "not significantly inverted" in circuit_headline(CIRCUIT, stages(f=up, g=unsure))[1]
    assert "no significant trend at (g)" in circuit_headline(CIRCUIT, stages(f=up, g=unsure))[0]
