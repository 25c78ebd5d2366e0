"""Print the budget's numbers: python benchmarks/size.py, or make size.

A code line has code that is no import and no docstring; blanks, comments and stubs (.pyi), which no
Python runs, do not count.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE, FLAGS, TABLES = 450, 9, 5  # of a study, at most


def code_lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    skipped = set[int]()
    for node in ast.walk(ast.parse(text)):
        holds_text = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        told = [node.body[0]] if holds_text and ast.get_docstring(node) else []
        for left in told if holds_text else [node]:
            if told or isinstance(left, ast.Import | ast.ImportFrom):
                skipped |= {*range(left.lineno, left.end_lineno + 1)}
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and n not in skipped for n, line in lines)


def tables_of(files: Sequence[Path]) -> set[str]:
    """Return the names by which the code of a study writes and reads the tables of its run."""
    named = set[str]()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            keys: list[ast.expr | None] = []
            if isinstance(node, ast.Subscript) and name_of(node.value) == "tables":
                keys = [node.slice]
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.keyword):
                targets = node.targets if isinstance(node, ast.Assign) else [node]
                is_tables = "tables" in {name_of(getattr(to, "target", to)) for to in targets}
                keys = node.value.keys if is_tables and isinstance(node.value, ast.Dict) else []
            named |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return named


def name_of(node: ast.AST) -> str | None:
    return next((vars(node)[name] for name in ("attr", "id", "arg") if name in vars(node)), None)


def main() -> None:
    package = [*(ROOT / "nope_probe").rglob("*.py")]
    rooms = Counter[str]()
    for path in package:
        rooms[path.relative_to(ROOT / "nope_probe").parts[0]] += code_lines(path)
    print(f"package: {rooms.total():,} code lines in {len(package)} files")
    print(*(f"  {room:<16}{lines:>6,}" for room, lines in rooms.most_common()), sep="\n")
    recipes = [path for path in (ROOT / "recipes").rglob("*.py") if "tests" not in path.parts]
    print(f"recipes: {sum(map(code_lines, recipes)):,} code lines in {len(recipes)} files")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "ci" not in path.parts]
    print(f"tests/ without tests/ci: {sum(len(p.read_text().splitlines()) for p in tests):,} lines")
    studies = ROOT / "nope_probe/studies"
    for command in sorted(path.stem for path in (ROOT / "nope_probe").glob("*.py")):
        module = ROOT / "nope_probe" / f"{command}.py"
        if "import Settings" not in module.read_text():
            continue
        settings = import_module(f"nope_probe.{command}").Settings
        place = Path(sys.modules[settings.__module__].__file__ or "")
        one_file = place.stem != "settings"
        files = [*studies.glob(f"{command}*.py")] if one_file else [*place.parent.rglob("*.py")]
        counts = {
            "code lines": (sum(map(code_lines, files)), CODE),
            "flags": (len(vars(settings)["__annotations__"]), FLAGS),
            "tables": (len(tables_of(files)), TABLES),
        }
        said = (f"{n} {what}{f' (over {most})' * (n > most)}" for what, (n, most) in counts.items())
        print(f"{command}: {', '.join(said)}")


if __name__ == "__main__":
    main()
