"""Draw the pictures of docs/guide/gallery.md: python docs/make_gallery_images.py [NAME ...].

Each is the first figure of a command's page, as `--image` draws it (needs Chrome or Chromium). Runs
that are finished are shown again.
"""

import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parent / "images" / "gallery"
PAPER = Path(__file__).parents[1] / "recipes" / "paper"
COMMANDS = {
    "figure2": "reproduce figure2",
    "figure4": "reproduce figure4",
    "figure5": "reproduce figure5 --model smollm2-135m --data shipped --n-seqs 48 --seq-len 1024",
}


def main(*names: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name in names or COMMANDS:
        command, *arguments = COMMANDS[name].split()
        image = ["--image", str(OUT / f"{name}.png")]
        subprocess.run(
            [sys.executable, str(PAPER / f"{command}.py"), *arguments, *image], check=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
