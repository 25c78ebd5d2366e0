"""Check the wheel and the sdist in a folder: what they hold, and that the wheel runs by itself.

The wheel is installed into an environment outside the checkout. Its dependencies are those of the
environment that runs this file (`--dependencies shared`), or are installed anew (`own`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from venv import EnvBuilder
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 10_000_000
NOT_CODE = (
    "py.typed",
    "checkpoints/heldout.jsonl",
    *(
        f"checkpoints/{model}/{file}"
        for model in ("nope-tiny", "rope-tiny")
        for file in ("config.json", "model.safetensors", "tokenizer.json", "training.json")
    ),
    "reports/headline.html",
    "reports/page.html",
    "reports/about.txt",
    "reports/notes.txt",
    "reports/texts.toml",
    "figures/columns.toml",
    "figures/names.toml",
    "figures/text_view.css",
    "figures/text_view.html",
    "figures/text_view.js",
)
SMALL = ["--layers", "2", "--n-seqs", "8", "--seq-len", "16", "--folds", "4", "--device", "cpu"]
RUNS = {
    "--help": ["nope-probe", "--help"],
    "ablate": ["nope-probe", "ablate", *SMALL, "--remove", "sources", "--out", "ablate"],
    "circuit --image": [
        *("nope-probe", "circuit", "--n-seqs", "8", "--seq-len", "16", "--folds", "4"),
        *("--device", "cpu", "--out", "circuit", "--image", "circuit.png"),
    ],
}


def main() -> None:
    """Check the one wheel and the one sdist of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dependencies", choices=("shared", "own"), default="shared")
    arguments = parser.parse_args()
    (wheel,) = arguments.folder.resolve().glob("*.whl")
    (sdist,) = arguments.folder.resolve().glob("*.tar.gz")
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as scratch:
        programs = install(wheel, Path(scratch, "venv"), shared=arguments.dependencies == "shared")
        check_extras(wheel, programs)
        check_runs(programs, Path(scratch))
    report(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, installed and run")


def check_contents(wheel: Path, sdist: Path) -> None:
    """Check the wheel's size, and that both hold every module and every file that is read."""
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    package = ROOT / "nope_probe"
    modules = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    expected = {f"nope_probe/{name}" for name in (*modules, *NOT_CODE)}
    with ZipFile(wheel) as archive:
        require(wheel, expected, set(archive.namelist()))
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        require(sdist, {*expected, "README.md", "LICENSE", "pyproject.toml"}, names)


def require(archive: Path, expected: set[str], found: set[str]) -> None:
    """Check that an archive holds all expected names."""
    if missing := sorted(expected - found):
        sys.exit(f"{archive.name} lacks {len(missing)} files, such as {missing[0]}")


def install(wheel: Path, environment: Path, *, shared: bool) -> Path:
    """Install the wheel into a new environment, and return the folder of its programs."""
    EnvBuilder(with_pip=True).create(environment)
    if shared:
        (site,) = environment.glob("lib/python*/site-packages")
        # A path in a .pth file; the .pth files at that path, an editable install's, are not read.
        (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    options = ["--no-deps", "--force-reinstall"] if shared else ["-c", str(constraints())]
    wanted = f"nope-probe[export] @ {wheel.as_uri()}"  # --image needs kaleido
    pip(environment / "bin", "install", "--quiet", *options, wanted)
    return environment / "bin"


def check_extras(wheel: Path, programs: Path) -> None:
    """Check that the wheel resolves with all of its extras."""
    wanted = f"nope-probe[dev,docs,export,gguf,notebooks] @ {wheel.as_uri()}"
    pip(programs, "install", "--quiet", "--dry-run", "-c", str(constraints()), wanted)


def check_runs(programs: Path, scratch: Path) -> None:
    """Run the installed commands outside the checkout."""
    code = "import nope_probe; print(nope_probe.__file__)"
    found = subprocess.check_output([programs / "python", "-c", code], cwd=scratch, text=True)
    if not Path(found.strip()).is_relative_to(programs.parent):
        sys.exit(f"nope_probe is imported from {found.strip()}, not from the wheel")
    for name, command in RUNS.items():
        done = subprocess.run(
            [programs / command[0], *command[1:]], cwd=scratch, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
        report(f"{name}: runs")
    for made in ("ablate/manifest.json", "circuit/report.html", "circuit.png"):
        if not (scratch / made).is_file():
            sys.exit(f"the runs left no {made}")


def constraints() -> Path:
    """Return the pinned versions of this environment's TransformerLens."""
    return ROOT / "constraints.txt"


def pip(programs: Path, *arguments: str) -> None:
    """Run pip of an environment."""
    subprocess.run([programs / "python", "-m", "pip", *arguments], check=True)


def report(line: str) -> None:
    """Write a line on stdout."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
