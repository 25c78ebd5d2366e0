"""The tables on the terminal: at 80 columns every row is one line, and every line fits."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.command_line import run_command

from nope_probe import compare, scores
from nope_probe.experiments.behaviour.sections import QUANTITIES, behaviour_as_text
from nope_probe.experiments.sections import PlainConsole, columns_that_fit, tables_that_fit

TWINS = ("nope-tiny", "rope-tiny")
SMALL = ["--n-seqs", 16, "--seq-len", 24, "--folds", 4, "--batch-size", 16]


def printed(capsys: pytest.CaptureFixture[str], command: Any, *arguments: Any) -> list[str]:
    capsys.readouterr()
    run_command(command, *arguments)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines if not line.startswith("open "))
    return [line.rstrip() for line in lines]


def rows(lines: list[str], name: str) -> list[str]:
    return [line for line in lines if line.split()[:1] == [name]]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("twins")
    for name in TWINS:
        run_command(scores, "--model", name, *SMALL, "--out", folder / name)
    return [folder / name for name in TWINS]


def test_each_layer_of_scores_is_one_line_of_three_and_one_of_two_intervals(
    twins: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, folder in zip(TWINS, twins, strict=True):
        lines = printed(capsys, scores, "--model", name, *SMALL, "--out", folder)
        for layer in range(4):
            first, second = rows(lines, f"L{layer}")
            shown = first.count("[") + first.count("no pattern")
            assert (shown, second.count("]")) == (3, 2)
        assert any("edge contrast, nats" in line for line in lines)


def test_each_clear_difference_of_a_comparison_is_one_line(
    twins: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(twins[1], tmp_path / "copy")
    runs, labels = [*twins, copy], ["--labels", "base", "twin", "again"]
    lines = printed(capsys, compare, *runs, *labels, "--out", tmp_path / "out")
    table = [line for line in lines if line.startswith("L") and line.endswith("paired")]
    assert len(table) == 2 * 12
    assert all(line.count("[") == line.count("]") == 1 for line in table)
    titles = [line.strip() for line in lines if "the clearest differences" in line]
    assert titles == [f"{each} less base: the clearest differences" for each in ("twin", "again")]


def test_each_condition_of_behaviour_is_one_line_of_each_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conditions = ("intact", "mask", "mask+rope:identity")
    rows_of = [
        {"condition": condition, "measure": measure, "value": 13.17, "difference": -13.17}
        | {"value_low": 3.1, "value_high": 23.3, "difference_low": -23.3, "difference_high": -3.1}
        for condition in conditions
        for measure in QUANTITIES
    ]
    for table in tables_that_fit("rope-tiny", behaviour_as_text(pd.DataFrame(rows_of))):
        PlainConsole().print(table)
    lines = capsys.readouterr().out.splitlines()
    n_tables = sum(line.startswith("without ") for line in lines)
    assert n_tables > 1
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert [len(rows(lines, each)) for each in ("(intact)", *conditions[1:])] == [n_tables] * 3
    for condition, cell in (("(intact)", "13.17 ±10.13"), ("mask", "-13.17 ±10.07")):
        assert sum(line.count(cell) for line in rows(lines, condition)) == len(QUANTITIES)
    heads = " ".join(lines).split()
    assert all(word in heads for each in QUANTITIES.values() for word in each.label.split())


def test_columns_are_dealt_to_tables_in_order_and_each_keeps_the_rows_names() -> None:
    groups = columns_that_fit([10, 30, 30, 30, 70, 5], room=80, gap=2)
    assert groups == [[0, 1, 2], [0, 3], [0, 4], [0, 5]]
    assert columns_that_fit([10, 99], room=80) == [[0, 1]], "a column wider than a line is kept"
