"""The identity of the run in a training folder, and its whole checkpoints."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nope_probe.errors import StorageError, UserError
from nope_probe.files import JsonObject, file_checksum, json_checksum, read_json, write_json

# torch.save reports a failure to write as a RuntimeError of its zip writer.
_TORCH_SAVE = re.compile("PytorchStreamWriter|inline_container")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RUN = "run.json"
OWN_FILES = (_RUN, f".{_RUN}.partial")  # left by a training killed before its first checkpoint
_WHOLE = "checksums.json"  # written last into a checkpoint
FINISHED = "training.json"  # written last into the folder of a trained model


def write_identity(out: Path, about: JsonObject) -> None:
    """Write the identity of a run into its folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / _RUN, about)


def validate_same_training(out: Path, about: JsonObject) -> None:
    """Check that the folder of a run to resume holds this run.

    Raises:
        UserError: naming the settings that differ.
    """
    if not (out / _RUN).is_file():
        what = "checkpoints of an unknown run" if any(out.glob("checkpoint-*")) else "no checkpoint"
        raise UserError(f"--resume: {out} holds {what}")
    try:
        recorded = read_json(out / _RUN)
        other = [name for name, value in about.items() if recorded.get(name) != value]
    except (ValueError, AttributeError) as error:
        raise UserError(f"{out / _RUN} is broken; remove {out} and train again") from error
    if other:
        given = ", ".join(f"{name} {recorded.get(name)}" for name in other if name != "recipe")
        raise UserError(
            f"--resume: {out} holds a run with another {' and '.join(other)}"
            f"{f' ({given})' if given else ''}; choose another --out"
        )


def mark_whole(checkpoint: Path, about: JsonObject) -> None:
    """Write the checksums of a checkpoint's files, and the run's identity, into it."""
    write_json(checkpoint / _WHOLE, _record(checkpoint, about))


def newest_whole(out: Path, about: JsonObject) -> Path | None:
    """Return a run's newest whole checkpoint; None without a whole checkpoint.

    A checkpoint that a killed process left half-written has no checksums and is passed over.

    Raises:
        UserError: for a checkpoint whose files have changed, or that belongs to another run.
    """
    whole = [path for path in out.glob("checkpoint-*") if (path / _WHOLE).is_file()]
    if not whole:
        return None
    newest = max(whole, key=step_of)
    try:
        record = read_json(newest / _WHOLE)
    except ValueError:
        record = None
    if record != _record(newest, about):
        raise UserError(f"{newest} is not the checkpoint that this run wrote; remove it")
    return newest


@contextmanager
def full_disk_is_one_line(out: Path) -> Iterator[None]:
    """Turn a failure to write into one line, and remove the half-written checkpoint.

    Raises:
        StorageError: naming the cause; whole checkpoints stay.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _TORCH_SAVE.search(str(error)):
            raise
        if isinstance(error, OSError) and error.errno not in _FULL:
            raise
        for path in out.glob("checkpoint-*"):
            if not (path / _WHOLE).is_file():
                shutil.rmtree(path, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"cannot write to {out}: {reason}; whole checkpoints are kept for --resume"
        ) from error


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was written; -1 for another name."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def _record(checkpoint: Path, about: JsonObject) -> JsonObject:
    """Return the record of a checkpoint: checksums of its files, and the run's identity."""
    files = {
        path.relative_to(checkpoint).as_posix(): file_checksum(path)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != _WHOLE
    }
    return {"run": json_checksum(about), "step": step_of(checkpoint), "files": files}
