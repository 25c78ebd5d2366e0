"""The door for paths and files that users name: absolute paths on this machine, regular files.

Libraries expand `~`, follow URLs and wait for pipes, each in its own way. Behind this door there is
nothing left for them to interpret.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from nope_probe.errors import UserError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has one slash left of `http://`


def local_path(name: str | Path) -> Path:
    """Return a path as an absolute one, with `~` expanded.

    `~nobody/x` is a path in the working directory where there is no such user, as in a shell.

    Raises:
        UserError: for a URL.

    Example:
        >>> local_path("/data/texts.jsonl").as_posix()
        '/data/texts.jsonl'
        >>> local_path("https://else.where/a.txt")
        Traceback (most recent call last):
        nope_probe.errors.UserError: https://else.where/a.txt is a URL: name a path on this machine
    """
    text = os.fspath(name)
    if _URL.match(text):
        raise UserError(f"{text} is a URL: name a path on this machine")
    return Path(os.path.expanduser(text)).absolute()


def validate_regular(path: Path) -> None:
    """Check that a path is that of a regular file, of a folder, or of nothing.

    Raises:
        UserError: for a pipe, a socket or a device, which can block for ever whoever opens it.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"{path} is a pipe, a socket or a device: only regular files are opened")


def validate_regular_files(folder: Path) -> None:
    """Check that a folder holds regular files and folders only.

    Raises:
        UserError: naming another one.
    """
    for path in folder.rglob("*"):
        validate_regular(path)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no regular file, no UTF-8, or no JSON, or is nested too deeply.
    """
    validate_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
