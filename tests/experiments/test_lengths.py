"""Several lengths of sequences in one run of `ablate`: each has the numbers of a run of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.command_line import refused, run_command
from support.forks import forks

from nope_probe import ablate, compare, figures, reproduce, run_ablations
from nope_probe.experiments.ablation.settings import Settings

FEW = ["--model", "rope-tiny", "--layers", 2, "--n-seqs", 23, "--folds", 5]
LENGTHS = (11, 17, 13)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "several"
    run_command(ablate, *FEW, "--players", "mask", "w_q", "--seq-len", *LENGTHS, "--out", out)
    return out


def test_each_length_has_the_numbers_of_a_run_of_that_length_alone(
    several: Path, tmp_path: Path
) -> None:
    header, *lines = (several / "lengths.csv").read_text().splitlines()
    rows = {length: [header.removeprefix("seq_len,")] for length in sorted(LENGTHS)}
    for line in lines:
        length, _, row = line.partition(",")
        rows[int(length)].append(row)
    for length, text in rows.items():
        out = tmp_path / str(length)
        run_command(ablate, *FEW, "--players", "sources", "--seq-len", length, "--out", out)
        assert text == (out / "sources.csv").read_text().splitlines()
    assert len({tuple(text) for text in rows.values()}) == len(LENGTHS)


def test_all_else_is_of_the_longest(several: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_command(ablate, *FEW, "--players", "mask", "w_q", "--seq-len", 17, "--out", out)
    files = {path.name for path in several.glob("*.*s*")}
    assert files - {path.name for path in out.iterdir()} == {"lengths.csv"}
    for name in files - {"lengths.csv", "manifest.json"}:
        assert (out / name).read_bytes() == (several / name).read_bytes(), name
    page = (several / "report.html").read_text(encoding="utf-8")
    assert " nats at 17 tokens." in page
    assert "Shares of the sources by sequence length" in page
    assert "by sequence length" not in (out / "report.html").read_text(encoding="utf-8")


def test_python_takes_several_lengths_in_any_order(several: Path) -> None:
    study = run_ablations(
        "rope-tiny", layers=2, n_seqs=23, folds=5, players="sources", seq_len=[13, 11, 17]
    )
    pd.testing.assert_frame_equal(study.tables["lengths"], pd.read_csv(several / "lengths.csv"))
    assert Settings(seq_len=(17, 11)).recorded() == Settings(seq_len=(11, 17)).recorded()


def test_one_length_is_one_however_it_is_given() -> None:
    assert Settings(seq_len=(64,)) == Settings()
    assert Settings().recorded()["seq_len"] == 64


def test_a_run_of_several_lengths_is_repeated_and_described_from_its_manifest(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(reproduce, several)
    assert "the same, byte for byte" in capsys.readouterr().out
    run_command(reproduce, several, "--methods")
    methods = capsys.readouterr().out
    assert "The inputs were 23 sequences of 17 tokens" in methods
    assert "also measured in sequences of 11 and 13 tokens, 23 of each length." in methods


def test_killed_among_shorter_sequences_a_run_ends_in_the_same_bytes(tmp_path: Path) -> None:
    flags = ["--layers", "1", "--n-seqs", "23", "--batch-size", "5", "--checkpoint-every", "1"]
    flags += ["--players", "sources", "--seq-len", "7", "11"]
    report, stderr = forks("step", "9 31,37", tmp_path, ["ablate", *flags])
    assert report["code"] == 0, stderr
    assert report["resumed"] >= 1
    undisturbed = tmp_path / "undisturbed"
    files = [file for file in undisturbed.rglob("*") if file.suffix in (".csv", ".safetensors")]
    assert {"lengths.csv", "sources.csv"} < {file.name for file in files}
    for file in files:
        again = tmp_path / "0" / file.relative_to(undisturbed)
        assert again.read_bytes() == file.read_bytes()


def test_a_comparison_takes_each_length_by_itself(several: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "compared"
    flags = ["--seed", 1, "--players", "sources", "--seq-len", *LENGTHS]
    run_command(ablate, *FEW, *flags, "--out", other)
    run_command(compare, several, other, "--out", out)
    rows = pd.read_csv(out / "differences.csv").query("table == 'lengths' and measure == 'share'")
    own, others = (pd.read_csv(run / "lengths.csv") for run in (several, other))
    assert rows["base_value"].tolist() == pytest.approx(own["share"].tolist(), nan_ok=True)
    assert rows["value"].tolist() == pytest.approx(others["share"].tolist(), nan_ok=True)
    assert rows["item"].iloc[0] == "L0, seq_len = 11, content"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", 32, 64, 32], "expected one or more different values of --seq-len"),
        (["--seq-len", 64, 3], "--seq-len 3: expected 4 <= seq-len"),
        (["--seq-len", 16, 64, "--query-rows", 19], "--query-rows 19 is more than 16 tokens"),
        (["--seq-len", 16, 512], "512"),
    ],
)
def test_lengths_that_cannot_be_are_refused_in_one_line(
    arguments: list[Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, tmp_path, ablate, *arguments)


def test_a_line_has_every_share_with_its_interval_in_a_panel_per_layer(several: Path) -> None:
    table = pd.read_csv(several / "lengths.csv")
    figure = figures.shares_by_length(table)
    panels = {"x": 0, "x2": 1}
    drawn = {(panels[trace.xaxis], trace.name): trace for trace in figure.data}
    assert len(drawn) == len(figure.data) == 2 * 2 * 4, "two parts of four terms in two layers"
    for part, column in (("other keys", "share_others"), ("first key", "share_first")):
        for layer in (0, 1):
            rows = table.query("layer == @layer and term == 'rope'")
            line = drawn[layer, f"RoPE, {part}"]
            assert list(line.x) == sorted(LENGTHS)
            np.testing.assert_array_equal(line.y, rows[column])
            np.testing.assert_allclose(line.y + line.error_y.array, rows[f"{column}_high"])
            np.testing.assert_allclose(line.y - line.error_y.arrayminus, rows[f"{column}_low"])
    whole = figures.shares_by_length(table.drop(columns=["share_first", "share_others"]))
    assert {trace.name for trace in whole.data} == {"content", "causal mask", "RoPE", "mask × RoPE"}
