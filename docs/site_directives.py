"""Sphinx directives that write the reference pages from the code: public names and commands."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

from command_reference import command_text, commands
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nope_probe.figures.words import PLACES, Column
from nope_probe.studies.compare import declared


class PublicNames(SphinxDirective):
    """List the public names of a package, functions first, and document each."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = importlib.import_module(self.arguments[0])
        public = [f"{package.__name__}.{name}" for name in package.__all__]
        public = [path for path in public if not isinstance(named(path), ModuleType)]
        public.sort(key=lambda path: inspect.isclass(named(path)))  # functions first
        overview = ["| name | what it does |", "|---|---|", *map(overview_row, public), ""]
        return self.parse_text_to_nodes("\n".join([*overview, *map(autodoc, public)]))


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


class CsvColumns(SphinxDirective):
    """List the columns of all commands' CSV files, as the studies declare them."""

    def run(self) -> list[nodes.Node]:
        lines = ["| command | column | unit | what it is |", "|---|---|---|---|"]
        lines += [column_row("all", name, column) for name, column in PLACES.items()]
        for command in commands():
            name = command.__name__.rpartition(".")[2]
            own = declared(name)
            new = {name: column for name, column in own.items() if name not in PLACES}
            lines += [column_row(f"`{name}`", *of_name) for of_name in new.items()]
        return self.parse_text_to_nodes("\n".join(lines))


def column_row(command: str, name: str, column: Column) -> str:
    """Return the row of a column: a share is stored from 0 to 1."""
    return f"| {command} | `{name}` | {column.unit} | {column.meaning} |"


def named(path: str) -> object:
    """Return what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def overview_row(path: str) -> str:
    """Return a row of the overview: the name, linked, and its docstring's first line."""
    summary = (inspect.getdoc(named(path)) or "").partition("\n")[0]
    return f"| {{py:obj}}`{path.rpartition('.')[2]} <{path}>` | {summary} |"


def autodoc(path: str) -> str:
    """Return the directive that documents one name, as MyST."""
    kind = "autoclass" if inspect.isclass(named(path)) else "autofunction"
    return f"```{{eval-rst}}\n.. {kind}:: {path}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.add_directive("documented", Documented)
    app.add_directive("commands", Commands)
    app.add_directive("csv-columns", CsvColumns)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
