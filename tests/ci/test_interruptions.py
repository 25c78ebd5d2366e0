"""A signal ends every command with its own exit code and in one line."""

import os
import signal
from importlib import import_module
from pathlib import Path

import pytest
from support.command_line import run_command

from nope_probe.cli import find_commands, one_line_errors

# Of the commands without a session, the function in which each spends its time.
ENTERED = {
    "compare": "nope_probe.studies.compare._is_model",
}
ARGUMENTS = {
    "compare": ["one", "two"],
}


@pytest.mark.parametrize("name", find_commands())
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_command_in_one_line_and_leaves_nothing(
    name: str,
    signum: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    def get_signal(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signum)
        raise AssertionError("not reached")

    entered = ENTERED.get(name, "nope_probe.run.session.record_sources")
    monkeypatch.setattr(entered, get_signal)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=str(code)):
        run_command(import_module(f"nope_probe.{name}"), *ARGUMENTS.get(name, []))
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line in ("interrupted", "interrupted: nothing was written")
    assert not list(tmp_path.rglob("*"))


def test_the_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with one_line_errors():
        assert all(signal.getsignal(number) is not handler for number, handler in before.items())
    assert {number: signal.getsignal(number) for number in before} == before
