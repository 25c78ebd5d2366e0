"""The line that shows what a command is doing, on a terminal and elsewhere."""

import io
import sys

import pytest

from nope_probe.runtime.status import status

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


def test_it_is_erased_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), status("loading torch"):
        raise KeyboardInterrupt
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
