"""Several replacements side by side, bands of RoPE as players, and what bad input gets."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.command_line import refused
from support.tiny_models import tokens

from nope_probe import ablate
from nope_probe.analyses.shapley import player, player_set
from nope_probe.experiments.ablation.analyse import side_by_side
from nope_probe.experiments.ablation.player_sections import Findings, agreement
from nope_probe.experiments.ablation.study import run_ablations
from nope_probe.runtime.folder import Run

SMALL = ["--n-seqs", "7", "--seq-len", "13", "--folds", "5", "--layers", "2", "--data", "random"]
PLAYERS = ["mask", "w_q", "w_k"]


def test_each_replacement_has_the_tables_of_a_run_with_it_alone(
    bridge: Callable[[str], Any],
) -> None:
    model, inputs = bridge("llama"), tokens(16, 11)
    kinds = ("random", "identity", "mean")
    together, mean = (
        run_ablations(model, inputs, players=PLAYERS, n_folds=4, replacement=replacement)
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


def test_statements_that_hold_under_all_replacements_are_told_from_the_others() -> None:
    low = {
        "w_q": {"identity": 0.8, "mean": 0.3},
        "w_k": {"identity": 0.5, "mean": 0.05},
        "w_o": {"identity": -0.1, "mean": float("nan")},
    }
    rows = [
        {"player_set": "players", "player": name, "replacement": kind, "lost_low": value}
        for name, values in low.items()
        for kind, value in values.items()
    ]
    pattern = {"kept": "all", "amplitude": 1.0, "amplitude_low": 0.5}
    tables = {"players": pd.DataFrame(rows), "pattern": pd.DataFrame([pattern])}
    manifest = {"conditions": ["all"], "player_sets": {"players": [*low]}}

    def sentences(*replacements: str) -> list[str]:
        run = Run(
            manifest=manifest | {"replacements": replacements},
            tables={name: table.assign(layer=2) for name, table in tables.items()},
        )
        return [*agreement(Findings(run))]

    [sentence] = sentences("identity", "mean")
    assert "in L2" in sentence
    assert "W_Q is needed under identity and mean; W_K is needed under identity only" in sentence
    assert "W_O is needed under none" in sentence
    assert sentences("mean") == []


def test_the_first_replacement_is_that_of_page_and_figures() -> None:
    table = pd.DataFrame(
        {"layer": [0], "player_set": ["players"], "player": ["w_q"], "share": [0.5]}
    )
    both = side_by_side({"mean": table, "zero": table.assign(share=0.7)})
    assert list(both.columns) == ["layer", "player_set", "player", "replacement", "share"]
    manifest = {"conditions": ["all"], "replacements": ["mean", "zero"]}
    found = Findings(Run(manifest=manifest, tables={"players": both, "sources": table}))
    pd.testing.assert_frame_equal(found.tables["players"], table)
    pd.testing.assert_frame_equal(found.tables["sources"], table)


def test_bands_share_what_rope_brings(bridge: Callable[[str], Any]) -> None:
    model, inputs = bridge("llama"), tokens(16, 11)
    players = ["mask", "rope_high", "rope_low"]
    bands, whole = (
        run_ablations(model, inputs, players=names, n_folds=4)
        for names in (players, ["mask", "rope"])
    )
    for name in ("score/none", "score/mask", "score/rope", "source/rope"):
        np.testing.assert_array_equal(bands.maps[name], whole.maps[name])
    added = sum(bands.maps[f"shapley/{name}"] for name in players)
    expected = whole.maps["shapley/mask"] + whole.maps["shapley/rope"]
    np.testing.assert_allclose(added, expected, rtol=0, atol=1e-4)
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
