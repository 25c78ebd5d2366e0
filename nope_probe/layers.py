"""Find what each layer of a model does about position, by intervening on one short batch."""

from __future__ import annotations

import sys

from nope_probe.cli import one_line_errors, parse
from nope_probe.errors import printable
from nope_probe.experiments.layers.run import Settings, as_json, print_report, run

EXAMPLES = (
    "--model rope-tiny",
    "--model smollm3-3b --layers 12 --expect no_rope_layers=3,7,11",
)


def main() -> None:
    """Run the command line; exit with code 1 if an expectation is not met."""
    with one_line_errors():
        settings = parse(Settings, EXAMPLES)
        report = run(settings)
        if settings.json:
            sys.stdout.write(as_json(report, settings) + "\n")
        else:
            print_report(report)
        if report.unmet:
            sys.stderr.write("".join(f"{printable(line)}\n" for line in report.unmet))
            sys.exit(1)


if __name__ == "__main__":
    main()
