"""Scores and patterns by distance, in the runs of ablate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from support.command_line import run_command
from support.rounding import NETWORK

from nope_probe import ablate

N_POS = 13
SMALL = ["--n-seqs", "30", "--seq-len", N_POS, "--folds", "5", "--batch-size", "11"]


@pytest.fixture(scope="module")
def scored(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "phi3"
    model = ["--model", tiny("phi3").folder, "--layers", 2, "--data", "random"]
    run_command(ablate, "--remove", "none", *SMALL, *model, "--out", out)
    return out


def test_offsets_are_the_means_of_the_maps_diagonals(scored: Path):
    maps, table = load_file(scored / "maps.safetensors"), pd.read_csv(scored / "offsets.csv")
    rows = table[(table["term"] == "score") & (table["layer"] == 1)]
    gap = NETWORK * float(np.nanmax(np.abs(maps["score/intact"])))
    assert rows["offset"].tolist() == list(range(1, N_POS - 1))
    for row in rows.to_dict("records"):
        diagonal = np.diagonal(maps["score/intact"][1], -row["offset"])[
            1:
        ].mean()  # of the other keys
        assert row["mean_low"] <= row["mean"] <= row["mean_high"]
        assert row["mean"] == pytest.approx(diagonal, abs=gap)
