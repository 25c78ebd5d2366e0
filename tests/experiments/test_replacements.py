"""Several replacements side by side, bands of RoPE as players, and what bad input gets."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.command_line import refused
from support.tiny_models import tokens

from nope_probe import ablate, circuit
from nope_probe.analyses.shapley import player, player_set
from nope_probe.experiments.ablation.analyse import side_by_side
from nope_probe.experiments.ablation.plan import make_plan
from nope_probe.experiments.ablation.player_sections import Findings, agreement
from nope_probe.experiments.ablation.study import run_ablations
from nope_probe.runtime.folder import Run

SMALL = ["--n-seqs", "7", "--seq-len", "13", "--folds", "5", "--layers", "2", "--data", "random"]
PLAYERS = ["mask", "w_q", "w_k"]


def test_each_replacement_has_the_tables_of_a_run_with_it_alone(
    bridge: Callable[[str], Any],
) -> None:
    model, inputs = bridge("llama"), tokens(32, 11)
    kinds = ("random", "identity", "mean", "zero")
    together = run_ablations(model, inputs, players=PLAYERS, n_folds=4, replacement=kinds)
    for kind in ("random", "mean"):
        alone = run_ablations(model, inputs, players=PLAYERS, n_folds=4, replacement=kind)
        for name in ("players", "interactions"):
            ours = together.tables[name].query("replacement == @kind").reset_index(drop=True)
            pd.testing.assert_frame_equal(ours, alone.tables[name])
    assert {f"score_{kind}/mask+rope" for kind in kinds[1:]} <= set(together.maps)
    assert "score_random/mask+rope" not in together.maps


def test_the_intact_model_and_removals_without_weights_run_once(
    bridge: Callable[[str], Any],
) -> None:
    kinds = ("identity", "mean")
    maps = run_ablations(
        bridge("llama"), tokens(16, 11), players=PLAYERS, n_folds=4, replacement=kinds
    ).maps
    assert "score_mean/w_q+w_k" not in maps  # the mask alone
    assert "score_mean/mask+rope+w_q" in maps


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

    assert sentences("identity", "mean") == [
        "Of the players in L2 (needed: a tenth or more is lost without), W_Q is needed under "
        "identity and mean; W_K is needed under identity only; W_O is needed under none of "
        "identity and mean."
    ]
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
    model, inputs = bridge("llama"), tokens(32, 11)
    bands = run_ablations(model, inputs, players=["mask", "rope_high", "rope_low"], n_folds=4)
    whole = run_ablations(model, inputs, players=["mask", "rope"], n_folds=4)
    for name in ("score/none", "score/mask", "score/rope", "source/rope"):
        assert (bands.maps[name] == whole.maps[name]).sum() > 0
        assert abs(bands.maps[name] - whole.maps[name])[~pd.isna(whole.maps[name])].max() == 0
    parts = [bands.maps[f"shapley/{name}"] for name in ("mask", "rope_high", "rope_low")]
    all_of_it = whole.maps["shapley/mask"] + whole.maps["shapley/rope"]
    error = abs(sum(parts) - all_of_it)
    assert error[~pd.isna(error)].max() < 1e-4
    assert set(bands.players["player"]) == {"mask", "rope_high", "rope_low"}


def test_a_condition_without_any_band_is_the_one_without_rope() -> None:
    has = ("mask", "rope", "w_q")
    plan = make_plan(has, ["mask", "rope_high", "rope_low"])
    assert frozenset({"rope_high", "rope_low"}) not in plan.conditions
    assert [plan.name(condition) for condition in plan.conditions] == [
        "mask+rope",
        "rope",
        "mask",
        "none",
        "mask+rope_low",
        "mask+rope_high",
        "rope_low",
        "rope_high",
    ]


def test_bands_are_sources_and_do_not_play_beside_rope() -> None:
    assert player("rope_high").is_source
    assert player("rope[0:3]+w_q").is_source
    with pytest.raises(ValueError, match="rope and rope_low share rotary pairs"):
        player_set(["rope", "rope_low"])


REFUSED = {
    "no weight to replace": (
        ablate,
        ["--players", "mask", "rope", "--replacement", "mean"],
        "--replacement has no effect where no weight is removed",
    ),
    "twice": (ablate, ["--replacement", "mean", "mean"], "each --replacement once, got mean mean"),
    "gain without effect": (
        ablate,
        ["--replacement", "mean", "zero", "--gain", "norm"],
        "--gain is for the replacements identity and random, not mean zero",
    ),
    "bands without rope": (
        ablate,
        ["--bands", "2", "--players", "mask", "w_q"],
        "--bands divides the player rope, and it is not among --players",
    ),
    "more bands than pairs": (
        ablate,
        ["--bands", "6"],
        "expected from 1 to 5 bands for 5 pairs, got 6",
    ),
    "no such band": (
        ablate,
        ["--players", "mask", "rope[4:6]"],
        "no band rope[4:6]: the model rotates 5 pairs, rope[0:5]",
    ),
    "circuit: no weight to replace": (
        circuit,
        ["--remove", "mask", "--replacement", "zero"],
        "--replacement has no effect where no weight is removed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(
    case: str, tiny: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, arguments, message = REFUSED[case]
    small = SMALL if command is ablate else [*SMALL[:6], *SMALL[8:]]
    line = refused(capfd, tmp_path, command, *small, "--model", tiny("llama").folder, *arguments)
    assert re.search(re.escape(message), line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bands", "2"], "--bands divides RoPE, and the model has none; it has mask, w_q"),
        (["--players", "mask", "rope_high"], "the model has no rope_high; it has mask, w_q"),
    ],
)
def test_bands_of_a_model_without_rope_are_refused(
    arguments: list[str],
    message: str,
    tiny: Callable[[str], Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tiny("smollm3-nope").folder
    assert message in refused(capfd, tmp_path, ablate, *SMALL, "--model", folder, *arguments)
