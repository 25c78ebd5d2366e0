"""Which run an unfinished folder holds: its settings, versions, weights and data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nope_probe.errors import StorageError, UserError
from nope_probe.files import read_json
from nope_probe.runtime.folder import atomic_write

_ABOUT = "about.json"


def record_identity(folder: Path, about: Mapping[str, Any]) -> None:
    """Write into a folder what identifies its run, unless that is there."""
    if not (folder / _ABOUT).is_file():
        with atomic_write(folder / _ABOUT) as partial:
            partial.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def validate_same_run(folder: Path, about: Mapping[str, Any]) -> None:
    """Check that an unfinished run in a folder has the same settings, versions, weights and data.

    Raises:
        UserError: naming what differs.
        StorageError: if the file that says what it has is broken.
    """
    try:
        found = read_json(folder / _ABOUT)
        other = [name for name, value in about.items() if found.get(name) != value]
    except (ValueError, AttributeError) as error:
        raise StorageError(f"{folder / _ABOUT} is broken; remove {folder} and run again") from error
    if other:
        raise UserError(
            f"{folder} holds an unfinished run with other {' and '.join(other)}; "
            "remove it, or choose another --out"
        )
