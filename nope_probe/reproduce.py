"""Run one of the paper's figures, and check the paper's claims about it."""

from __future__ import annotations

import sys

from nope_probe.cli import one_line_errors, parse
from nope_probe.experiments.paper.run import Settings, run
from nope_probe.runtime.distributed import is_first_process

EXAMPLES = (
    "figure2",
    "figure5 --model rope-tiny --seq-len 64 --data shipped",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        lines = run(parse(Settings, EXAMPLES))
        if is_first_process():
            sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
