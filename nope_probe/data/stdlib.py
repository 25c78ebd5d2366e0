"""The text on every machine that has Python: the standard library, cut into documents.

Modules are split once into training and held-out ones by a hash of their name; the held-out text is
shipped with the checkpoints, because the library differs between Python versions.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from hashlib import sha256
from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "checkpoints" / "heldout.jsonl"
_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "idlelib",
    "lib2to3",
    "tkinter",
    "distutils",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "turtledemo",
    "pydoc_data",
}
_MIN_CHARACTERS = 1200
_HELD_OUT_PERCENT = 13


def stdlib_documents(held_out: bool | None = None) -> list[str]:
    """Give the documents of this Python's standard library.

    Args:
        held_out: True for the held-out modules, False for the training ones, None for all.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in sorted(root.rglob("*.py")) if _wanted(path.relative_to(root))]
    return [
        document
        for path in modules
        if held_out is None or is_held_out(path.relative_to(root)) == held_out
        for document in split(_read(path))
    ]


def is_held_out(module: Path) -> bool:
    """Tell by its name whether a module is kept from training."""
    return int(sha256(module.as_posix().encode()).hexdigest(), 16) % 100 < _HELD_OUT_PERCENT


def split(source: str) -> list[str]:
    """Cut a module's source before top-level statements into documents of 1,200 characters or more.

    A source that is not this Python's syntax stays whole.
    """
    try:
        starts = [_first_line(node) for node in ast.parse(source).body]
    except SyntaxError:
        return [source]
    lines = source.splitlines(keepends=True)
    documents, begin = [], 0
    for start in [*starts[1:], len(lines)]:
        text = "".join(lines[begin:start])
        if len(text) >= _MIN_CHARACTERS or start == len(lines):
            documents.append(text)
            begin = start
    return [document for document in documents if document.strip()]


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)]) - 1


def _wanted(path: Path) -> bool:
    return not _SKIPPED & set(path.parts) and not path.parts[0].startswith("config-")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def write_held_out(path: Path) -> None:
    """Write the held-out documents as the data set `shipped`, a JSON object with `text` a line."""
    rows = (json.dumps({"text": text}) + "\n" for text in stdlib_documents(held_out=True))
    path.write_text("".join(rows), encoding="utf-8")
