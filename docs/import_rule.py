"""Which folder of the package may import which, and which does, as read from the code.

`tests/test_imports.py` holds the code to the rule; `draw_imports.py` draws it.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "nope_probe"
PUBLIC = "public names"
NAMED = ("nope_probe", "nope_probe.figures", "nope_probe.studies")  # whose stubs name what is lazy
COMMANDS = "commands"  # the other modules at the root of the package

# What each folder may import besides itself. Folders come from the top down: arrows run one way.
RULE: dict[str, tuple[str, ...]] = {
    PUBLIC: ("studies", "run", "models", "data", "figures", "analyses", "hooks", "maps"),
    COMMANDS: ("studies", "run", "cli"),
    "cli": ("studies", "run"),
    "studies": ("run", "reports", "models", "data", "figures", "analyses", "hooks", "maps"),
    "reports": ("run", "figures"),
    "run": ("models", "data", "analyses", "hooks", "maps"),
    "models": ("hooks",),
    "data": ("hooks", "maps"),
    "figures": ("maps",),
    "analyses": ("hooks", "maps"),
    "hooks": ("maps",),
    "maps": (),
    "removal": ("errors",),
    "stages": (),
    "files": (),
    "errors": (),
}
# The rooms of `hooks`, from the top down: a room may import those below it. A module next to the
# rooms, such as hooks/ablation.py, may import all of them, and none of them imports it.
ROOMS = ("hooks", "hooks.reading", "hooks.removing", "hooks.layers")
EVERYWHERE = ("removal", "stages", "files", "errors")  # what every folder may import
RUNS = sorted((ROOT / PACKAGE / "studies").glob("*_run.py"))
STUDIES = tuple(path.stem.removesuffix("_run") for path in RUNS)
Imports = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the files of the package by the name of their module."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> dict[str, set[str]]:
    """Return the modules of the package that each one imports, at any place in its file."""
    known = modules()
    return {name: set(_imported(path, known)) - {name} for name, path in known.items()}


def _imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known or node.module in known:
                    yield name if name in known else str(node.module)


def folder_of(module: str) -> str:
    """Return the folder of a module, as the rule names it.

    Example:
        >>> [folder_of(f"nope_probe{name}") for name in (".hooks.layers", ".ablate", ".errors", "")]
        ['hooks', 'commands', 'errors', 'public names']
    """
    _, *parts = module.split(".")
    return PUBLIC if not parts else parts[0] if parts[0] in RULE else COMMANDS


def importer_of(module: str) -> str:
    """Return whose imports a module has: those of a stub of lazy names are of the public names."""
    return PUBLIC if module in NAMED else folder_of(module)


def room_of(module: str) -> str | None:
    """Return the room of `hooks` that a module is in, `hooks` for one next to them, or None.

    Example:
        >>> [room_of(f"nope_probe.{name}") for name in ("hooks.layers.model", "hooks.ablation")]
        ['hooks.layers', 'hooks']
    """
    rooms = [room for room in ROOMS if f"{module}.".startswith(f"{PACKAGE}.{room}.")]
    return max(rooms, key=len, default=None)


def folder_imports(found: Imports) -> dict[str, set[str]]:
    """Return the folders that the modules of each folder import, besides themselves."""
    folders: dict[str, set[str]] = {name: set() for name in RULE}
    for module, imported in found.items():
        importer = importer_of(module)
        folders[importer] |= {folder_of(each) for each in imported} - {importer}
    return folders


def violations(found: Imports) -> list[str]:
    """Return the imports that the rule does not allow."""
    return [
        f"{module} imports {each}"
        for module, imported in sorted(found.items())
        for each in sorted(imported)
        if folder_of(each) not in (importer_of(module), *EVERYWHERE, *RULE[importer_of(module)])
        or _is_up_within_hooks(module, each)
        or _is_across_commands(module, each)
    ]


def _is_up_within_hooks(module: str, imported: str) -> bool:
    room, other = room_of(module), room_of(imported)
    return room is not None and other is not None and ROOMS.index(other) < ROOMS.index(room)


def _is_across_commands(module: str, imported: str) -> bool:
    """Return whether the study of one command imports that of another."""
    studies = [study_of(name) for name in (module, imported)]
    return None not in studies and studies[0] not in ("compare", studies[1])


def study_of(module: str) -> str | None:
    """Return the study that a module is of; None for one that all studies share.

    Example:
        >>> [study_of(f"nope_probe.studies.{name}") for name in ("heads_run", "heads", "engine")]
        ['heads', 'heads', None]
    """
    _, folder, name, *_ = [*module.split("."), "", ""]
    study = name.partition("_")[0]
    return study if folder == "studies" and study in STUDIES else None
