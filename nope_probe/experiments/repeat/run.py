"""Repeat a finished run from its manifest, and compare the two."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from nope_probe.errors import UserError
from nope_probe.experiments.repeat.layers import repeat_layers
from nope_probe.experiments.repeat.same import Comparison, compare_runs
from nope_probe.files import validate_regular
from nope_probe.runtime.bounds import BoundedSettings
from nope_probe.runtime.folder import read_manifest, validate_files
from nope_probe.runtime.identity import validate_repeatable
from nope_probe.runtime.settings import FORMAT

_arg = tyro.conf.arg
# Which experiment a manifest's `kind` is.
MODULES = {
    "ablate": "ablation",
    "scores": "scores",
    "circuit": "circuit",
    "behaviour": "behaviour",
    "simulate": "simulation",
}


@dataclass(frozen=True, kw_only=True)
class Settings(BoundedSettings):
    """Repeat a finished run from its manifest, and say whether it came out the same.

    The same command is run with the same settings, and its files are compared: byte for byte where
    Python, libraries and the number of threads are the same, else to 1e-6 of each array's largest
    number. The exit code is 1 if they differ.
    """

    run: Annotated[
        tyro.conf.Positional[Path],
        _arg(help="The folder of a run, or the file that holds what `layers --json` printed."),
    ]
    out: Annotated[
        Path | None, _arg(help="Keep the repetition in this folder [a temporary one].")
    ] = None


def run(settings: Settings) -> Comparison:
    """Repeat a run, and return how the two compare.

    Raises:
        UserError: for a folder without a run, or one whose model or data changed or is not there.
    """
    validate_regular(settings.run)
    if settings.run.is_file():
        if settings.out is not None:
            raise UserError("--out is for runs with a folder, and layers has none")
        return repeat_layers(settings.run)
    manifest = read_manifest(settings.run)
    validate_files(settings.run, manifest)
    kind = manifest.get("kind")
    if kind not in MODULES:
        raise UserError(
            f"{settings.run} is a run of {kind}, which is not repeated: expected one of "
            f"{', '.join(MODULES)}, or what layers --json printed"
        )
    experiment: Any = import_module(f"nope_probe.experiments.{MODULES[kind]}.run")
    recorded = restored(experiment.Settings, settings.run, manifest["settings"])
    validate_repeatable(settings.run, manifest.get("sources"), recorded.sources())
    with ExitStack() as stack:
        out = settings.out or Path(stack.enter_context(TemporaryDirectory()), "run")
        set_threads(manifest.get("threads"))
        again = experiment.run(replace(recorded, out=out))
        return compare_runs(settings.run, again)


def restored(kind: type[Any], folder: Path, recorded: Mapping[str, Any]) -> Any:
    """Return the settings that a manifest records.

    Args:
        kind: the class of the command's settings.
        folder: the run's folder.
        recorded: what the manifest holds.

    Raises:
        UserError: if an older or newer version wrote them.
    """
    values = {name: _value(value) for name, value in recorded.items() if name != "format"}
    known = get_type_hints(kind)
    if recorded.get("format", FORMAT) != FORMAT or not set(values) <= set(known):
        raise UserError(
            f"{folder} holds a run of another version of nope_probe, which means other numbers by "
            "its settings: it cannot be repeated with this one"
        )
    for name, value in values.items():
        if not _is_of(value, known[name]):
            raise UserError(f"{folder} cannot be repeated: its manifest has {value!r} as {name}")
    return kind(**values)


def _value(value: Any) -> Any:
    """Return a value from JSON as the settings hold it."""
    return tuple(value) if isinstance(value, list) else value


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON is of a setting's type."""
    of, inner = get_origin(hint), get_args(hint)
    if of is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if of is tuple:
        return isinstance(value, tuple) and all(_is_of(each, inner[0]) for each in value)
    if inner:  # a union
        return any(_is_of(value, each) for each in inner)
    return type(value) is hint or (hint is float and type(value) is int)


def set_threads(count: int | None) -> None:
    """Compute with so many threads, as the run did: sums are in the same order then."""
    if count is not None:
        import torch

        torch.set_num_threads(count)
