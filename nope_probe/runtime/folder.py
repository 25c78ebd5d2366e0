"""A run on disk: its place, its arrays, tables and page, and a manifest with their checksums.

A place is for one process at a time, and checks before a run leave it as it was. A run appears
whole or not at all: it is written into a hidden folder beside its own and renamed, the manifest
last. Reading needs neither torch nor TransformerLens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open

from nope_probe.errors import StorageError, UserError
from nope_probe.files import (
    NO_BROWSER,
    local_path,
    read_json,
    validate_image_name,
    validate_kaleido,
)
from nope_probe.runtime.identity import file_checksum, json_checksum

if TYPE_CHECKING:  # importing pandas takes half a second
    import numpy as np
    import pandas as pd
    from jaxtyping import Int

PAGE = "report.html"
_UNFINISHED = "<!-- nope_probe: the first page of an unfinished run -->\n"


def output_folder(out: Path) -> Path:
    """Return the folder that `--out` names: a link, `.` or a final `..` is resolved.

    Example:
        >>> output_folder(Path("runs/one")).as_posix()
        'runs/one'
    """
    leads_elsewhere = os.path.islink(out) or out.name in ("", "..")
    return Path(os.path.realpath(out)) if leads_elsewhere else out


def checkpoint_dir(out: Path) -> Path:
    """Return the hidden folder beside a run's own that holds it until it is finished."""
    return out.parent / f".{out.name}.unfinished"


def validate_folder_place(out: Path) -> None:
    """Check that a run's folder can be replaced by the finished run; `locked` makes its place.

    Raises:
        UserError: for a file, a mount point or the working directory.
    """
    if os.path.lexists(out) and not os.path.isdir(out):
        what = "file" if os.path.exists(out) else "link that leads nowhere"
        raise UserError(f"cannot write to {out}: it is a {what}")
    if os.path.isdir(out) and (out.samefile(Path.cwd()) or os.path.ismount(out)):
        raise UserError(f"cannot write to {out}: it is in use; name a new folder in it")


def validate_image_place(path: Path) -> None:
    """Check that an image can be drawn, before anything is computed for it.

    Raises:
        UserError: unless it ends in .pdf, .png or .svg, or without kaleido or Chrome.
    """
    validate_image_name(path)
    validate_browser()


def validate_browser() -> None:
    """Check that kaleido is installed, and finds a browser.

    Raises:
        UserError: saying what to install.
    """
    validate_kaleido()
    from choreographer.browsers.chromium import Chromium  # kaleido's own way to find one

    browser = Chromium.find_browser(skip_local=False)
    if browser is None or not Path(browser).is_file():
        raise UserError(NO_BROWSER)


_MEMORY = Path("/proc/meminfo")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def validate_memory(n_bytes: int, lower: str) -> None:
    """Check that the memory that a run needs is free.

    Args:
        n_bytes: needed at one time.
        lower: which flags make it smaller.

    Raises:
        UserError: with the estimate and free memory.
    """
    memory = free_memory()
    if n_bytes > memory:
        raise UserError(
            f"this needs at least {decimal(n_bytes)} of memory, and "
            f"{decimal(memory)} are free; lower {lower}"
        )


def free_memory() -> int:
    """Return how much memory of the machine, or of the container, is free, in bytes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, KeyError):  # a system without this file
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
        kilobytes = dict(line.split(":") for line in lines)["MemAvailable"].removesuffix("kB")
        memory = 1024 * int(kilobytes)
    with suppress(OSError, ValueError):  # no container, or one without a limit
        memory = min(memory, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    return memory


LOCK, HOLDER = "lock", "process.txt"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process as long as the context lasts, and make it if need be.

    A lock left behind never blocks: the operating system releases the lock of any process that
    ends. An empty folder is removed at the end, with the folders above it that were made for it.

    Raises:
        UserError: if another process holds the folder (it is named), or it cannot be made.
    """
    made = [parent for parent in folder.parents if not os.path.isdir(parent)]
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"{_holder(folder)} is at work on the run in {folder}") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        (folder / HOLDER).write_text(
            f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8"
        )
        yield
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                for empty in (folder, *made):
                    empty.rmdir()
        lock.release()


