"""The files that a run is made from: those of its model and of its data.

A finished run is shown again only if they have not changed since. Reading needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nope_probe.errors import UserError
from nope_probe.files import read_json
from nope_probe.runtime.checksums import file_checksum, json_checksum

Record = dict[str, dict[str, Any]]  # per file name
# Of a source, this many bytes are read; files beyond are known by size and time of change.
LARGE = 1 << 30
_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_UNREAD = ("generation_config.json", "run.json")
_UNUSED_CONFIG = ("_name_or_path", "transformers_version")


def source_files(path: Path) -> dict[str, Path]:
    """Return the files at a path by name: the file itself, those of a model, or all in a folder."""
    if path.is_file():
        return {path.name: path}
    model = (path / "config.json").is_file()
    found = _model_files(path) if model else (each for each in path.rglob("*") if each.is_file())
    return {each.relative_to(path).as_posix(): each for each in sorted(found)}


def _model_files(folder: Path) -> Iterator[Path]:
    for pattern in _MODEL_FILES:
        yield from (path for path in folder.glob(pattern) if path.name not in _UNREAD)


def record_sources(sources: Mapping[str, Path | None]) -> dict[str, Record | None]:
    """Return what identifies the files of each source; None for a source that has none here.

    Raises:
        UserError: for a file that cannot be read.
    """
    return {name: None if path is None else _record(path) for name, path in sources.items()}


def _record(path: Path) -> Record:
    """Return the checksums of a source's files, the smallest first, up to a gigabyte in all."""
    found, total = Record(), 0
    try:
        files = source_files(path)
        stats = {name: file.stat() for name, file in files.items()}
        for name, stat in sorted(stats.items(), key=lambda item: item[1].st_size):
            total += stat.st_size
            if total > LARGE:
                found[name] = {"size": stat.st_size, "modified": stat.st_mtime_ns}
            else:
                found[name] = {"sha256": _checksum(files[name])}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return found


def _checksum(path: Path) -> str:
    """Return the checksum of a file; of a configuration, without what changes no number."""
    if path.name == "config.json":
        try:
            config = read_json(path)
            return json_checksum({k: v for k, v in config.items() if k not in _UNUSED_CONFIG})
        except (ValueError, AttributeError):
            pass  # whoever loads the model says what is wrong with it
    return file_checksum(path)


def validate_unchanged(
    out: Path, recorded: Mapping[str, Record | None] | None, sources: Mapping[str, Path | None]
) -> list[str]:
    """Check that a finished run's sources are what they were, and return those not compared.

    Args:
        out: the run's folder.
        recorded: what its manifest holds; None if it was written before there was such a record.
        sources: the sources now.

    Raises:
        UserError: naming a file that differs.
    """
    found, recorded = record_sources(sources), recorded or {}
    for name, files in found.items():
        before = recorded.get(name)
        if files is None or before is None or files == before:
            continue
        changed = min(file for file in {*files, *before} if files.get(file) != before.get(file))
        raise UserError(
            f"the {name} has changed since the run in {out}: {sources[name]} ({changed}); "
            "choose another --out"
        )
    return [name for name, files in found.items() if files is None or recorded.get(name) is None]


def validate_sources_kept(
    run: Path, recorded: Mapping[str, Record | None] | None, sources: Mapping[str, Path | None]
) -> None:
    """Check that the files which a run was made from are there, and have not changed.

    Args:
        run: the run's folder or file.
        recorded: what its record holds.
        sources: where the files are now; None for those that are not there.

    Raises:
        UserError: naming the model or the data.
    """
    for name, path in sources.items():
        before = (recorded or {}).get(name)
        if before is None:
            continue
        if path is None:
            raise UserError(f"the {name} that {run} was made from is not there any more")
        found = _record(path)
        if found != before:
            changed = min(each for each in {*found, *before} if found.get(each) != before.get(each))
            raise UserError(
                f"the {name} has changed since {run} was made: {path} ({changed}); it cannot be "
                "repeated"
            )
