"""Commands on sequences that are longer than a layer's sliding window of 5 positions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.command_line import run_command
from support.decoders import write_decoder
from support.edited_model import subsets
from support.plain_attention import plain_attention
from support.rounding import NETWORK

from nope_probe import ablate, run_ablations

SMALL = ["--n-seqs", "16", "--seq-len", "23", "--folds", "4"]
TERMS = (
    *("without_sources", "mask", "rope", "window"),
    *("mask_x_rope", "mask_x_window", "rope_x_window", "mask_x_rope_x_window"),
)


@pytest.fixture(scope="module")
def runs(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: of Mistral, and of Gemma 2 whose L1 has no window."""
    out = tmp_path_factory.mktemp("runs")
    texts = [f"{i} the quick brown fox jumps over the lazy dog and away. " * 3 for i in range(16)]
    pd.DataFrame({"text": texts}).to_json(out / "text.jsonl", orient="records", lines=True)
    data = [*SMALL, "--data", str(out / "text.jsonl"), "--bos", "never", "--skip-keys", "0"]
    given = {name: ["--model", str(tiny(name).folder), *data] for name in ("mistral", "gemma2")}
    sources = {"mistral": "sources", "gemma2": "none"}
    for name, model in given.items():
        removed = ["--remove", sources[name], "--layers", "all"]
        run_command(ablate, *model, *removed, "--out", str(out / name))
    return out


def test_offsets_and_maps_end_with_the_window(runs: Path) -> None:
    offsets = pd.read_csv(runs / "mistral" / "offsets.csv")
    assert sorted({*offsets["offset"]}) == [1, 2, 3, 4]
    assert offsets["mean"].notna().all()
    gemma2 = pd.read_csv(runs / "gemma2" / "offsets.csv").groupby("layer")["offset"].max()
    assert gemma2.tolist() == [4, 22]


def test_the_window_is_a_source_and_its_terms_are_differences_of_plain_models(
    tiny: Callable[[str], Any], bridge: Callable[[str], Any]
) -> None:
    tokens = torch.randint(200, (16, 23), generator=torch.Generator().manual_seed(0))
    study = run_ablations(bridge("mistral"), tokens, remove=["sources"], folds=4, skip_keys=0)
    assert sorted(study.tables["terms"].query("layer == 1")["term"]) == sorted(TERMS)
    row, key = torch.arange(23)[:, None], torch.arange(23)
    kept = (key < row) & (row - key < 5)
    patterns = {}
    for removed in subsets(["mask", "rope", "window"]):
        without = " and ".join(name for name in ("mask", "window", "rope") if name in removed)
        layers = plain_attention(tiny("mistral").hf, tokens, without=without or None)
        seen = torch.stack([layer.map for layer in layers.values()]).where(kept, torch.nan)
        patterns[removed] = seen - seen.nanmean(-1, keepdim=True)
    scale, added = patterns[()].nan_to_num().abs().max(), 0
    for term in TERMS:
        parts = [] if term == "without_sources" else term.split("_x_")
        expected = sum(
            (-1) ** (len(parts) - len(present)) * patterns[_without(present)]
            for present in subsets(parts)
        )
        result = torch.from_numpy(study.maps[f"term/{term}"]).double()
        assert (result - expected).nan_to_num().abs().max() <= NETWORK * scale, term
        assert result.isfinite().equal(kept.expand(2, -1, -1))
        added += expected
    assert (added - patterns[()]).nan_to_num().abs().max() <= 1e-9 * scale
    window = torch.from_numpy(study.maps["term/window"]).nan_to_num().abs()
    assert window[0].max() < NETWORK * scale, "nothing before L0 attends"
    assert window[1].max() > 0.1 * scale


def _without(present: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in ("mask", "rope", "window") if name not in present)


def test_a_window_that_hides_nothing_is_no_source_and_the_manifest_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--n-seqs", "8", "--seq-len", "11", "--folds", "4", "--remove", "sources"]
    folder = write_decoder("mistral", tmp_path, sliding_window=11).folder
    model = ["--model", str(folder), "--data", "random", "--bos", "never"]
    run_command(ablate, *model, *short, "--layers", "2", "--out", str(tmp_path / "short"))
    pattern = pd.read_csv(tmp_path / "short" / "pattern.csv")
    assert {*pattern["removed"]} == {"intact", "mask", "rope", "mask+rope"}
    assert "sliding window (it hides no key in sequences of 11 tokens)" in " ".join(
        capsys.readouterr().out.split()
    )


def test_tables_have_measures_and_the_page_says_what_is_measured(runs: Path) -> None:
    measures = pd.read_csv(runs / "mistral" / "pattern.csv").query("removed == 'intact'")
    assert measures["amplitude"].notna().all()
    assert measures["monotonicity"].isna().all()
    assert measures["locality"].isna().all()  # no query has 8 keys
    manifest = json.loads((runs / "mistral" / "manifest.json").read_text())
    assert manifest["windows"] == {"L0": 5, "L1": 5}
    assert "at most 5 keys in L0, 5 keys in L1" in (runs / "mistral" / "report.html").read_text()
