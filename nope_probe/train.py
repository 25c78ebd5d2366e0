"""Train the paper's NoPE model or its RoPE twin, tiny or at 1.5B."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse
from nope_probe.training.run import Settings, run

EXAMPLES = (
    "--preset nope-tiny",
    "--preset rope-tiny --steps 100 --out runs/short",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        run(parse(Settings, EXAMPLES))


if __name__ == "__main__":
    main()
