"""JSON nested so deeply that the parser under `datasets`, which recurses in C++, would crash."""

from __future__ import annotations

import re
from pathlib import Path

from nope_probe.errors import UserError

MOST_LEVELS = 1000  # that Python's own parser takes
MOST_BYTES = 1 << 30  # of a folder: reading more than that would take minutes
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]')


def validate_nesting(folder: Path) -> None:
    """Check the JSON files in a folder, of large folders those that come first.

    Raises:
        UserError: naming the file.
    """
    n_bytes = 0
    for path in sorted(each for each in folder.rglob("*.json*") if each.is_file()):
        n_bytes += path.stat().st_size
        if n_bytes > MOST_BYTES:
            return
        with path.open("rb") as file:  # a .jsonl file has a text a line
            texts = file if path.suffix == ".jsonl" else [file.read()]
            if any(_is_deep(text) for text in texts):
                raise UserError(f"{path} holds JSON that is nested more than {MOST_LEVELS} deep")


def _is_deep(text: bytes) -> bool:
    if text.count(b"[") + text.count(b"{") <= MOST_LEVELS:
        return False
    level = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        level += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
        if level > MOST_LEVELS:
            return True
    return False
