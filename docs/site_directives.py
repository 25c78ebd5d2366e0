"""Sphinx directives that write the reference pages from the code: public names and commands."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator
from types import ModuleType

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class PublicNames(SphinxDirective):
    """Document every public name of a package, in the order of its `__all__`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = importlib.import_module(self.arguments[0])
        public = (f"{package.__name__}.{name}" for name in package.__all__)
        return self.parse_text_to_nodes("\n".join(map(autodoc, public)))


class Documented(SphinxDirective):
    """Document the classes that the directive's lines name."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(map(autodoc, self.content)))


class Commands(SphinxDirective):
    """Document every command of the package with its flags."""

    def run(self) -> list[nodes.Node]:
        pages = [command_text(module) for module in commands()]
        return self.parse_text_to_nodes("\n".join(pages), allow_section_headings=True)


def autodoc(path: str) -> str:
    """Return the directive that documents one name, as MyST."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, ModuleType):
        return ""
    kind = "autoclass" if inspect.isclass(value) else "autofunction"
    return f"```{{eval-rst}}\n.. {kind}:: {path}\n```\n"


def commands() -> Iterator[ModuleType]:
    """Yield the modules of the package that are commands: those with typed `Settings`."""
    import nope_probe

    for found in pkgutil.iter_modules(nope_probe.__path__):
        if found.ispkg or found.name.startswith("_"):
            continue
        module = importlib.import_module(f"nope_probe.{found.name}")
        if hasattr(module, "Settings") and hasattr(module, "main"):
            yield module


def command_text(module: ModuleType) -> str:
    """Return a command's section, as MyST: what it does, then its flags."""
    name = module.__name__.rpartition(".")[2]
    documented = inspect.cleandoc(module.Settings.__doc__ or "")
    flags = "\n\n".join(flag_text(*flag) for flag in flags_of(module.Settings))
    return f"## {name}\n\n`python -m {module.__name__}`\n\n{documented}\n\n{flags}\n"


def flags_of(settings: type) -> Iterator[tuple[str, str, str]]:
    """Yield each flag of a dataclass of settings as typed, its default and its help."""
    hints = typing.get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        extras = getattr(hint, "__metadata__", ())
        values = typing.get_args(hint)[0] if extras else hint
        positional = any("Positional" in str(extra) for extra in extras)
        name = field.name.replace("_", "-")
        texts = [each.help for each in extras if getattr(each, "help", None)]
        yield (
            name.upper() if positional else flag_name(name, values),
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
    shown = documented if default == "required" else f"{documented} {note}".strip()
    return f"`{name}`\n: {shown or 'No help.'}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.add_directive("documented", Documented)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
