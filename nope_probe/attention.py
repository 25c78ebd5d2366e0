"""Split each head's attention into position, the same in every text, and content."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.attention import Settings

EXAMPLES = (
    "--model rope-tiny --text 'def area(width, height): return width * height'",
    "--model rope-tiny --remove rope",
)

main = partial(run_and_show, "attention", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
