"""The pilot round of `ablate`: the number of sequences that it chooses, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import t
from support.command_line import run_command
from support.forks import forks

from nope_probe import Ablation, ablate, ablated, attribute, capture_scores, load, run_ablations
from nope_probe.data.sequences import sequences
from nope_probe.errors import UserError
from nope_probe.experiments.ablation.pilot import HALF_WIDTH, number_for
from nope_probe.experiments.methods import methods_paragraph

N = 13
SOURCES = ["--players", "sources", "--layers", "2", "--seq-len", str(N)]


def manifest_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has chosen its number of sequences."""
    out = tmp_path_factory.mktemp("runs") / "chosen"
    run_command(ablate, *SOURCES, "--out", str(out))
    return out


def test_a_chosen_number_gives_the_same_bytes_as_the_number_given(
    chosen: Path, tmp_path: Path
) -> None:
    number = manifest_of(chosen)["pilot"]["n_seqs"]
    run_command(ablate, *SOURCES, "--n-seqs", str(number), "--out", str(tmp_path / "given"))
    files = [*chosen.glob("*.csv"), *chosen.glob("*.safetensors")]
    assert len(files) > 8
    for file in files:
        assert file.read_bytes() == (tmp_path / "given" / file.name).read_bytes()
    assert "pilot" not in manifest_of(tmp_path / "given")


def test_the_number_is_what_the_widths_of_other_sequences_ask_for(chosen: Path) -> None:
    loaded, maps = load("rope-tiny", n_layers=2), {}
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=N, seed=1)
    for removed in ((), ("mask",), ("rope",), ("mask", "rope")):
        with ablated(loaded.model, Ablation(remove=removed)):
            maps[removed] = capture_scores(
                loaded.model, data.inputs, n_folds=32, documents=data.documents
            )
    layers = attribute(maps)
    strongest = max(layers, key=lambda layer: pooled_rms(maps[()], layer.layer))
    width = max((s.share.high - s.share.low) / 2 for s in strongest.sources)
    width *= t.ppf(0.975, 7) / t.ppf(0.975, 31)
    number = next(n for n in (64, 128, 256, 512) if n == 512 or width * (64 / n) ** 0.5 <= 0.02)
    pilot = manifest_of(chosen)["pilot"]
    assert pilot["n_seqs"] == sum(manifest_of(chosen)["fold_sizes"]) == number
    assert pilot["layer"] == strongest.layer
    assert pilot["half_width"] == pytest.approx(width * (64 / number) ** 0.5, rel=1e-4)


def pooled_rms(maps: Any, layer: int) -> float:
    """Return the RMS of a layer's mean scores less each row's mean over earlier keys."""
    earlier = torch.ones(N, N).tril(-1).bool()
    scores = maps.mean[layer].double().where(earlier, torch.nan)
    return float((scores - scores.nanmean(1, keepdim=True))[earlier].square().mean().sqrt())


def test_number_and_reason_are_in_the_terminal_on_the_page_and_in_the_methods(
    chosen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pilot = manifest_of(chosen)["pilot"]
    points = f"{100 * pilot['half_width']:.1f} points"
    said = f"{pilot['n_seqs']} sequences: judging by 64 others, the intervals of L{pilot['layer']}"
    run_command(ablate, *SOURCES, "--out", str(chosen))
    printed = " ".join(capfd.readouterr().out.split())
    page = (chosen / "report.html").read_text()
    assert said in printed
    assert points in printed
    assert said in page.replace("&#x27;", "'")
    assert "auto sequences" not in page
    methods = methods_paragraph(manifest_of(chosen))
    assert f"were {pilot['n_seqs']} sequences of {N}" in methods
    assert "Their number was chosen on 64 other sequences" in methods
    assert points in methods


def test_a_model_without_a_pattern_gets_the_largest_number() -> None:
    options = {"data": "random", "bos": "never", "seq_len": 7, "players": "sources"}
    study = run_ablations("nope-tiny", layers=1, n_seqs="auto", **options)
    assert study.manifest["pilot"] == {
        "n_seqs": 512,
        "n_pilot": 64,
        "layer": None,
        "half_width": None,
    }
    assert sum(study.manifest["fold_sizes"]) == 512


def test_the_number_is_the_least_that_is_wide_enough_and_fills_the_folds() -> None:
    numbers = (64, 128, 256, 512)
    widths = [0.999 * HALF_WIDTH * (number / 64) ** 0.5 for number in numbers]
    assert tuple(number_for(width, 64) for width in widths) == numbers
    assert number_for(1.002 * widths[1], 64) == 256
    assert number_for(1e-9, 64, folds=97) == 128


def test_too_few_sequences_for_a_pilot_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"{i} and some words"}) + "\n" for i in range(31)))
    with pytest.raises(UserError, match="64 were asked for; lower --n-seqs"):
        run_ablations("rope-tiny", layers=1, data=str(file), seq_len=4, windows="start")


def test_killed_in_the_pilot_or_after_it_a_run_ends_in_the_same_bytes(tmp_path: Path) -> None:
    flags = ["--layers", "1", "--seq-len", "7", "--players", "sources", "--checkpoint-every", "1"]
    report, stderr = forks("step", "9 7,29", tmp_path, ["ablate", *flags])
    assert report["code"] == 0, stderr
    assert report["resumed"] >= 2
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "0"
    files = [file for file in undisturbed.rglob("*") if file.suffix in (".csv", ".safetensors")]
    assert files
    for file in files:
        again = resumed / file.relative_to(undisturbed)
        assert again.read_bytes() == file.read_bytes()
