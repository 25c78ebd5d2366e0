"""Mutation testing: change one thing in the library, and see whether its tests notice.

    python benchmarks/mutants.py --n 50 --seed 0 --tree /tmp/mutants

Draws seeded random mutants of `nope_probe/analyses` and `nope_probe/hooks`, writes each in turn
into a copy of the tree, and runs the tests of the changed module: those of the same name, and the
files of tests/analyses and tests/hooks that import it. A mutant that all of them pass survives; a
survivor is a missing test, or equivalent to the original. Docstrings, annotations, messages of
errors and code that only draws a repr are left alone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("analyses", "hooks")
MOST_FILES = 8
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one module."""

    path: Path
    line: int
    what: str
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module, one change each."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for index, node in enumerate(_code(tree)):
        for what, change in _changes(node):
            changed = copy.deepcopy(tree)
            change(next(each for i, each in enumerate(_code(changed)) if i == index))
            source = ast.unparse(ast.fix_missing_locations(changed))
            yield Mutant(path=path, line=getattr(node, "lineno", 0), what=what, source=source)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a program computes with, in a fixed order."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and not _is_words(each):
                yield each
                yield from _code(each)


def _is_words(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_repr = isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__")
    is_message = isinstance(node, (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom))
    return is_text or is_repr or is_message


def _changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield what can be changed in a node: a description, and a function that does it in place."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield _swap(node, "op", node.op)
    if isinstance(node, ast.AugAssign) and type(node.op) in SWAPS:
        yield _swap(node, "op", node.op)
    if isinstance(node, ast.BoolOp):
        yield _swap(node, "op", node.op)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        new = SWAPS[type(node.ops[0])]
        name = f"{type(node.ops[0]).__name__} -> {new.__name__}"
        yield name, lambda each: each.ops.__setitem__(0, new())
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield f"drop {type(node.op).__name__}", lambda n: setattr(n, "op", ast.UAdd())
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "negate the condition", _negate
    body = getattr(node, "body", None)
    if isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.With)) and isinstance(body, list):
        for place, statement in enumerate(body):
            if isinstance(statement, (ast.AugAssign, ast.Expr, ast.If)) and not _is_words(
                statement
            ):
                yield f"drop `{ast.unparse(statement)[:50]}`", _drop(place)


def _swap(node: ast.AST, field: str, operator: ast.AST) -> tuple[str, object]:
    new = SWAPS[type(operator)]
    return (
        f"{type(operator).__name__} -> {new.__name__}",
        lambda each: setattr(each, field, new()),
    )


def _negate(node: ast.If | ast.IfExp) -> None:
    node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)


def _drop(place: int) -> object:
    return lambda node: node.body.__setitem__(place, ast.Pass())


def tests_of(module: Path, tree: Path) -> list[str]:
    """Return the test files of a module: by name first, then those that import it, fewest first."""
    dotted = ".".join(module.relative_to(tree).with_suffix("").parts)
    found = {
        path: path.stem == f"test_{module.stem}"
        for path in sorted(tree.glob("tests/analyses/**/test_*.py"))
        + sorted(tree.glob("tests/hooks/test_*.py"))
        if path.stem == f"test_{module.stem}" or f"{dotted} import" in path.read_text("utf-8")
    }
    by_name = sorted(found, key=lambda path: (not found[path], path.stat().st_size))
    return [str(path.relative_to(tree)) for path in by_name[:MOST_FILES]]


def survives(mutant: Mutant, tree: Path, tests: list[str], timeout: float) -> str:
    """Return `killed`, `survived`, or `timed out`, which counts as killed."""
    original = mutant.path.read_text(encoding="utf-8")
    mutant.path.write_text(mutant.source, encoding="utf-8")
    options = ["-q", "-x", "--no-header", "-W", "ignore", "--tb=no", "-p", "no:cacheprovider"]
    command = ["nice", sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        mutant.path.write_text(original, encoding="utf-8")
    return "survived" if done.returncode == 0 else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=50, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, required=True, help="where the tree is copied to")
    parser.add_argument("--only", default="", help="mutate only modules whose path holds this")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one mutant's tests")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".mypy_cache", ".venv*")
    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
    modules = [
        path
        for package in PACKAGES
        for path in sorted((tree / "nope_probe" / package).rglob("*.py"))
        if arguments.only in str(path.relative_to(tree))
    ]
    pool = [each for path in modules for each in mutants_of(path)]
    drawn = random.Random(arguments.seed).sample(pool, min(arguments.n, len(pool)))
    print(f"{len(drawn)} of {len(pool)} mutants of {len(modules)} modules", flush=True)
    survived = 0
    for mutant in drawn:
        tests = tests_of(mutant.path, tree)
        result = survives(mutant, tree, tests, arguments.timeout) if tests else "survived"
        survived += result == "survived"
        where = f"{mutant.path.relative_to(tree)}:{mutant.line}"
        print(f"{result:9} {where}: {mutant.what} ({len(tests)} test files)", flush=True)
    print(f"{len(drawn) - survived} of {len(drawn)} killed, {survived} survived")


if __name__ == "__main__":
    main()
