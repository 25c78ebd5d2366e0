"""What commands print: names as they are, never as markup or as commands to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from nope_probe.errors import printable


class PlainConsole(Console):
    """A console on stdout that reads no markup, and shows control characters escaped.

    Tables and sentences hold names of models, files and folders, which others chose.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Let the command end as SIGPIPE ends it; rich's own exit code would say that it failed.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich prints it; markup stays as it is written."""
        return super().render_str(printable(text, keep="\n"), **options | {"markup": False})


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout, with control characters escaped."""
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
