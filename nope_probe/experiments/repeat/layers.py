"""Repeat what `layers --json` printed: one file holds the findings and the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nope_probe.errors import UserError
from nope_probe.experiments.layers.run import Settings, run
from nope_probe.experiments.layers.summary import as_json
from nope_probe.experiments.repeat.same import TOLERANCE, Comparison, changes
from nope_probe.files import read_json
from nope_probe.runtime.identity import validate_repeatable


def repeat_layers(file: Path) -> Comparison:
    """Repeat the run that a file of `layers --json` holds, and return how the two compare.

    Raises:
        UserError: for a file that holds something else, or a model that changed or is not there.
    """
    before = read_report(file)
    try:
        values = before["run"]["settings"]
        settings = Settings(**{**values, "expect": tuple(values["expect"]), "json": True})
        recorded = before["run"]["sources"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{file} holds no settings of layers; print it again with --json"
        ) from error
    validate_repeatable(file, recorded, settings.sources())
    again = json.loads(as_json(run(settings), settings))
    return compare_reports(file, before, again)


def read_report(file: Path) -> dict[str, Any]:
    """Read what `layers --json` printed.

    Raises:
        UserError: for anything else.
    """
    try:
        report = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no file of layers --json, and no run's folder") from error
    if not isinstance(report, dict):
        raise UserError(f"{file} is no file of layers --json, and no run's folder")
    return report


def compare_reports(file: Path, before: dict[str, Any], again: dict[str, Any]) -> Comparison:
    """Compare the findings of two reports."""
    found = [dict(_leaves(each | {"run": None})) for each in (before, again)]
    missing = sorted({*found[0]} ^ {*found[1]})
    shared = {name: (found[0][name], found[1][name]) for name in found[0] if name in found[1]}
    differences = {name: _difference(*pair) for name, pair in shared.items()}
    where = max(differences, key=lambda name: differences[name], default="")
    return Comparison(
        name=str(file),
        identical=found[0] == found[1],
        largest=differences.get(where, 0.0),
        where=where,
        missing=tuple(missing),
        changed=tuple(changes(before["run"], again["run"])),
    )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return every value in nested JSON by its path, such as `layers.0.rope_change`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inside:
        path = f"{name}.{key}" if name else str(key)
        if isinstance(each, (dict, list)):
            yield from _leaves(each, path)
        else:
            yield path, each


def _difference(first: Any, second: Any) -> float:
    """Return the relative difference of two numbers; of other values 0 or infinity."""
    if first == second:
        return 0.0
    if isinstance(first, float) and isinstance(second, float):
        # Errors and residues near 0 are sums' last digits.
        return abs(first - second) / max(abs(first), abs(second), 1000 * TOLERANCE)
    return float("inf")
