"""Where a command writes: tested before it computes anything, and left as it was.

A path that exists is not enough: a name may be too long, a link may lead nowhere, and `/proc` has
permissions that say yes where nothing can be made. So a folder of a long name is made and removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from nope_probe.errors import UserError
from nope_probe.files import validate_regular

IMAGE_ENDINGS = (".png", ".svg")
NO_KALEIDO = "images need kaleido: pip install 'nope-probe[export]'"
NO_BROWSER = (
    "images need Chrome or Chromium, which could not be started: install it, or set BROWSER_PATH "
    "to its path"
)
NAME_MAX, PATH_MAX = 255, 4096  # bytes, on the file systems of today
LONGEST_FILE = 160  # bytes of the longest path in a run's folder
_LONGEST_SUFFIX = ".unfinished.writable"  # of the hidden folders beside a run's own


def output_folder(out: Path) -> Path:
    """Return the folder that `--out` names: for a link, `.` or a path that ends in `..`, which.

    Example:
        >>> output_folder(Path("runs/one")).as_posix()
        'runs/one'
    """
    leads_elsewhere = os.path.islink(out) or out.name in ("", "..")
    return Path(os.path.realpath(out)) if leads_elsewhere else out


def validate_folder_place(out: Path) -> None:
    """Check that a run's folder can be made at a path, or is there and empty.

    Raises:
        UserError: for a path at which no folder can be made, or one that cannot be replaced by the
            finished run: a file, a mount point or the working directory.
    """
    try:
        validate_name(out)
        if out.exists() and not out.is_dir():
            raise UserError(f"cannot write to {out}: it is a file")
        if out.exists() and (out.samefile(Path.cwd()) or os.path.ismount(out)):
            raise UserError(f"cannot write to {out}: it is in use; name a new folder in it")
        _make_and_remove(out)
    except OSError as error:
        raise UserError(f"cannot write to {shortened(out)}: {error.strerror}") from error


def validate_image_place(path: Path, out: Path | None = None) -> None:
    """Check that an image can be drawn into a file at a path.

    Args:
        path: the file; one that is there is overwritten.
        out: the run's folder, if it was named.

    Raises:
        UserError: for an ending other than .png or .svg, a path at which no file can be written, or
            a machine without kaleido or Chrome.
    """
    if path.suffix not in IMAGE_ENDINGS:
        endings = " or ".join(IMAGE_ENDINGS)
        raise UserError(f"cannot draw {path}: expected a name that ends in {endings}")
    if out is not None and path.absolute() == out.absolute():
        raise UserError(f"--image and --out are both {path}")
    validate_browser()
    try:
        validate_name(path)
        if path.is_dir():
            raise UserError(f"cannot draw {path}: it is a folder")
        validate_regular(path)
        if path.exists():
            path.open("ab").close()
        else:
            _make_and_remove(path)
    except OSError as error:
        raise UserError(f"cannot draw {shortened(path)}: {error.strerror}") from error


def validate_browser() -> None:
    """Check that kaleido is installed, and finds a browser.

    Raises:
        UserError: saying what to install.
    """
    if find_spec("kaleido") is None:
        raise UserError(NO_KALEIDO)
    from choreographer.browsers.chromium import Chromium  # kaleido's own way to find one

    browser = Chromium.find_browser(skip_local=False)
    if browser is None or not Path(browser).is_file():
        raise UserError(NO_BROWSER)


def validate_name(path: Path) -> None:
    """Check what is wrong with a path whatever is there.

    Raises:
        UserError: for a name that is too long or no text.
    """
    absolute = path.absolute()
    try:
        sizes = [len(part.encode()) for part in absolute.parts]
    except UnicodeEncodeError as error:
        raise UserError(f"cannot write to {path}: its name is no UTF-8 text") from error
    too_long = sum(sizes) + len(sizes) + LONGEST_FILE > PATH_MAX or max(sizes) > NAME_MAX
    if too_long or sizes[-1] + len(f".{_LONGEST_SUFFIX}") > NAME_MAX:
        raise UserError(f"cannot write to {shortened(path)}: its name is too long")


def _make_and_remove(path: Path) -> None:
    """Make a hidden folder in the nearest folder above a path, and remove it.

    One that a killed process left is taken over, and so removed too.

    Raises:
        UserError: if that is a file, or a link that leads nowhere is in the way.
        OSError: if it cannot be made.
    """
    above = path.absolute()
    for above in path.absolute().parents:
        if above.exists():
            break
    missing = [each for each in (path.absolute(), *path.absolute().parents) if not each.exists()]
    for each in missing:
        if each.is_symlink():
            raise UserError(f"cannot write to {path}: {each} is a link that leads nowhere")
    if not above.is_dir():
        raise UserError(f"cannot write to {path}: {above} is a file")
    tested = above / f".{path.name}{_LONGEST_SUFFIX}"
    tested.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):  # removed by another process that tests the same place
        tested.rmdir()


def shortened(path: Path) -> str:
    """Return a path as a line can hold it."""
    text = str(path)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"
