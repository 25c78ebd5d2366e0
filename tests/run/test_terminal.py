"""The line that shows what a command is doing, and the progress bar."""

import io
import re
import sys
from pathlib import Path

import pytest

from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.processes import by_layer, status

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


def show_both() -> None:
    with status("loading torch"):
        pass
    with status("loading owner/model", has_bars=True):
        pass


def test_on_a_terminal_a_line_is_erased_and_that_of_what_draws_bars_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = open_terminal(monkeypatch)
    show_both()
    after = terminal.getvalue().rpartition("loading torch ...")[2]
    erased, _, stays = after.partition("loading owner/model ...")
    assert ERASE_LINE in erased
    assert stays == "\n"


def test_a_log_file_and_processes_after_the_first_get_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    show_both()
    assert capfd.readouterr() == ("", "")
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    show_both()
    assert terminal.getvalue() == ""


def test_the_bar_names_the_stream_its_place_and_estimates_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)
    with RunCheckpoint(tmp_path) as run, run.progress({"gains": 7, "score/mask": 7}):
        with run.stream("gains") as stream:
            stream.advance(7)
        with run.stream("score/mask") as stream:
            stream.advance(3)
        assert run.bar is not None
        assert run.bar.n == 14, "what a finished stream did not count is done too"
    shown = terminal.getvalue()
    assert "gains (1 of 2):   0%|" in shown
    assert "score/mask (2 of 2): " in shown
    assert " left" in shown


def test_the_line_of_an_analysis_says_which_layer_of_how_many_and_is_erased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = open_terminal(monkeypatch)
    for layer in by_layer(["L3", "L5"], "analysing"):
        place = {"L3": "layer 1 of 2", "L5": "layer 2 of 2"}[layer]
        assert f"analysing: {place}, " in terminal.getvalue().rpartition("\r")[2]
    assert terminal.getvalue().rpartition("layer 2 of 2")[2].rpartition("\r")[2] == ""
    monkeypatch.setenv("RANK", "1")
    before = terminal.getvalue()
    assert [*by_layer(["L3", "L5"], "analysing")] == ["L3", "L5"]
    assert terminal.getvalue() == before


def test_a_log_file_hears_of_long_work_alone_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 900, 3))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    with (
        RunCheckpoint(tmp_path) as run,
        run.progress({"score/mask": 40}),
        run.stream("score/mask") as stream,
    ):
        stream.batch_halved(16)
        for _ in range(8):
            stream.advance(5)
    said, *bars = re.split("[\r\n]+", capsys.readouterr().err.strip())
    assert said == "a batch does not fit into memory: going on with 16 at a time"
    assert 0 < len(bars) < 5, "of 8 batches of 3 seconds"
    assert all(bar.startswith("score/mask:") for bar in bars)
