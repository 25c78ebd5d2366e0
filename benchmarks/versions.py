"""The maps of one saved file of inputs with two versions of TransformerLens, side by side.

make versions                                        # both environments, then the table

.venv/bin/python benchmarks/versions.py write tl3.safetensors        # the same by hand
.venv-tl4/bin/python benchmarks/versions.py write tl4.safetensors
.venv/bin/python benchmarks/versions.py compare tl3.safetensors tl4.safetensors
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import tyro
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
BOUND = 1e-5


def write(out: Path, /) -> None:
    """Make the maps with the TransformerLens of this environment."""
    from ci.reference_maps import reference_maps

    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(reference_maps(), out, {"transformer-lens": version("transformer-lens")})


def compare(ours: Path, theirs: Path, /) -> None:
    """Print each map's largest difference, relative to its largest value; exit 1 above 1e-5."""
    from ci.reference_maps import differences

    versions = [safe_open(path, "pt").metadata()["transformer-lens"] for path in (ours, theirs)]
    found = differences(load_file(theirs), load_file(ours))
    for name in sorted(found, key=found.__getitem__, reverse=True):
        print(f"{found[name]:10.1e}  {name}")
    worst = max(found.values())
    print(
        f"TransformerLens {versions[0]} and {versions[1]}: {len(found)} maps, {worst:.1e} at most"
    )
    sys.exit(not worst <= BOUND)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"write": write, "compare": compare})
