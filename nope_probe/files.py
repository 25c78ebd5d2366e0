"""The door for paths and files that users name: absolute paths on this machine, regular files.

Libraries expand `~`, follow URLs and wait for pipes, each in another way. Behind this door
there is nothing left for them to interpret. A file is written whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import file_digest, sha256
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from safetensors import SafetensorError

from nope_probe.errors import StorageError, UserError

if TYPE_CHECKING:
    from jinja2 import Template

JsonObject: TypeAlias = dict[str, Any]  # settings, configurations, records: each has its keys
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has one slash left of `http://`
NO_BROWSER = (
    "images need Chrome or Chromium, which could not be started: install it, or set BROWSER_PATH "
    "to its path"
)
MOST_CHARACTERS = 300  # of a library's reason
MOST_BRACKETS = 1000  # of a text that is not looked at
MOST_BYTES = 1 << 30  # of a folder: reading more than that would take minutes


@cache
def packaged(name: str) -> JsonObject:
    """Return a TOML file of the package, such as `reports/texts.toml`, which is read once."""
    return tomllib.loads(resources.files("nope_probe").joinpath(name).read_text("utf-8"))


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


def validate_image(path: Path) -> None:
    """Check that an image can be drawn into a file: its name, and kaleido, which finds a browser.

    Raises:
        UserError: unless the name ends in .pdf, .png or .svg; saying what to install.
    """
    if path.suffix not in (".pdf", ".png", ".svg"):
        raise UserError(f"cannot draw {path}: expected a name that ends in .pdf, .png or .svg")
    if find_spec("kaleido") is None:
        raise UserError("images need kaleido: pip install kaleido")
    from choreographer.browsers.chromium import Chromium  # kaleido's way to find a browser

    browser = Chromium.find_browser(skip_local=False)
    if browser is None or not Path(browser).is_file():
        raise UserError(NO_BROWSER)


LFS, LFS_BYTES = b"version https://git-lfs", 1024  # a pointer's first bytes, and its most


def validate_regular(path: Path) -> None:
    """Check that a path is that of a regular file, of a folder, or of nothing.

    Raises:
        UserError: for a pipe, a socket or a device, whose opening can block for ever; for a link
            that leads to nothing, and for a pointer of Git LFS in the place of a file.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"{path} is a link, and leads to {os.readlink(path)}, which is not there")
    if os.path.isfile(path) and os.path.getsize(path) < LFS_BYTES:
        with open(path, "rb") as file:
            is_pointer = file.read(len(LFS)) == LFS
        if is_pointer:
            raise UserError(
                f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its "
                "folder"
            )
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"{path} is a pipe, a socket or a device: only regular files are opened")


def validate_regular_files(path: Path) -> None:
    """Check that a file is regular, or that a folder holds regular files and folders only.

    Raises:
        UserError: naming any other.
    """
    for within in (path, *path.rglob("*")):
        validate_regular(within)


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no regular file, no UTF-8, or no JSON, or is nested too deeply.
    """
    validate_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


@contextmanager
def reading(failure: str) -> Iterator[None]:
    """Turn errors of libraries that read a user's file into a UserError of one line.

    A broken file makes libraries raise nearly every class of error: libraries in Rust a bare
    Exception or a panic, Python's parsers a RecursionError where brackets are nested too deeply.
    So the context only reads files and builds the objects that they describe.

    Args:
        failure: the beginning of the line, such as `cannot load gpt2: config.json`; the library's
            reason follows.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # which cannot be imported
        out_of_memory = type(error).__name__ == "OutOfMemoryError"
        if out_of_memory or not (isinstance(error, Exception) or is_panic):
            raise
        reason = " ".join(str(error).split())[:MOST_CHARACTERS]
        if not isinstance(error, (OSError, ValueError)) or not reason:
            reason = f"{reason} ({type(error).__name__})"  # a KeyError's text is the key
        raise UserError(f"{failure}: {reason}") from error


def validate_nesting(folder: Path) -> None:
    """Check the JSON files of a data set, of large folders the first files.

    The parser under `datasets` recurses in C++: brackets nested too deeply would crash it, where
    Python's parser raises an error.

    Raises:
        UserError: naming the file.
    """
    n_bytes = 0
    for path in sorted(path for path in folder.rglob("*.json*") if path.is_file()):
        n_bytes += path.stat().st_size
        if n_bytes > MOST_BYTES:
            return
        with path.open("rb") as file:  # a .jsonl file has a text a line
            for text in file if path.suffix == ".jsonl" else [file.read()]:
                if text.count(b"[") + text.count(b"{") > MOST_BRACKETS:
                    with reading(f"cannot read {path}"):
                        json.loads(text)


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def json_checksum(value: object) -> str:
    """Return the SHA-256 of a JSON-ready value, whatever the order of its keys.

    Example:
        >>> json_checksum({"a": 1, "b": [2]}) == json_checksum({"b": [2], "a": 1})
        True
    """
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def template(folder: str, name: str, **tests: Callable[[str], bool]) -> Template:
    """Return a template of a folder of the package; one of HTML escapes what it is given.

    Args:
        folder: `reports`, for example.
        name: of the file.
        tests: for its `is`, `select` and `reject`, by name.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # which --help lacks

    environment = Environment(
        loader=PackageLoader("nope_probe", folder),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.tests |= tests
    return environment.get_template(name)


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link without its target."""
    shutil.rmtree(path, ignore_errors=True)  # which leaves a file, and a link
    with suppress(OSError):
        path.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces the one at the path once it is complete and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # a full disk gets its room back
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file, which appears complete."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn a failure to write into an error of one line, such as `cannot write x.csv: No space`.

    Raises:
        StorageError: with the operating system's reason.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"cannot write {what}: {reason}") from error
