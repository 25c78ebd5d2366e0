"""Find where a decoder's positional attention pattern comes from: the mask, RoPE or the weights."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def lazy_names(
    package: str, path: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`: its stub lists the public names.

    They are imported on first use: TransformerLens takes seconds.

    Args:
        package: its name.
        path: its `__init__.py`, next to `__init__.pyi`.
    """
    stub = ast.parse(Path(path).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    home = {name.name: str(node.module) for node in imports for name in node.names if name.asname}

    def import_name(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(home))}")
        if home[name] == package:  # a module of the package
            return import_module(f"{package}.{name}")
        return getattr(import_module(home[name]), name)

    def shown_names() -> list[str]:
        return sorted({name for name in vars(sys.modules[package]) if name[:2] == "__"} | {*home})

    return import_name, shown_names, sorted(home)


__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
