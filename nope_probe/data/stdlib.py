"""Python's standard library as documents: text that every machine has.

Its modules are either for training or held out, by a hash of their name. The held-out text is
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


def stdlib_documents(held_out: bool | None = None) -> list[str]:
    """Return the documents of this Python's standard library.

    Args:
        held_out: True for the held-out modules, False for the training ones, None for all.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in sorted(root.rglob("*.py")) if _is_kept(path.relative_to(root))]
    return [
        document
        for path in modules
        if held_out is None or is_held_out(path.relative_to(root).as_posix()) == held_out
        for document in split(_read(path))
    ]


def split(source: str) -> list[str]:
    """Split a module's source before top-level statements into documents of 1,200 characters.

    The last one may be shorter. A source that is not this Python's syntax stays whole.
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


def _is_kept(path: Path) -> bool:
    return not _SKIPPED & set(path.parts) and not path.parts[0].startswith("config-")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def write_held_out(path: Path) -> None:
    """Write the held-out documents as the data set `shipped`: a JSON object with `text` a line."""
    rows = (json.dumps({"text": text}) + "\n" for text in stdlib_documents(held_out=True))
    path.write_text("".join(rows), encoding="utf-8")


HELD_OUT_PERCENT = 13


def is_held_out(key: str) -> bool:
    """Return whether a text (or the name of a module) belongs to the held-out slice."""
    return int(sha256(key.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT
