"""Text on the terminal: a table row is one line of 80 columns, and names are plain text."""

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.table import Table
from support.command_line import refused, run_command
from support.finished_runs import Finished

from nope_probe import ablate
from nope_probe.errors import printable
from nope_probe.reports.page import Headline, Report
from nope_probe.run.manifest import Manifest
from nope_probe.studies.behaviour import QUANTITIES, as_text
from nope_probe.studies.page import (
    PlainConsole,
    columns_that_fit,
    print_lines,
    print_report,
    tables_that_fit,
)

TWINS = ("nope-tiny", "rope-tiny")
SMALL = ["--n-seqs", 8, "--seq-len", 16, "--folds", 4, "--layers", 2]
NAMES = ("o[/]x", "[red]", "a\x1b[2Jb", ":smile:", "\u202ex", "a\x07\x9bb", "[link=x]y[/link]")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def rows(lines: list[str], name: str) -> list[str]:
    return [line for line in lines if line.split()[:1] == [name]]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) <= 80 for line in lines if not line.startswith("open "))
    return lines


def test_each_difference_of_a_comparison_is_one_line(
    finished: Callable[[str], Finished],
) -> None:
    one, other = (finished(f"ablate --model {name}").folder for name in TWINS)
    lines = finished(f"compare {one} {other} --labels base twin").printed.splitlines()
    table = [line for line in lines if " twin " in line and "[" in line]
    assert len(table) == 8
    assert all(line.count("[") == line.count("]") == 1 for line in table)
    assert all(len(line) <= 80 for line in table)
    assert any("less that of base" in line for line in lines), "what is subtracted from what"


def test_each_condition_of_behaviour_is_one_line_of_each_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conditions = {"intact": "(intact)", "mask": "causal", "rope": "RoPE"}
    rows_of = [
        {"removed": condition, "replacement": "none", "measure": measure, "value": 13.17}
        | {
            "difference": -13.17,
            "value_low": 3.1,
            "value_high": 23.3,
            "difference_low": -23.3,
            "difference_high": -3.1,
        }
        for condition in conditions
        for measure in QUANTITIES
    ]
    for table in tables_that_fit(as_text(pd.DataFrame(rows_of))):
        PlainConsole().print(table)
    lines = printed(capsys)
    n_tables = sum(line.startswith("without ") for line in lines)
    assert n_tables > 1
    assert [len(rows(lines, name)) for name in conditions.values()] == [n_tables] * 3
    cells = {"(intact)": "13.17 [3.10, 23.30]", "RoPE": "-13.17 [-23.30, -3.10]"}
    for condition, cell in cells.items():
        assert sum(line.count(cell) for line in rows(lines, condition)) == len(QUANTITIES)


def test_columns_are_dealt_to_tables_in_order_and_each_keeps_the_rows_names() -> None:
    groups = columns_that_fit([10, 30, 30, 30, 70, 5])
    assert groups == [[0, 1, 2], [0, 3], [0, 4], [0, 5]]
    assert columns_that_fit([10, 99]) == [[0, 1]], "a column wider than a line is kept"


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


def test_hostile_names_of_folders_and_models_do_not_stop_a_command(
    tmp_path: Path, tiny: Callable, capfd: Any
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
