"""Names that look like markup or hold terminal escapes are printed as what they are."""

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.table import Table
from support.command_line import refused, run_command

from nope_probe import ablate, behaviour, circuit, scores, simulate
from nope_probe.errors import printable
from nope_probe.experiments.sections import PlainConsole, Report, print_lines, print_report

NAMES = ("o[/]x", "[red]", "a\x1b[2Jb", ":smile:", "\u202ex", "a\x07\x9bb", "[link=x]y[/link]")
SMALL = ["--layers", 2, "--n-seqs", 8, "--seq-len", 16, "--folds", 4]
COMMANDS = {
    "ablate": (ablate, [*SMALL, "--players", "sources"]),
    "scores": (scores, SMALL),
    "behaviour": (
        behaviour,
        ["--n-seqs", 8, "--seq-len", 16, "--folds", 4, "--measures", "loss", "--remove", "mlp"],
    ),
    "circuit": (circuit, ["--n-seqs", 8, "--seq-len", 16, "--folds", 4]),
}


class ClosedPipe(StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_goes_away_ends_a_summary_as_it_ends_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", ClosedPipe())
    for write in (PlainConsole().print, lambda line: print_lines([line])):
        with pytest.raises(BrokenPipeError):
            write("a line")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(name: str, capsys: pytest.CaptureFixture[str]):
    console, table = PlainConsole(), Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(table)
    console.print(name)
    console.print(name, style="dim")
    print_lines([name])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    text = printable(name)
    assert text.isprintable()
    assert lines[0] == lines[-1] == lines[-2] == lines[-3] == text
    assert sum(text in line for line in lines) == 6


def test_text_that_terminals_show_stays():
    text = "naïve ±10 ○ 模型 [0.1, 0.2]"
    assert printable(text) == text
    assert printable("\udcff\r") == "\\udcff\\r"


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_names_of_folders_and_models_do_not_stop_a_command(
    command: str, tmp_path: Path, tiny: Callable, capfd: pytest.CaptureFixture[str]
):
    model = Path(shutil.copytree(tiny("llama").folder, tmp_path / "m[/]\x1b[31m"))
    out = tmp_path / "o[/]\x1b[2Jx"
    module, flags = COMMANDS[command]
    for _ in range(2):  # computed, and shown again
        capfd.readouterr()
        run_command(module, "--model", model, *flags, "--out", out)
        shown = capfd.readouterr().out
        assert "\x1b" not in shown
        assert "o[/]\\x1b[2Jx/report.html" in shown.replace("\n", "")
    assert json.loads((out / "manifest.json").read_text())["settings"]["model"] == str(model)


def test_refusals_are_one_line_without_escapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    line = refused(capfd, tmp_path, scores, "--model", "no\x1b[2J\nsuch")
    assert "\\x1b[2J" in line
    (tmp_path / "a\nfile").write_text("")
    line = refused(capfd, tmp_path, simulate, "--out", "a\nfile")
    assert line == f"cannot write to {tmp_path}/a\\nfile: it is a file"


def test_a_report_whose_reader_has_gone_ends_as_a_broken_pipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", ClosedPipe())
    report = Report(title="", headline=["A sentence."], sections=[])
    with pytest.raises(BrokenPipeError):
        print_report(report, {}, Path("runs/x"))
