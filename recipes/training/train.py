"""Train the paper's NoPE model or its RoPE twin, tiny or at 1.5B."""

from __future__ import annotations

import sys

from nope_probe.cli import one_line_errors, parse
from nope_probe.errors import printable
from nope_probe.run.processes import is_first_process, status
from presets import Settings


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, _ = parse(Settings)
        settings.validate()
        with status("loading torch"):
            import training_run
        folder = training_run.run(settings)
        if is_first_process():
            lines = training_run.closing(settings, folder)
            sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
