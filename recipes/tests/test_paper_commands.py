"""The commands of the paper's figures as a user types them: mistakes, pages, interruptions."""

import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
from ci.forks import forks
from ci.test_pages import assert_short
from ci.test_resume import assert_same_results
from support.command_line import refused, run_command

import reproduce
from nope_probe.models.names import FETCHED
from reproduce_settings import FIGURES

PAPER = Path(reproduce.__file__).parent
MISTAKES = [
    ("reproduce", "(see "),
    ("reproduce figure1 --seed 1", "figure1 takes no --seed"),
    ("reproduce all --model nope-1.5b", "all takes no --model"),
    ("reproduce figure1 --image x.png", "--image has no effect on figure1"),
    ("reproduce figure5 --model rope-tiny --model ROPE-TINY", "--model names a model twice"),
    ("simulate --target-se nan", "expected a --target-se that float32 resolves"),
    ("simulate --alpha", "expected at least one --alpha"),
    ("simulate --n-samples 100 --target-se 0.1", "--n-samples or --target-se, not both"),
    ("simulate --alpha 0 -0.0", "two alphas are the same"),
    ("simulate --d-model 65 --rope", "odd"),
    ("theory --seq-len 1000000", "this needs at least 1.5 PB of memory"),
]


@pytest.mark.parametrize(("typed", "fragment"), MISTAKES)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    typed: str,
    fragment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    command, *arguments = shlex.split(typed)
    assert fragment in refused(capfd, tmp_path, import_module(command), *arguments)


@pytest.mark.parametrize(
    "typed",
    [
        "simulate --n-samples 64 --seq-len 9 --d-model 8",
        "reproduce figure1",
        "reproduce figure2 --n-samples 64",
        "reproduce figure8 --model nope-tiny --n-seqs 8",
    ],
)
@pytest.mark.usefixtures("unenforced", "undrawn")
def test_a_page_is_a_short_sentence_a_small_table_and_figures_with_short_words(
    typed: str, tmp_path: Path
) -> None:
    command, *arguments = shlex.split(typed)
    run_command(import_module(command), *arguments, "--out", tmp_path / "run")
    assert_short((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))


def test_the_list_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(reproduce, "--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*FIGURES, "all"]
    assert lines[1] == f"figure2   {FIGURES['figure2'].shows}"


def test_a_script_runs_from_any_folder_and_names_itself_as_it_was_typed(tmp_path: Path) -> None:
    script = str(PAPER / "theory.py")
    typed = [sys.executable, script, "--seq-len", "5", "--n-layers", "1"]
    ended = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == "L0: does not increase in j at any alpha\n" + (
        "n = 5: L0 is flat; the pattern begins in L1\n"
    )
    typed = [sys.executable, script, "--seq-leng", "5"]
    ended = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stderr.endswith(f"did you mean --seq-len? (see python {script} --help)\n")


def test_a_figure_of_a_model_in_one_process_is_refused_to_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert refused(capfd, tmp_path, reproduce, "figure3").endswith("run in several processes")


SIMULATE = ["simulate", "--rope", "--n-layers", "2", "--seq-len", "11", "--n-samples", "397"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_simulation_that_is_stopped_before_changes_on_disk_ends_in_the_same_bytes(
    signum: signal.Signals, tmp_path: Path
) -> None:
    report, stderr = forks("step", f"{signum:d} 10,11,13", tmp_path, SIMULATE)
    assert report["code"] == 0, stderr
    assert len(report["ends"]) >= 2
    assert_same_results(tmp_path, 1)


def test_experiments_of_a_figure_that_is_killed_end_in_the_same_bytes(tmp_path: Path) -> None:
    command = ["reproduce", "figure2", "--n-samples", "397"]
    report, stderr = forks("kill", "4", tmp_path, command)
    assert report["code"] == 0, stderr
    assert_same_results(tmp_path, report["runs"])


@pytest.mark.skipif(not FETCHED["smollm2-135m"].is_file(), reason="make real fetches the model")
def test_figure_5_keeps_four_of_the_papers_six_claims(tmp_path: Path) -> None:
    arguments = ("--model", "smollm2-135m", "--data", "shipped", "--n-seqs", 64, "--seq-len", 512)
    run_command(reproduce, "figure5", *arguments, "--out", tmp_path / "figure5")
    claims = pd.read_csv(tmp_path / "figure5" / "claims.csv")
    assert len(claims) == 6
    assert claims["reproduced"].sum() == 4
    (page,) = tmp_path.glob("ablate-smollm2-135m-*/report.html")
    assert "The attention scores of smollm2-135m by position" in page.read_text(encoding="utf-8")
