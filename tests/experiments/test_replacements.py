"""Several replacements side by side, bands of RoPE as players, and what bad input gets."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from nope_probe.analyses.shapley import player, player_set
from support.command_line import refused
from support.rounding import assert_same
from support.tiny_models import tokens

from nope_probe import ablate
from nope_probe.experiments.ablation.analyse import side_by_side
from nope_probe.experiments.ablation.run import run_ablations
from nope_probe.experiments.ablation.sections import Findings, lead
from nope_probe.experiments.verdicts import DEPENDS, UNCLEAR, VERDICTS
from nope_probe.runtime.folder import Run

pytestmark = pytest.mark.usefixtures("unenforced", "undrawn")

SMALL = ["--n-seqs", "7", "--seq-len", "13", "--folds", "5", "--layers", "2", "--data", "random"]
PLAYERS = ["mask", "w_q", "w_k"]


def test_each_replacement_has_the_tables_of_a_run_with_it_alone(
    bridge: Callable[[str], Any],
) -> None:
    model, inputs = bridge("llama"), tokens(16, 11)
    kinds = ("random", "identity", "mean")
    together, mean = (
        run_ablations(model, inputs, players=PLAYERS, folds=4, replacement=replacement)
        for replacement in (kinds, "mean")
    )
    for name in ("players", "interactions"):
        of_mean = together.tables[name].query("replacement == 'mean'").reset_index(drop=True)
        pd.testing.assert_frame_equal(of_mean, mean.tables[name])
    names = set(together.maps)
    assert {f"score_{kind}/mask+rope" for kind in kinds[1:]} <= names
    assert "score_random/mask+rope" not in names
    # The intact model, and removals without a weight (the mask alone), run once.
    assert "score_mean/w_q+w_k" not in names
    assert "score_mean/mask+rope+w_q" in names


def test_by_default_mean_says_what_is_lost_without_each_weight_from_the_fewest_conditions(
    bridge: Callable[[str], Any],
) -> None:
    model, inputs = bridge("llama"), tokens(16, 11)
    study, whole = (
        run_ablations(model, inputs, players=PLAYERS, folds=4, replacement=replacement)
        for replacement in (None, ("identity", "mean"))
    )
    names = {name for name in study.maps if name.startswith("score_mean/")}
    # Without W_Q or W_K, with and without the mask.
    assert names == {f"score_mean/{kept}rope+{w}" for kept in ("", "mask+") for w in ("w_q", "w_k")}
    for name in names:
        np.testing.assert_array_equal(study.maps[name], whole.maps[name])
    assert not {name for name in study.maps if name.startswith("shapley_mean/")}
    of_mean, expected = (
        item.players.query("replacement == 'mean' and player != 'mask'").reset_index(drop=True)
        for item in (study, whole)
    )
    measured = [name for name in expected if not name.startswith(("share", "alone"))]
    pd.testing.assert_frame_equal(of_mean[measured], expected[measured])
    assert of_mean["share"].isna().all()
    for table in ("players", "interactions"):
        first, same = (
            item.tables[table].query("replacement == 'identity'") for item in (study, whole)
        )
        pd.testing.assert_frame_equal(first.reset_index(drop=True), same.reset_index(drop=True))


LOST = {  # with its bounds, under identity and under mean
    "mask": ((1.0, 0.98, 1.02), None),
    "qk": ((0.8, 0.77, 0.83), (0.9, 0.85, 0.95)),
    "ov": ((0.05, 0.01, 0.09), (0.02, 0.0, 0.04)),
    "w_q": ((0.96, 0.94, 0.98), (0.03, 0.0, 0.06)),
    "w_k": ((0.7, 0.65, 0.75), (0.6, 0.5, 0.7)),
    "w_o": ((0.02, 0.0, 0.04), (0.5, 0.4, 0.6)),
    "w_v": ((0.14, 0.09, 0.19), (0.0, -0.2, 0.2)),
}


SETS = {"players": ["mask", "w_q", "w_k", "w_o", "w_v"], "circuits": ["mask", "qk", "ov"]}


def lost_table(player_set: str, *replacements: str) -> list[list[str]]:
    """Return the first table of a run of one player set, from LOST."""
    rows = [
        {"player_set": player_set, "player": player, "replacement": kind}
        | dict(zip(("lost", "lost_low", "lost_high"), interval, strict=True))
        for player in SETS[player_set]
        for kind, interval in zip(("identity", "mean"), LOST[player], strict=True)
        if kind in replacements and interval is not None
    ]
    pattern = {"kept": "all", "amplitude": 1.0, "amplitude_low": 0.5}
    source = {"term": "mask", "share": 1.0, "share_low": 0.9, "share_high": 1.1}
    tables = {"players": rows, "pattern": [pattern], "sources": [source]}
    sets = {player_set: SETS[player_set]}
    manifest = {
        "settings": {"seq_len": 64},
        "conditions": ["all"],
        "player_sets": sets,
        "replacements": replacements,
    }
    frames = {name: pd.DataFrame(table).assign(layer=2) for name, table in tables.items()}
    return lead(Findings(Run(manifest=manifest, tables=frames))).table.to_numpy().tolist()


def test_the_first_table_says_of_a_weight_what_both_replacements_say() -> None:
    assert lost_table("circuits", "identity", "mean") == [
        ["causal mask", "100%", "", "needed"],
        ["W_Q and W_K", "80%", "90%", "needed"],
        ["W_V and W_O", "5%", "2%", "not needed"],
    ]
    _, w_q, w_k, w_o, w_v = lost_table("players", "identity", "mean")
    assert w_q == ["W_Q", "96%", "3%", "needed for its mean direction"]
    assert w_k == ["W_K", "70%", "60%", "needed"]
    assert w_o == ["W_O", "2%", "50%", "needed for what it passes on"]
    assert w_v == ["W_V", "14%", "0%", "unclear: the interval is too wide"]


def test_with_one_replacement_the_first_table_has_its_column_alone() -> None:
    assert lost_table("circuits", "identity") == [
        ["causal mask", "100%", "needed"],
        ["W_Q and W_K", "80%", "needed"],
        ["W_V and W_O", "5%", "not needed"],
    ]


def test_verdicts_are_at_most_8_words() -> None:
    texts = (*VERDICTS.values(), DEPENDS, UNCLEAR)
    assert max(len(words.split()) for words in texts) <= 8


def test_the_first_replacement_is_that_of_page_and_figures() -> None:
    table = pd.DataFrame(
        {"layer": [0], "player_set": ["players"], "player": ["w_q"], "share": [0.5]}
    )
    both = side_by_side({"mean": table, "zero": table.assign(share=0.7)})
    assert list(both.columns) == ["layer", "player_set", "player", "replacement", "share"]
    manifest = {
        "settings": {"seq_len": 64},
        "conditions": ["all"],
        "replacements": ["mean", "zero"],
    }
    findings = Findings(Run(manifest=manifest, tables={"players": both, "sources": table}))
    pd.testing.assert_frame_equal(findings.tables["players"], table)
    pd.testing.assert_frame_equal(findings.tables["sources"], table)


def test_bands_share_what_rope_brings(bridge: Callable[[str], Any]) -> None:
    model, inputs = bridge("llama"), tokens(16, 11)
    players = ["mask", "rope_high", "rope_low"]
    bands, whole = (
        run_ablations(model, inputs, players=names, folds=4)
        for names in (players, ["mask", "rope"])
    )
    for name in ("score/none", "score/mask", "score/rope", "source/rope"):
        np.testing.assert_array_equal(bands.maps[name], whole.maps[name])
    added = sum(bands.maps[f"shapley/{name}"] for name in players)
    expected = whole.maps["shapley/mask"] + whole.maps["shapley/rope"]
    assert_same(added, expected)
    assert set(bands.players["player"]) == {*players}


def test_bands_are_sources_and_do_not_play_beside_rope() -> None:
    assert player("rope_high").is_source
    assert player("rope[0:3]+w_q").is_source
    with pytest.raises(ValueError, match="rope and rope_low share rotary pairs"):
        player_set(["rope", "rope_low"])


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("llama", "--bands 6", "expected from 1 to 5 bands for 5 pairs, got 6"),
        ("llama", "--players mask rope[4:6]", "no band rope[4:6]: the model rotates 5 pairs"),
        ("smollm3-nope", "--bands 2", "--bands divides RoPE, and the model has none; it has mask"),
        ("smollm3-nope", "--players mask rope_high", "the model has no rope_high; it has mask"),
    ],
)
def test_bands_that_the_model_lacks_are_refused(
    model: str, arguments: str, message: str, tiny: Any, tmp_path: Any, capfd: Any
) -> None:
    folder = tiny(model).folder
    line = refused(capfd, tmp_path, ablate, *SMALL, "--model", folder, *arguments.split())
    assert message in line
