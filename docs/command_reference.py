"""The commands and their flags as text, from their typed settings."""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from collections.abc import Iterator
from types import ModuleType

from docstring_parser.google import parse as parse_docstring

from nope_probe.cli import Showing
from nope_probe.run.flags import hints_of
from nope_probe.studies.commands import COMMANDS


def commands() -> Iterator[ModuleType]:
    """Yield the modules of the commands."""
    for name in COMMANDS:
        yield importlib.import_module(f"nope_probe.{name}")


def settings_of(module: ModuleType) -> type:
    """Return the settings of a command, and the flags on what is shown that `cli` adds to them."""
    hints, values = hints_of(Showing), vars(Showing)
    shown = [(name, hints[name], values[name]) for name in module.Settings.showing]
    bases = (module.Settings,)
    return dataclasses.make_dataclass("Settings", shown, bases=bases, frozen=True, kw_only=True)


def command_text(module: ModuleType) -> str:
    """Return a command's section, as MyST: what it does, then its flags."""
    name = module.__name__.rpartition(".")[2]
    settings = settings_of(module)
    documented = parse_docstring(module.Settings.__doc__ or "").description
    flags = "\n\n".join(flag_text(*flag) for flag in flags_of(settings))
    return f"## {name}\n\n`python -m {module.__name__}`\n\n{documented}\n\n{flags}\n"


def flags_of(settings: type) -> Iterator[tuple[str, str, str]]:
    """Yield each flag of a dataclass of settings as typed, its default and its help."""
    hints = hints_of(settings)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        extras = getattr(hint, "__metadata__", ())
        if any("Suppress" in str(extra) for extra in extras):
            continue
        values = typing.get_args(hint)[0] if extras else hint
        positional = any("Positional" in str(extra) for extra in extras)
        name = field.name.replace("_", "-")
        texts = [each.help for each in extras if getattr(each, "help", None)]
        yield (
            f"{name.upper()} {values_text(values)}" if positional else flag_name(name, values),
            default_of(field, values),
            texts[0] if texts else "",
        )


def flag_name(name: str, values: object) -> str:
    """Return a flag with the values that it takes."""
    return f"--{name} | --no-{name}" if values is bool else f"--{name} {values_text(values)}"


def values_text(values: object) -> str:
    """Return the values that a type takes, as `--help` writes them."""
    origin, arguments = typing.get_origin(values), typing.get_args(values)
    if origin is typing.Literal:
        return "{" + "|".join(map(str, arguments)) + "}"
    if origin is tuple:
        return f"[{values_text(arguments[0])} ...]"
    if arguments:
        kept = [each for each in arguments if each is not type(None)]
        return "|".join(values_text(each) for each in kept)
    return {str: "TEXT"}.get(values, getattr(values, "__name__", str(values)).upper())


def default_of(field: dataclasses.Field, values: object) -> str:
    """Return a flag's default in words; nothing where there is none."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == ():
        return ""
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return str(value)


def flag_text(name: str, default: str, documented: str) -> str:
    """Return one flag as an item of a definition list."""
    note = "Required. " if default == "required" else f"Default: `{default}`." if default else ""
    documented = re.sub(r"\s+", " ", documented)
    documented = re.sub(r"(?<![`\w-])(--[a-z][\w-]*)", r"`\1`", documented)
    shown = documented if default == "required" else f"{documented} {note}".strip()
    return f"`{name}`\n: {shown or 'No help.'}"
