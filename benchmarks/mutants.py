"""Mutation testing: change one thing in the library, and see whether its tests notice.

    python benchmarks/mutants.py --n 50 --seed 0 --tree /tmp/mutants

Draws seeded random mutants of `nope_probe/analyses` and `nope_probe/hooks`, writes each in turn
into a copy of the tree, and runs the tests of the changed module: those of the same name first,
then the nearest files of tests/analyses and tests/hooks whose imports lead to it. A mutant that all
of them pass survives; a survivor is a missing test, or equivalent to the original. Docstrings,
annotations, messages of errors and code that only draws a repr are left alone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import hypothesis  # noqa: F401  (and the next two: for the tests, which are forked)
import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("analyses", "hooks")
MOST_FILES = 4
Change = Callable[[ast.AST], None]
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


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yield what can be changed in a node: a description, and a function that does it in place."""
    yield from _operator_changes(node)
    yield from _value_changes(node)
    yield from _statement_changes(node)


def _operator_changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
        new = SWAPS[type(node.op)]
        yield f"{_name(node.op)} -> {new.__name__}", lambda each: setattr(each, "op", new())
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        other = SWAPS[type(node.ops[0])]
        change = f"{_name(node.ops[0])} -> {other.__name__}"
        yield change, lambda each: each.ops.__setitem__(0, other())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop not", lambda each: setattr(each, "operand", _not(each.operand))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        yield f"drop {_name(node.op)}", lambda each: setattr(each, "op", ast.UAdd())


def _value_changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)


def _statement_changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.If | ast.IfExp):
        yield "negate the condition", lambda each: setattr(each, "test", _not(each.test))
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With):
        for place, statement in enumerate(node.body):
            if isinstance(statement, ast.AugAssign | ast.Expr | ast.If) and not _is_words(
                statement
            ):
                yield f"drop `{ast.unparse(statement)[:50]}`", partial(_drop, place)


def _name(operator: ast.AST) -> str:
    return type(operator).__name__


def _not(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(op=ast.Not(), operand=node)


def _drop(place: int, node: ast.AST) -> None:
    node.body[place] = ast.Pass()


def tests_of(module: Path, tree: Path) -> list[str]:
    """Return the test files of a module: by name first, then those whose imports lead to it."""
    importers = _importers(tree)
    distance, frontier = {_dotted(module, tree): 0}, [_dotted(module, tree)]
    for name in frontier:  # breadth first
        for each in importers.get(name, ()):
            if each not in distance:
                distance[each] = distance[name] + 1
                frontier.append(each)
    found = [
        (
            path.stem != f"test_{module.stem}",
            distance[_dotted(path, tree)],
            path.stat().st_size,
            path,
        )
        for package in PACKAGES
        for path in (tree / "tests" / package).rglob("test_*.py")
        if _dotted(path, tree) in distance
    ]
    return [str(path.relative_to(tree)) for *_, path in sorted(found)[:MOST_FILES]]


def _dotted(path: Path, tree: Path) -> str:
    return ".".join(path.relative_to(tree).with_suffix("").parts)


@cache
def _importers(tree: Path) -> dict[str, set[str]]:
    """Return for each module the modules and tests that import from it."""
    found: dict[str, set[str]] = {}
    for folder in ("nope_probe", "tests"):
        for path in (tree / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    found.setdefault(node.module, set()).add(_dotted(path, tree))
    return found


def survives(mutant: Mutant, tree: Path, tests: list[str], timeout: float) -> str:
    """Return `killed`, `survived`, or `timed out`, which says nothing on a busy machine."""
    original = mutant.path.read_text(encoding="utf-8")
    mutant.path.write_text(mutant.source, encoding="utf-8")
    try:
        child = get_context("fork").Process(target=_run_tests, args=(tree, tests))
        child.start()
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
            return "timed out"
    finally:
        mutant.path.write_text(original, encoding="utf-8")
    return "survived" if child.exitcode == 0 else "killed"


def _run_tests(tree: Path, tests: list[str]) -> None:
    """Run tests in a child, which finds the slow imports of its parent done."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        options = ["-q", "-x", "--no-header", "-W", "ignore", "--tb=no", "-p", "no:cacheprovider"]
        code = pytest.main([*options, *tests])
    os._exit(int(code))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=50, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, required=True, help="where the tree is copied to")
    parser.add_argument("--only", default="", help="mutate only modules whose path holds this")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one mutant's tests")
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    importlib.import_module("transformer_lens.model_bridge")  # of no module of ours
    for name in ("LlamaForCausalLM", "SmolLM3ForCausalLM", "GPT2LMHeadModel"):
        getattr(transformers, name)  # lazy imports
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
    results = Counter[str]()
    for mutant in drawn:
        tests = tests_of(mutant.path, tree)
        result = survives(mutant, tree, tests, arguments.timeout) if tests else "survived"
        results[result] += 1
        where = f"{mutant.path.relative_to(tree)}:{mutant.line}"
        print(f"{result:9} {where}: {mutant.what} ({len(tests)} test files)", flush=True)
    ended = results["killed"] + results["survived"]
    print(f"{results['killed']} of {ended} killed; {results['timed out']} timed out")


if __name__ == "__main__":
    main()
