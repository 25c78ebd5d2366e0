"""What is held back on standard error while a library in Rust is at work, and what is not."""

import os

import pytest

from nope_probe.errors import is_rust_error, stderr_held

PanicException = type("PanicException", (BaseException,), {})


def panic(error: type[BaseException]) -> None:
    with stderr_held(LookupError):
        os.write(2, b"past Python\n")
        raise error


def test_what_is_printed_appears_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    with stderr_held():
        os.write(2, b"past Python\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "past Python\n"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_is_printed_before_another_error_appears(
    error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error):
        panic(error)
    assert capfd.readouterr().err == "past Python\n"


@pytest.mark.parametrize("error", [PanicException, Exception, LookupError, KeyError])
def test_the_message_of_a_panic_does_not(
    error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error):
        panic(error)
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"


def test_a_closed_standard_error_holds_nothing() -> None:
    copy = os.dup(2)
    os.close(2)
    try:
        with stderr_held():
            pass
    finally:
        os.dup2(copy, 2)
        os.close(copy)


def test_only_bare_exceptions_and_panics_are_of_a_library_in_rust() -> None:
    assert [is_rust_error(each()) for each in (Exception, PanicException)] == [True, True]
    assert not any(is_rust_error(each()) for each in (KeyError, SystemExit, KeyboardInterrupt))
