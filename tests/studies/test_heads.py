"""Each head without each source and band of RoPE: `ablate --per-head`."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file
from support.command_line import run_command
from support.rounding import MEASURE
from support.tiny_models import ByName

from nope_probe import Ablation, ablate, ablated, capture_scores, load
from nope_probe.analyses.attribution import attribute_heads

N, N_SEQS, FOLDS, N_HEADS, N_PAIRS = 13, 97, 5, 6, 5
SMALL = f"--n-seqs {N_SEQS} --seq-len {N} --folds {FOLDS} --batch-size 31 --data random --layers 2"
BANDS = {"rope[0:2]": [0, 1], "rope[2:5]": [2, 3, 4]}
PLACES = ["layer", "head"]


@pytest.fixture(scope="module")
def run(tiny: ByName, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "heads"
    run_command(ablate, *of_llama(tiny), "--per-head", "--remove", *BANDS, "--out", out)
    return out


def of_llama(tiny: ByName) -> list[Any]:
    return ["--model", tiny("llama").folder, *SMALL.split()]


def test_the_values_of_a_head_are_those_of_its_maps_without_each_source_and_band(
    run: Path, tiny: ByName
) -> None:
    table = pd.read_csv(run / "head_pattern.csv")
    removed = ["intact", "mask", "rope", "mask+rope", *BANDS]
    assert table["removed"].tolist() == removed * 2 * N_HEADS
    tokens = load_file(run / "tokens.safetensors")["tokens"]
    model, maps = load(str(tiny("llama").folder)).model, {}
    for name in removed:
        with ablated(model, Ablation(remove=[] if name == "intact" else name)):
            maps[name] = capture_scores(model, tokens, n_folds=FOLDS, per_head=True)
    maps = {() if name == "intact" else name: captured for name, captured in maps.items()}
    heads = attribute_heads(maps)
    for (layer, head), rows in table.groupby(PLACES):
        for row in rows.to_dict("records"):
            values = heads[layer, head].conditions[row["removed"]]
            for name in ("lead", "amplitude", "kept"):
                seen = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
                expected = getattr(values, name).ends
                assert seen == pytest.approx(expected, rel=MEASURE, abs=MEASURE, nan_ok=True)
