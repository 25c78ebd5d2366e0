"""The single changes that mutation testing makes in a module; see mutants.py."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    column: int
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
            line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1
            yield Mutant(path=path, line=line, column=column, what=what, source=source)


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
