"""Map a model's mean attention scores, whole or per head, with errors and pattern measures."""

from __future__ import annotations

from nope_probe.command import run_command
from nope_probe.scores_run import Settings, run


def main() -> None:
    """Run the command line."""
    run_command(Settings, run)


if __name__ == "__main__":
    main()
