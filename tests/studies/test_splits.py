"""Splits in the runs of scores and ablate: their tables, maps and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from support.command_line import run_command
from support.rounding import MEASURE, NETWORK, assert_same

from nope_probe import ablate

N_POS = 13
SMALL = ["--n-seqs", "30", "--seq-len", N_POS, "--folds", "5", "--batch-size", "11"]


@pytest.fixture(scope="module")
def scored(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "phi3"
    model = ["--model", tiny("phi3").folder, "--layers", 2, "--data", "random"]
    run_command(
        ablate, "--remove", "none", *SMALL, *model, "--per-head", "--bands", "4", "--out", out
    )
    return out


def test_the_maps_of_bands_add_up_to_the_score_map(scored: Path):
    page = (scored / "report.html").read_text()
    assert "The pattern by RoPE band" in page
    assert "Scores by distance" in page
    maps = load_file(scored / "maps.safetensors")
    bands = [captured for name, captured in maps.items() if name.startswith("band/")]
    assert len(bands) == 5  # 2 pi 10000^(f/4): 6, 63, 628, 6283; and the rest
    assert_same(sum(bands), maps["score/intact"])


def test_the_table_of_bands_names_pairs_and_wavelengths_and_its_shares_add_to_1(scored: Path):
    table = pd.read_csv(scored / "terms.csv")
    assert table["term"].tolist() == ["0", "1", "2", "3", "unrotated"] * 2
    assert table["first_pair"].tolist()[:4] == table["last_pair"].tolist()[:4] == [0, 1, 2, 3]
    assert table["first_pair"].isna().tolist() == [False] * 4 + [True] + [False] * 4 + [True]
    assert table["shortest_wavelength"][1] == pytest.approx(2 * np.pi * 10, rel=MEASURE)
    shares = table.groupby("layer")["share"].sum()
    known = shares[table.groupby("layer")["share"].apply(lambda item: item.notna().all())]
    assert known.to_numpy() == pytest.approx(1, abs=NETWORK)
    assert (table["size_low"] <= table["size"]).all()


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
