"""The line of status and the progress bar that a command shows on the terminal."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nope_probe.errors import printable
from nope_probe.runtime.processes import is_first_process

if TYPE_CHECKING:
    from tqdm import tqdm

_PHASES = {
    "gains": "calibration",
    "score": "scores",
    "shuffled": "shuffled tokens",
    "loss": "losses",
    "intact": "intact model",
    "ablated": "ablated model",
}
_WITH_ESTIMATE = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}, {remaining} left"


def open_standard_streams() -> None:
    """Open closed standard streams on nothing, and let output escape what it cannot encode.

    Without this, the next file that is opened takes the number of a closed stream, and its output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = io.TextIOWrapper(io.FileIO(os.devnull, mode), encoding="utf-8")
            setattr(sys, name, stream)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):  # in a notebook it is of another kind
            output.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Send the rest of stdout nowhere, so that the interpreter can end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def status(doing: str, *, has_bars: bool = False) -> Iterator[None]:
    """Show a line of status on stderr, with a spinner that is erased at the end.

    Only the first process shows the line, and only on a terminal: a log file gets nothing. Lines
    cannot be nested.

    Args:
        doing: the work in progress, such as `loading TransformerLens`.
        has_bars: whether it may draw progress bars of its own, as a download does; then the line
            has no spinner and stays.
    """
    if not (is_first_process() and sys.stderr.isatty()):
        yield
    elif has_bars:
        sys.stderr.write(f"{printable(doing)} ...\n")
        yield
    else:
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("") as shown:
            # Drawn here: the thread that turns the spinner waits while a library is imported.
            shown.update(Text(f"{printable(doing)} ..."), spinner="dots")
            yield


def open_bar(total: int, done: int, unit: str, *, hidden: bool) -> tqdm:
    """Return a progress bar on stderr; where the total is unknown, it counts.

    A run that has been started before says first at which percentage it resumes.

    Args:
        total: of all streams; 0 if that is not known.
        done: how many were done before.
        unit: what is counted.
        hidden: whether to show nothing.
    """
    from tqdm import tqdm

    if done and not hidden:
        at = f" at {100 * done / total:.0f}%" if total else ""
        sys.stderr.write(f"resuming{at}\n")
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        file=sys.stderr,
        dynamic_ncols=True,
        disable=hidden,
        bar_format=_WITH_ESTIMATE if total else None,
    )


def phase_of(key: str) -> str:
    """Return a stream's key in words: the phase of the run and, if it has one, the condition.

    Example:
        >>> phase_of("gains"), phase_of("score/mask+rope"), phase_of("score-zero/rope/L2")
        ('calibration', 'scores, condition mask+rope', 'scores (zero), condition rope, L2')
    """
    head, *condition = key.split("/")
    name, _, variant = head.partition("-")
    words = _PHASES.get(name, name) + (f" ({variant})" if variant else "")
    return f"{words}, condition {', '.join(condition)}" if condition else words
