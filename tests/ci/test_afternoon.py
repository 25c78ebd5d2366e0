"""The script of an afternoon runs, and type checkers that are strict find nothing to say of it."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("afternoon.py")
ROOT = Path(__file__).parents[2]
CHECKERS = {
    "mypy": ["--strict"],
    "pyright": ["--pythonpath", sys.executable],
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *command]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_twelve_steps_from_a_name_to_a_run_that_is_read_back(tmp_path: Path) -> None:
    ended = run("-W", "error::FutureWarning", str(SCRIPT), str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "refused: no L4H0; there are L0H0 to L3H3\n" in ended.stdout
    assert "L1H3 has the strongest pattern: " in ended.stdout
    assert {"run", "maps.html", "lead.html", "heads.csv"} == {x.name for x in tmp_path.iterdir()}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_finds_nothing_in_it_and_sees_a_wrong_option(
    checker: str, tmp_path: Path
) -> None:
    pytest.importorskip(checker)
    ended = run("-m", checker, *CHECKERS[checker], str(SCRIPT))
    assert ended.returncode == 0, ended.stdout
    wrong = tmp_path / "wrong.py"
    wrong.write_text(SCRIPT.read_text().replace("layers=2, remove", "layer=2, remove"))
    ended = run("-m", checker, *CHECKERS[checker], str(wrong))
    assert ended.returncode == 1
    assert '"layer"' in ended.stdout
