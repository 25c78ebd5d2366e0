"""Commands on sequences that are longer than a layer's sliding window of 5 positions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.command_line import run_command

from nope_probe import ablate, behaviour, compare, scores

SMALL = ["--n-seqs", "16", "--seq-len", "23", "--folds", "4"]
KINDS = ("pattern", "source", "shapley")  # of maps that are patterns


@pytest.fixture(scope="module")
def runs(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: of Mistral, and of Gemma 2 whose L1 has no window."""
    out = tmp_path_factory.mktemp("runs")
    texts = [f"{i} the quick brown fox jumps over the lazy dog and away. " * 3 for i in range(16)]
    pd.DataFrame({"text": texts}).to_json(out / "text.jsonl", orient="records", lines=True)
    data = [*SMALL, "--data", str(out / "text.jsonl"), "--bos", "never"]
    given = {name: ["--model", str(tiny(name).folder), *data] for name in ("mistral", "gemma2")}
    players = ["--layers", "all", "--players", "mask", "window", "rope"]
    run_command(ablate, *given["mistral"], *players, "--out", str(out / "ablate"))
    for name, model in given.items():
        run_command(scores, *model, "--layers", "all", "--out", str(out / f"scores-{name}"))
    removed = ["--measures", "pattern", "--remove", "mask", "window"]
    run_command(behaviour, *given["mistral"], *removed, "--out", str(out / "behaviour"))
    both = [str(out / f"scores-{name}") for name in given]
    run_command(compare, *both, "--out", str(out / "compare"))
    return out


def test_offsets_and_maps_end_with_the_window(runs: Path) -> None:
    for folder in ("ablate", "scores-mistral"):
        offsets = pd.read_csv(runs / folder / "offsets.csv")
        assert sorted({*offsets["offset"]}) == [1, 2, 3, 4]
        assert offsets["mean"].notna().all()
    gemma2 = pd.read_csv(runs / "scores-gemma2" / "offsets.csv").groupby("layer")["offset"].max()
    assert gemma2.tolist() == [4, 22]
    row, key = torch.arange(23)[:, None], torch.arange(23)
    seen = (key < row) & (row - key < 5)
    maps = load_file(runs / "ablate" / "maps.safetensors")
    patterns = [each for name, each in maps.items() if name.split("/")[0] in KINDS]
    assert all(pattern.isfinite().equal(seen.expand(2, -1, -1)) for pattern in patterns)
    whole = maps["pattern/all"].double()
    terms = sum(maps[f"source/{t}"].double() for t in ("content", "mask", "rope", "mask_x_rope"))
    torch.testing.assert_close(terms, whole, equal_nan=True, rtol=0, atol=1e-5)


def test_tables_have_measures_and_the_page_says_what_is_measured(runs: Path) -> None:
    measures = pd.read_csv(runs / "scores-mistral" / "pattern.csv")
    assert measures["amplitude"].notna().all()
    assert measures["monotonicity_lag1"].notna().all()
    assert measures["locality"].isna().all()  # no query has 8 keys
    manifest = json.loads((runs / "ablate" / "manifest.json").read_text())
    assert manifest["windows"] == {"L0": 5, "L1": 5}
    assert "at most 5 keys in L0, 5 keys in L1" in (runs / "ablate" / "report.html").read_text()
    players = pd.read_csv(runs / "ablate" / "players.csv")
    assert {*players["player"]} == {"mask", "window", "rope"}
    bridge = pd.read_csv(runs / "behaviour" / "bridge.csv")
    assert {*bridge["condition"]} == {"mask", "window"}
    assert (runs / "compare" / "report.html").exists()
