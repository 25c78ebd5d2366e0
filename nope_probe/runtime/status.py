"""A line on a terminal that shows what a command is doing while there is no progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nope_probe.errors import printable
from nope_probe.runtime.distributed import is_first_process


@contextmanager
def status(doing: str, *, has_bars: bool = False) -> Iterator[None]:
    """Show what is being done on stderr, with a spinner that is erased at the end.

    Only the first process shows it, and only on a terminal: a log file gets nothing. Two of them
    cannot be nested.

    Args:
        doing: what is being done, such as `loading TransformerLens`.
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