def _holder(folder: Path) -> str:
    try:
        return (folder / HOLDER).read_text(encoding="utf-8")
    except OSError:
        return "another process"


def clear(folder: Path) -> None:
    """Remove everything in a locked folder but the lock."""
    for path in [path for path in folder.iterdir() if path.name not in (LOCK, HOLDER)]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    Attributes:
        manifest: command, settings, versions, and checksums of the files.
        arrays: per .safetensors file, without its ending, the named arrays (`maps`, `tokens`).
        tables: per .csv file, without its ending, the table.
        page: the report, as HTML.
        files: files that are moved into the run's folder under these names.
    """

    manifest: dict[str, Any]
    arrays: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    page: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def maps(self) -> Mapping[str, np.ndarray]:
        """The arrays of maps.safetensors."""
        return self.arrays["maps"]

    @property
    def query_positions(self) -> Int[np.ndarray, " row"] | None:
        """The queries of the maps' rows; None where maps have all rows."""
        queries = self.arrays.get("maps", {}).get("query_positions")
        return None if queries is None else queries.astype("int64")


def write_run(out: Path, run: Run) -> None:
    """Write a run into a folder that does not exist yet, or is empty.

    The process holds the run's unfinished folder, if others may write the run too. Remains of a
    killed process are removed.

    Raises:
        StorageError: if the folder holds something, or cannot be written to.
    """
    partial = checkpoint_dir(out) / "run"
    remove(partial)
    try:
        partial.mkdir(parents=True)
        _write_files(partial, run)
        remove_first_page(out)
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the run to {out}: {reason(error)}") from error
    finally:
        remove(partial)


def write_first_page(out: Path, page: str) -> None:
    """Write the page of an unfinished run, which the finished run replaces.

    Raises:
        StorageError: if it cannot be written.
    """
    partial = checkpoint_dir(out) / PAGE
    try:
        partial.write_text(_UNFINISHED + page, encoding="utf-8")
        out.mkdir(exist_ok=True)
        partial.replace(out / PAGE)
    except OSError as error:
        raise StorageError(f"cannot write {out / PAGE}: {reason(error)}") from error


def has_first_page(out: Path) -> bool:
    """Return whether a folder holds the page of an unfinished run, and nothing else."""
    if not os.path.isdir(out) or os.listdir(out) != [PAGE]:
        return False
    with (out / PAGE).open("rb") as file:
        return file.read(len(_UNFINISHED)) == _UNFINISHED.encode()


def remove_first_page(out: Path) -> None:
    """Remove the page of an unfinished run, and its folder, if they are there."""
    if has_first_page(out):
        (out / PAGE).unlink()
        out.rmdir()


def _write_files(folder: Path, run: Run) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    for name, arrays in run.arrays.items():
        contiguous = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        save_file(contiguous, folder / f"{name}.safetensors")
    for name, table in run.tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.8g")
    (folder / PAGE).write_text(run.page, encoding="utf-8")
    for name, path in run.files.items():
        shutil.move(path, folder / name)
    for path in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
        shutil.copymode(folder / PAGE, path)
    checksums = {path.name: file_checksum(path) for path in sorted(folder.iterdir())}
    manifest = json.loads(json.dumps({**run.manifest, "checksums": checksums, "complete": True}))
    manifest["checksum"] = json_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a value as a JSON file, which appears complete."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def reason(error: Exception) -> str:
    """Return the operating system's reason why a file could not be written or read."""
    return getattr(error, "strerror", None) or str(error)


