"""The headlines and tables on the terminal, from tables written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.ablation import sections
from nope_probe.experiments.ablation.player_sections import Findings
from nope_probe.experiments.circuit.sections import _stages_as_text
from nope_probe.experiments.circuit.sections import headline as circuit_headline
from nope_probe.experiments.sections import print_report
from nope_probe.runtime.folder import Run

MANIFEST: dict[str, Any] = {
    "model": {"name": "some-model"},
    "conditions": ["mask+rope", "rope"],
    "replacements": ["identity"],
    "player_sets": {"circuits": ["mask", "qk", "ov"]},
    "conjunctions": {"circuits": [1]},
    "settings": {"folds": 8},
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


def headline(manifest: dict[str, Any], tables: dict[str, pd.DataFrame]) -> list[str]:
    return sections.headline(Findings(Run(manifest=manifest, tables=tables)))


def shown(capsys: pytest.CaptureFixture[str], tables: dict[str, pd.DataFrame]) -> list[str]:
    """Return the lines that a run prints, with single spaces."""
    run = Run(manifest=MANIFEST, tables=tables | {"offsets": pd.DataFrame({"term": []})})
    print_report(sections.report(run), MANIFEST, Path("runs/x"))
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_the_headline_names_the_strongest_layer_its_sources_by_size_and_what_is_lost():
    first, of_mask, qk, ov, signature = headline(MANIFEST, tables())
    assert first.startswith("In L1 of some-model, where it is strongest of 2 layers (0.50 nats")
    assert "0.50 nats RMS [0.40, 0.60]" in first
    assert "prefers far keys (rank correlation with the key's position -0.30)" in first
    rope, mask = first.index("RoPE 110% [109, 111]"), first.index("the causal mask -12% [-13, -11]")
    assert rope < mask < first.index("the content of the text 2% [1, 3]")
    assert of_mask.endswith(" brings loses 5% [-5, 15] without the causal mask.")
    assert qk.endswith(
        "circuit (W_Q with W_K), this part loses 90% [80, 100] with identities in their place."
    )
    assert ov.startswith(
        "Without the value-output circuit (W_V with W_O), this part grows by 40% [30, 50] "
    )
    assert "about 1/3 with identity: the signature of “all are needed”" in signature
    elsewhere = {**MANIFEST, "conjunctions": {"circuits": [0]}}
    assert headline(elsewhere, tables())[1:] == [of_mask, qk, ov]


def test_noise_is_not_called_a_pattern():
    [only] = headline(MANIFEST, tables(amplitude=0.05))
    assert "some-model shows no positional pattern" in only


def test_empty_shares_are_shown_as_no_pattern(capsys: pytest.CaptureFixture[str]):
    given = tables()
    given["sources"].loc[given["sources"]["layer"] == 1, ["share", "share_low", "share_high"]] = (
        np.nan
    )
    text = "\n".join(shown(capsys, given))
    assert text.count("no pattern") == 5  # the four terms and their sum
    assert "110.0 [109.0, 111.0]" in text
    assert "0.300 +0.100 [+0.090, +0.110]" in text


def test_the_two_parts_of_a_share_stand_beside_it_and_a_sentence_says_what_the_first_key_holds(
    capsys: pytest.CaptureFixture[str],
):
    given = tables()
    sources = given["sources"]
    first = {"content": 0.0, "mask": 0.32, "rope": -0.12, "mask_x_rope": 0.2, "position": 0.4}
    for end in ("", "_low", "_high"):
        sources[f"share_first{end}"] = sources["term"].map(first)
        sources[f"share_others{end}"] = sources[f"share{end}"] - sources[f"share_first{end}"]
    text = " ".join(shown(capsys, given))
    assert "layer term RMS, nats share, % first key" in text
    sentence = (
        "The first key holds 40% of it (causal mask 32%, mask × RoPE 20%), the other keys 60% "
        "(RoPE 122%)."
    )
    assert sentence in text
    assert len(sentence.split()) <= 25
    sources["share_first"] = 0.01 * sources["share_first"]
    assert "The first key holds" not in " ".join(shown(capsys, given)), "it is hardly anything"


def test_controls_are_named_by_what_differs_from_the_run(capsys: pytest.CaptureFixture[str]):
    labels = {"layer": 1, "tokens": "shuffled", "kept": "mask+rope"}  # a run on shuffled tokens
    controls = pd.DataFrame(
        {**labels, "skip_keys": skip, **interval("amplitude", size, 0.1)}
        for skip, size in ((0, 0.7), (1, 0.6))
    )
    lines = shown(capsys, tables() | {"controls": controls})
    assert "layer locality shuffled non-relative by the mask" in lines
    assert "L0 -0.30 0.300 +0.100 [+0.090, +0.110]" in lines, "no control in L0"
    assert "L1 -0.30 0.600 0.300 +0.100 [+0.090, +0.110]" in lines


def test_players_are_listed_with_what_is_lost_alone_and_shared(capsys: pytest.CaptureFixture[str]):
    given = tables()
    players = given["players"]
    players.loc[players["player"] == "qk", ["alone", "amplification"]] = np.nan
    players.loc[players["layer"] == 0, PLAYER_NUMBERS] = np.nan
    text = " ".join(shown(capsys, given))
    assert "The circuits (removed weights: identity), % of the part of the pattern that" in text
    assert "lost without alone Shapley share amplifies" in text
    assert "ov -40 [-50, -30] 10 [9, 11] 33 [32, 34] 5.0 [4.5, 5.5]" in text
    assert "L0 mask no pattern qk no pattern ov no pattern L1" in text
    assert "qk 90 [80, 100] 33 [32, 34] ov" in text, "blank where undefined though a share is"


@pytest.mark.parametrize(
    ("players", "subject"),
    [
        (["mask", "rope", "qk"], "The part of the pattern that the causal mask and RoPE bring"),
        (["mask", "qk", "ov"], "The part of the pattern that the causal mask brings"),
        (["qk", "ov"], "The pattern"),
    ],
)
def test_the_players_sentence_names_what_their_shares_are_of(players: list[str], subject: str):
    manifest, given = {**MANIFEST, "player_sets": {"circuits": players}}, tables()
    given["players"] = given["players"].query("player in @players")
    subject_of_weights = f"{subject[0].lower()}{subject[1:]} loses 90%"
    assert (f"{subject} loses" if "mask" in players else subject_of_weights) in "".join(
        headline(manifest, given)[1]
    )
    given["players"] = given["players"].assign(lost=np.nan)
    assert headline(manifest, given)[1].startswith(f"{subject} does not exceed the noise")


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


UP, DOWN, UNSURE = (0.9, 0.05), (-0.2, 0.1), (0.1, 0.2)


@pytest.mark.parametrize(
    ("stages", "preferences", "inversion"),
    [
        (
            {"f": UP, "g": DOWN, "h": UP},
            "near keys have larger values at (f) and (h); far keys have larger values at (g)",
            "+0.90 at (f), -0.20 at (g), +0.90 at (h): the positional pattern is inverted at (g), "
            "after the FFN, and restored at (h)",
        ),
        ({"f": UP, "g": DOWN, "h": UNSURE}, "trend at (h)", "not significantly restored"),
        ({"f": UP, "g": UNSURE}, "no significant trend at (g)", "not significantly inverted"),
    ],
)
def test_an_inversion_is_named_only_if_intervals_are_on_opposite_sides_of_zero(
    stages: dict[str, tuple[float, float]], preferences: str, inversion: str
) -> None:
    table = pd.DataFrame(
        {"model": "intact", "stage": stage} | interval("locality", *estimate)
        for stage, estimate in stages.items()
    )
    manifest = {"layer": 1, "model": {"name": "m"}, "removed": [], "absent": {}}
    first, second = circuit_headline(manifest, table)
    assert first.startswith("In L1 of m")
    assert preferences in first
    assert inversion in second
