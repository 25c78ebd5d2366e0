"""The line that shows what a command is doing, and the progress bar."""

import io
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nope_probe.runtime.checkpoint import RunCheckpoint
from nope_probe.runtime.terminal import phase_of, status

ERASE_LINE = "\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal: in a test itself, since pytest replaces stderr after fixtures."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_on_a_terminal_the_line_is_shown_and_then_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with status("loading torch"):
        assert "loading torch ..." in terminal.getvalue()
    assert ERASE_LINE in terminal.getvalue().rpartition("loading torch ...")[2]


def test_what_draws_bars_has_a_line_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with status("loading owner/model", has_bars=True):
        pass
    assert terminal.getvalue() == "loading owner/model ...\n"


@pytest.mark.parametrize("has_bars", [False, True])
def test_a_log_file_gets_nothing(has_bars: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with status("loading torch", has_bars=has_bars):
        pass
    assert capfd.readouterr() == ("", "")


def test_processes_after_the_first_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with status("loading torch"), status("loading owner/model", has_bars=True):
        pass
    assert terminal.getvalue() == ""


STATE = {"sum": torch.ones(3)}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("gains", "calibration"),
        ("score/mask+w_q", "scores, condition mask+w_q"),
        ("score-random/mask/L2", "scores (random), condition mask, L2"),
        ("shuffled/none", "shuffled tokens, condition none"),
        ("reparametrised-1/gains", "reparametrised (1), condition gains"),
        ("alpha=0.2", "alpha=0.2"),
    ],
)
def test_a_stream_is_named_by_its_phase_and_condition(key: str, words: str) -> None:
    assert phase_of(key) == words


def test_the_bar_names_the_stream_its_place_and_estimates_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RunCheckpoint() as run, run.progress(["gains", "score/mask"], 7):
        with run.stream("gains") as stream:
            stream.advance(7)
        with run.stream("score/mask") as stream:
            stream.advance(7)
    shown = capsys.readouterr().err
    assert "calibration (1 of 2):   0%|" in shown
    assert "scores, condition mask (2 of 2): " in shown
    assert " left" in shown
    assert "resuming" not in shown


def interrupt(folder: Path) -> None:
    """Finish the first of two streams of 11, and two batches of the second."""
    with suppress(KeyboardInterrupt), RunCheckpoint(folder, every=1) as run:
        run.save("a", STATE)
        with run.progress(["a", "b"], 11), run.stream("b") as stream:
            for size in (3, 2):
                stream.save(STATE)
                stream.advance(size)
            raise KeyboardInterrupt


def test_a_resumed_run_says_where_and_counts_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path / "run")
    assert "resuming at 50%" in capsys.readouterr().err  # a was finished, of a and b
    with RunCheckpoint(tmp_path / "run") as run, run.progress(["a", "b"], 11):
        with run.stream("b") as stream:
            assert stream.restore().keys() == STATE.keys()
            for size in (3, 2, 6):
                stream.advance(size)
        assert run.bar is not None
        assert run.bar.n == 22
    assert capsys.readouterr().err.startswith(
        "resuming at 64%\n"
    )  # 14 of 22: a state is saved before its batch counts


def test_another_streams_state_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path / "run")
    capsys.readouterr()
    with RunCheckpoint(tmp_path / "run") as run, run.progress(["c", "d"], 11):
        pass
    assert "resuming" not in capsys.readouterr().err
