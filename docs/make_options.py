"""Write `nope_probe/studies/options.pyi`: what the `run_*` functions take, for type checkers.

Its classes come from the signatures and the help of the functions, which come from the settings.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docstring_parser.google import parse as parse_docstring

import nope_probe
from nope_probe.studies.commands import COMMANDS

OUT = Path(__file__).parent.parent / "nope_probe/studies/options.pyi"
FUNCTIONS = {
    f"{name.title()}Options": getattr(nope_probe, command.settings.function)
    for name, command in COMMANDS.items()
    if command.settings.function.startswith("run_")
}
BEGIN = '''"""The options of the `run_*` functions. Written by docs/make_options.py."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypedDict
'''


def keys_of(function: Callable[..., object]) -> list[str]:
    """Return the keys of a function's options: their types, and their help with the default."""
    entries = parse_docstring(function.__doc__ or "").params
    helps = {entry.arg_name: entry.description or "" for entry in entries}
    _model, _inputs, _out, *options = signature(function).parameters.values()
    return [key_of(option, helps[option.name]) for option in options]


def key_of(option: Parameter, described: str) -> str:
    said = f'"""{" ".join(described.split())} [{option.default!r}]"""'
    indented = fill(said, 100, initial_indent="    ", subsequent_indent="    ")
    return f"    {option.name}: {written(option.annotation)}\n{indented}\n"


def written(hint: Any) -> str:
    """Return a type as every version of Python reads it.

    Example:
        >>> written(Path | Collection[Literal["auto", 4]] | None)
        "Path | Collection[Literal['auto', 4]] | None"
    """
    if get_origin(hint) is Annotated:
        return written(get_args(hint)[0])
    arguments = get_args(hint)
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " | ".join(map(written, arguments))
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if arguments:
        return f"Collection[{', '.join(map(written, arguments))}]"
    return "None" if hint is NoneType else hint.__name__


def class_of(name: str, base: str, keys: Iterable[str]) -> str:
    return f"class {name}({base}, total=False):\n{''.join(keys)}"


def text() -> str:
    """Return the stub: what all functions take, what those with removals take, and a class each."""
    keys = {name: keys_of(function) for name, function in FUNCTIONS.items()}
    removing = [name for name in keys if any("    in_heads: " in key for key in keys[name])]
    of_all = shared_by(keys.values())
    of_removals = [key for key in shared_by(keys[name] for name in removing) if key not in of_all]
    classes = [
        class_of("RunOptions", "TypedDict", of_all),
        class_of("RemovingOptions", "RunOptions", of_removals),
    ]
    for name, of_name in keys.items():
        base = "RemovingOptions" if name in removing else "RunOptions"
        inherited = {*of_all, *(of_removals if name in removing else ())}
        classes.append(class_of(name, base, [key for key in of_name if key not in inherited]))
    return formatted("\n".join([BEGIN, *classes]))


def shared_by(classes: Iterable[list[str]]) -> list[str]:
    """Return the keys that all classes have alike, in the order of the first."""
    first, *others = classes
    return [key for key in first if all(key in of_other for of_other in others)]


def formatted(code: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", OUT.name, "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
