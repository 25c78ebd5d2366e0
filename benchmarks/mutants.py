"""Mutation testing: change one thing in the library, and see whether its tests notice.

    python benchmarks/mutants.py --n 50 --seed 0 --tree /tmp/mutants

Draws seeded random mutants of `nope_probe/analyses`, `nope_probe/hooks` and `nope_probe/maps`,
writes each in turn into a copy of the tree, and runs the tests of the changed module until one
fails: those of the same name first, then the files of their test folders whose imports lead to it,
the nearest first. A mutant that all of them pass survives; a survivor is a missing test, or
equivalent to the original. Docstrings, annotations, messages of errors and code that only draws a
repr are left alone.

A mutant counts only where its tests gave a verdict: all passed, or one failed, whose name is
printed and whose file passes on the unchanged copy. It does not count where time ran out.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import hypothesis  # noqa: F401  (and the next two: for the tests, which are forked)
import pytest
import torch
import transformers
from mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("analyses", "hooks", "maps")
NEAREST = 8  # files that run first, in one go
BASELINE_SECONDS = 600


@dataclass(kw_only=True, eq=False)  # pytest hashes its plugins
class Outcome:
    """What pytest reported, as its plugin.

    Attributes:
        n_run: how many tests were run to their end.
        failed: the first test that failed, or the file that could not be collected.
    """

    n_run: int = 0
    failed: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.n_run += report.when == "call"
        self._keep_failure(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._keep_failure(report)

    def _keep_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def tests_of(module: Path, tree: Path) -> list[str]:
    """Return the test files that reach a module, the nearest first.

    First comes the one of its name, then those of the names of modules that import it, then others
    whose imports lead to it: of its package first, by how many imports, the smallest first.
    """
    name = _dotted(module, tree)
    distance = _distances(name, tree)
    users = {f"test_{each.rsplit('.', 1)[-1]}" for each in _importers(tree).get(name, ())}
    found = [
        (
            path.stem != f"test_{module.stem}",
            path.stem not in users,
            package not in module.parts,
            distance[_dotted(path, tree)],
            path.stat().st_size,
            str(path.relative_to(tree)),
        )
        for package in PACKAGES
        for path in (tree / "tests" / package).rglob("test_*.py")
        if _dotted(path, tree) in distance
    ]
    return [file for *_, file in sorted(found)]


def _distances(module: str, tree: Path) -> dict[str, int]:
    """Return how many imports lead from a module or test to this one, for all that reach it."""
    importers = _importers(tree)
    distance, frontier = {module: 0}, [module]
    for name in frontier:  # breadth first
        for each in importers.get(name, ()):
            if each not in distance:
                distance[each] = distance[name] + 1
                frontier.append(each)
    return distance


def _dotted(path: Path, tree: Path) -> str:
    return ".".join(path.relative_to(tree).with_suffix("").parts)


@cache
def _importers(tree: Path) -> dict[str, set[str]]:
    """Return for each module the modules and tests that import from it."""
    homes = dict(_imports(tree / "nope_probe" / "__init__.py"))  # of public names
    found: dict[str, set[str]] = {}
    for folder in ("nope_probe", "tests"):
        for path in (tree / folder).rglob("*.py"):
            for name, module in _imports(path):
                home = homes.get(name, module) if module == "nope_probe" else module
                home = f"tests.{home}" if home.startswith("support.") else home
                found.setdefault(home, set()).add(_dotted(path, tree))
    return found


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each imported name and its module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.name, node.module) for alias in node.names)


def run_tests(tree: Path, tests: list[str], timeout: float) -> tuple[str, Outcome]:
    """Run tests in a child, which finds the slow imports of its parent done.

    Returns:
        `passed`, `failed`, or why there is no verdict; and what pytest reported.
    """
    receiving, sending = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=_run_child, args=(tree, tests, sending))
    child.start()
    sending.close()
    try:
        if not receiving.poll(timeout):
            return "timed out", Outcome()
        code, outcome = receiving.recv()
    except EOFError:
        return "crashed", Outcome()
    finally:
        child.kill()
        child.join()
    if code == pytest.ExitCode.OK and outcome.n_run:
        return "passed", outcome
    if code == pytest.ExitCode.USAGE_ERROR:  # conftest.py cannot be imported
        outcome.failed = outcome.failed or "tests/conftest.py"
    return ("failed" if outcome.failed else "not run"), outcome


def _run_child(tree: Path, tests: list[str], sending: Connection) -> None:
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)  # of the processes that tests start
    importlib.invalidate_caches()  # a folder that was absent when Python started counts as empty
    origin = str(getattr(find_spec("nope_probe"), "origin", None))
    assert origin.startswith(str(tree)), f"the tests would run {origin}"
    outcome = Outcome()
    options = ["-q", "-x", "--no-header", "-W", "ignore", "--tb=no", "-p", "no:cacheprovider"]
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        code = pytest.main([*options, *tests], plugins=[outcome])
    sending.send((int(code), outcome))


def verdict(mutant: Mutant, tree: Path, timeout: float) -> tuple[str, str]:
    """Return `killed` and by which test, `survived`, or why there is no verdict."""
    tests = tests_of(mutant.path, tree)
    if not tests:
        return "survived", "no test reaches it"
    original = mutant.path.read_text(encoding="utf-8")
    mutant.path.write_text(mutant.source, encoding="utf-8")
    try:
        result, outcome = run_tests(tree, tests[:NEAREST], timeout)
        if result == "passed" and tests[NEAREST:]:
            result, outcome = run_tests(tree, tests[NEAREST:], timeout)
    finally:
        mutant.path.write_text(original, encoding="utf-8")
    if result == "failed" and not _passes(outcome.failed.split("::")[0], tests[0], tree):
        return "unclear", f"fails on the unchanged code: {outcome.failed}"
    return {"passed": "survived", "failed": "killed"}.get(result, result), outcome.failed


@cache
def _passes(file: str, own: str, tree: Path) -> bool:
    """Return whether a test file (of conftest.py, the module's own tests) passes unchanged."""
    tested = own if file.endswith("conftest.py") else file
    return run_tests(tree, [tested], BASELINE_SECONDS)[0] == "passed"


def copied_tree(tree: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".mypy_cache", ".venv*")
    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
    return tree.resolve()


def draw(tree: Path, n: int, seed: int, only: str) -> list[Mutant]:
    """Draw random mutants of the modules whose path holds a word."""
    modules = [
        path
        for package in PACKAGES
        for path in sorted((tree / "nope_probe" / package).rglob("*.py"))
        if only in str(path.relative_to(tree))
    ]
    pool = [each for path in modules for each in mutants_of(path)]
    drawn = random.Random(seed).sample(pool, min(n, len(pool)))
    print(f"{len(drawn)} of {len(pool)} mutants of {len(modules)} modules", flush=True)
    return drawn


def import_slow_modules() -> None:
    """Import what every test needs and no module of ours, once for all children."""
    importlib.import_module("transformer_lens.model_bridge")
    for name in ("LlamaForCausalLM", "SmolLM3ForCausalLM", "GPT2LMHeadModel"):
        getattr(transformers, name)  # lazy imports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=50, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="how many of them to pass over")
    parser.add_argument("--tree", type=Path, required=True, help="where the tree is copied to")
    parser.add_argument("--only", default="", help="mutate only modules whose path holds this")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run of tests")
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    import_slow_modules()
    tree = copied_tree(arguments.tree)
    drawn = draw(tree, arguments.n, arguments.seed, arguments.only)
    results: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    for mutant in drawn[arguments.skip :]:
        started = time.monotonic()
        result, by = verdict(mutant, tree, arguments.timeout)
        place = mutant.path.relative_to(tree / "nope_probe")
        results[place.parts[0]][result] += 1
        took = f"{time.monotonic() - started:.0f} s"
        print(
            f"{result:9} {place}:{mutant.line}:{mutant.column}: {mutant.what} ({by}; {took})",
            flush=True,
        )
    for package, counts in results.items():
        ended = counts["killed"] + counts["survived"]
        without = counts.total() - ended
        print(f"{package}: {counts['killed']} of {ended} killed; {without} without a verdict")


if __name__ == "__main__":
    main()
