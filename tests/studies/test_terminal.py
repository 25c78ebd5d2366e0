"""Text on the terminal: a table row is one line of 80 columns, and names are plain text."""

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.table import Table
from support.command_line import refused, run_command
from support.tiny_models import ByName

from nope_probe import ablate
from nope_probe.errors import printable
from nope_probe.reports.page import Headline, Report
from nope_probe.run.manifest import Manifest
from nope_probe.studies.page import PlainConsole, print_report, print_table

SMALL = ["--n-seqs", 8, "--seq-len", 16, "--folds", 4, "--layers", 2]
NAMES = ("o[/]x", "[red]", "a\x1b[2Jb", ":smile:", "\u202ex", "a\x07\x9bb", "[link=x]y[/link]")


def test_the_names_of_rows_are_wrapped_and_numbers_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, numbers = "the causal mask and " * 3, ["+0.12 [+0.10, +0.15]"] * 3
    table = pd.DataFrame([[name, *numbers]], columns=["without", *"abc"])
    print_table(PlainConsole(), table)
    lines = capsys.readouterr().out.splitlines()
    assert sum("  ".join(numbers) in line for line in lines) == 1
    assert max(map(len, lines)) <= 80
    assert len(" ".join(line[:15] for line in lines).split("causal")) == 4


class ClosedPipe(StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_goes_away_ends_a_summary_as_a_broken_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", ClosedPipe())
    with pytest.raises(BrokenPipeError):
        print_report(
            Report(title="", headline=Headline(sentence="Yes."), sections=[]), Manifest(), Path("x")
        )


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(name: str, capsys: pytest.CaptureFixture[str]):
    console, table = PlainConsole(), Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(table)
    console.print(name)
    console.print(name, style="dim")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    text = printable(name)
    assert text.isprintable()
    assert lines[0] == lines[-1] == lines[-2] == text
    assert sum(text in line for line in lines) == 5


def test_a_table_that_is_shown_in_parts_has_no_line_ends_in_its_cells(
    capsys: pytest.CaptureFixture[str],
):
    cells = {f"measure {place}": [f"+{place}.57*\nothers: -0.05 to 0.02"] for place in range(5)}
    print_table(PlainConsole(), pd.DataFrame({"removed": ["rope"], **cells}))
    shown = capsys.readouterr().out
    assert "+2.57* others: -0.05 to 0.02" in shown
    assert "\\n" not in shown


def test_text_that_terminals_show_stays():
    text = "naïve ±10 ○ 模型 [0.1, 0.2]"
    assert printable(text) == text
    assert printable("\udcff\r") == "\\udcff\\r"


def test_hostile_names_of_folders_and_models_do_not_stop_a_command(
    tmp_path: Path, tiny: ByName, capfd: Any
):
    model = Path(shutil.copytree(tiny("llama").folder, tmp_path / "m[/]\x1b[31m"))
    out = tmp_path / "o[/]\x1b[2Jx"
    for _ in range(2):  # computed, and shown again
        capfd.readouterr()
        run_command(ablate, "--remove", "none", "--model", model, *SMALL, "--out", out)
        shown = capfd.readouterr().out
        assert "\x1b" not in shown
        assert "o[/]\\x1b[2Jx/report.html" in shown.replace("\n", "")
    assert json.loads((out / "manifest.json").read_text())["settings"]["model"] == str(model)


def test_refusals_are_one_line_without_escapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert "\\x1b[2J" in refused(capfd, tmp_path, ablate, "--model", "no\x1b[2J\nsuch")
    (tmp_path / "a\nfile").write_text("")
    line = refused(capfd, tmp_path, ablate, "--out", "a\nfile")
    assert line == f"cannot write to {tmp_path}/a\\nfile: it is a file"