def check_output_dir(out: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a folder holds the finished run of these settings already, every file intact.

    Raises:
        UserError: if it holds something else or a file was changed, or it cannot be made.
    """
    if os.path.isfile(out / "manifest.json"):
        manifest = read_manifest(out)
        if manifest.get("settings") != json.loads(json.dumps(settings)):
            raise UserError(f"{out} holds a run with other settings; choose another --out")
        validate_files(out, manifest)
        return True
    if os.path.isdir(out) and os.listdir(out) and not has_first_page(out):
        raise UserError(f"{out} holds other files; choose another --out")
    validate_folder_place(out)
    return False


def read_manifest(out: Path) -> dict[str, Any]:
    """Read a run's manifest, and check that it is as the run wrote it.

    Raises:
        UserError: if no manifest can be read, or it was changed.
    """
    try:
        manifest = read_json(out / "manifest.json")
        rest = {name: value for name, value in manifest.items() if name != "checksum"}
    except FileNotFoundError as error:
        unfinished = f"the run in {out} is unfinished; run its command again to finish it"
        no_run = f"{out} holds no run: it has no manifest.json"
        raise UserError(unfinished if has_first_page(out) else no_run) from error
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{out} holds no run: its manifest cannot be read; remove {out} and run again"
        ) from error
    if "checksum" not in manifest:
        raise UserError(
            f"{out} holds a run of an older version, or an edited one; remove it and run again"
        )
    if manifest["checksum"] != json_checksum(rest):
        raise _not_as_written(out, "manifest.json")
    return manifest


def validate_files(out: Path, manifest: Mapping[str, Any]) -> None:
    """Check every file of a run against the checksum in its manifest.

    Raises:
        UserError: naming a file that differs.
    """
    for name, checksum in manifest["checksums"].items():
        if not (out / name).is_file() or file_checksum(out / name) != checksum:
            raise _not_as_written(out, name)


def _not_as_written(out: Path, name: str) -> UserError:
    return UserError(f"{out / name} is not the file that the run wrote; remove {out} and run again")


class StoredArrays(Mapping[str, "np.ndarray"]):
    """The arrays of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, framework="np") as file:
            self.names = list(file.keys())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise KeyError(name)
        with safe_open(self.path, framework="np") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def read_run(folder: Path | str) -> Run:
    """Read a finished run of any command: its tables and maps, without the model.

    The page and the fold maps stay on disk.

    Args:
        folder: the run's folder.

    Raises:
        UserError: if it is incomplete or a file is not the one that the manifest names.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> import pandas as pd
        >>> from nope_probe import read_run
        >>> from nope_probe.runtime.folder import Run, write_run
        >>> run = Run(
        ...     manifest={"settings": {}},
        ...     arrays={"maps": {"score": np.zeros((1, 5, 5))}},
        ...     tables={"pattern": pd.DataFrame({"layer": [0], "amplitude": [0.5]})},
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     write_run(Path(folder, "run"), run)
        ...     saved = read_run(Path(folder, "run"))
        >>> saved.tables["pattern"]["amplitude"].item(), saved.maps["score"].shape
        (0.5, (1, 5, 5))
    """
    from safetensors.numpy import load_file

    out = local_path(folder)
    manifest = read_manifest(out)
    validate_files(out, manifest)
    files = [out / name for name in sorted(manifest["checksums"])]
    arrays = [file for file in files if file.name in ("maps.safetensors", "tokens.safetensors")]
    return Run(
        manifest=manifest,
        arrays={file.stem: load_file(file) for file in arrays},
        tables={file.stem: read_table(file) for file in files if file.suffix == ".csv"},
    )


def read_table(path: Path) -> pd.DataFrame:
    """Read a run's table; a table without columns is empty."""
    import pandas as pd

    if path.stat().st_size <= 1:
        return pd.DataFrame()
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


def default_output_dir(command: str, subject: str, recorded: Mapping[str, Any]) -> Path:
    """Return the folder named after a run's command, its subject and the hash of its settings.

    Example:
        >>> default_output_dir("scores", "meta-llama/Llama-3.1-8B", {"seed": 0}).as_posix()
        'runs/scores-Llama-3.1-8B-de7d7744'
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(subject).name or subject).strip("-")
    settings = json.dumps(recorded, sort_keys=True, default=str)
    parts = (command, name, sha256(settings.encode()).hexdigest()[:8])
    return Path("runs") / "-".join(filter(None, parts))
