"""A finished run: whether it is the one that is asked for, and its files are as they were.

A run is shown again only where the files of its model and its data are the same.
Neither needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nope_probe.errors import UserError
from nope_probe.files import JsonObject, file_checksum, json_checksum, read_json
from nope_probe.run.flags import CommandSettings
from nope_probe.run.folder import check_output_dir
from nope_probe.run.manifest import FileRecord, read_manifest
from nope_probe.run.paths import checkpoint_dir, default_output_dir, output_folder, remove
from nope_probe.run.processes import print_line

# The bytes read of a source; size and time of change identify the files beyond.
LARGE = 1 << 30
_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_UNREAD = ("generation_config.json", "run.json")
# Who wrote a model's configuration, and where from, does not change its numbers.
UNUSED_IN_FILE = ("_name_or_path", "transformers_version")


def folder_of(settings: CommandSettings, recorded: JsonObject) -> Path:
    """Return the folder of a run.

    Args:
        settings: the command's.
        recorded: what identifies the run, as its manifest holds it.
    """
    if settings.out is None:
        return default_output_dir(settings.command, settings.subject, recorded)
    return output_folder(settings.out)


def finished_folder(settings: CommandSettings) -> Path | None:
    """Return the folder of a run that is finished, and say that it is shown again; or None.

    Args:
        settings: the command's, validated.

    Raises:
        UserError: for a folder that holds something else, or a source that changed since.
    """
    recorded = settings.recorded()
    folder = folder_of(settings, recorded)
    if not check_output_dir(folder, recorded):
        return None
    tell_finished(folder, settings.sources())
    return folder


def tell_finished(folder: Path, sources: Mapping[str, Path | None]) -> None:
    """Announce that a finished run is shown again, and remove what a killed process left of it.

    Args:
        folder: the run's.
        sources: where the files of its model and data are now.

    Raises:
        UserError: for a source that changed since.
    """
    manifest = read_manifest(folder)
    unknown = validate_unchanged(folder, manifest.sources, sources)
    # A process may have been killed after it wrote the run and before it cleaned up.
    remove(checkpoint_dir(folder))
    if unknown:
        what = f"{' and '.join(unknown)} changed since was not compared"
        print_line(f"the run in {folder} was finished before; whether its {what}")
    print_line(f"finished before, in {manifest.seconds:.0f} s: shown again from {folder}")


def record_sources(sources: Mapping[str, Path | None]) -> dict[str, FileRecord | None]:
    """Return the hashes of the files of each source; None for a source without files here.

    Raises:
        UserError: for a file that cannot be read.
    """
    return {name: None if path is None else _record(path) for name, path in sources.items()}


def _record(path: Path) -> FileRecord:
    """Return the hashes of a source's files, the smallest first, up to a gigabyte in all."""
    record, total = FileRecord(), 0
    try:
        stats = {file: file.stat() for file in _source_files(path)}
        for file, stat in sorted(stats.items(), key=lambda item: item[1].st_size):
            name = file.name if file == path else file.relative_to(path).as_posix()
            total += stat.st_size
            if total > LARGE:
                record[name] = {"size": stat.st_size, "modified": stat.st_mtime_ns}
            else:
                record[name] = {"sha256": _source_checksum(file)}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return record


def _source_files(path: Path) -> list[Path]:
    """Return the files at a path: the file itself, a model's, or all in a folder."""
    if path.is_file():
        return [path]
    if (path / "config.json").is_file():
        files = [file for pattern in _MODEL_FILES for file in path.glob(pattern)]
        return sorted(file for file in files if file.name not in _UNREAD)
    return sorted(file for file in path.rglob("*") if file.is_file())


def _source_checksum(path: Path) -> str:
    """Return the checksum of a file; of a configuration, only settings that change numbers."""
    if path.name == "config.json":
        with suppress(ValueError, AttributeError):  # loading the model says what is wrong with it
            config = read_json(path)
            return json_checksum({k: v for k, v in config.items() if k not in UNUSED_IN_FILE})
    return file_checksum(path)


def validate_unchanged(
    run: Path,
    recorded: Mapping[str, FileRecord | None] | None,
    sources: Mapping[str, Path | None],
) -> list[str]:
    """Check that a finished run's sources are unchanged, and return sources not compared.

    Args:
        run: the run's folder or file.
        recorded: its manifest's record; None if the manifest is older than such records.
        sources: where the sources are now.

    Raises:
        UserError: naming a file that differs.
    """
    unknown = []
    for name, now in record_sources(sources).items():
        before = (recorded or {}).get(name)
        if now is None or before is None:
            unknown.append(name)
            continue
        changed = [file for file in {*before, *now} if before.get(file) != now.get(file)]
        if changed:
            raise UserError(
                f"the {name} has changed since the run in {run}: {sources[name]} "
                f"({min(changed)}); choose another --out"
            )
    return unknown
