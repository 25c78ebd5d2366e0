"""Find what each layer of a model does about position, by intervening on one short batch."""

from __future__ import annotations

from nope_probe.cli import VERBOSE, module_of, one_line_errors, parse_with
from nope_probe.errors import UserError
from nope_probe.studies.layers.settings import Settings

EXAMPLES = (
    "--model rope-tiny",
    "--model smollm3-3b --layers 12 --expect no_rope_layers=3,7,11",
)


def main() -> None:
    """Run the command line; exit with code 1 if an expectation is not met."""
    with one_line_errors():
        settings, shown = parse_with(Settings, EXAMPLES, VERBOSE)
        settings.validate()
        if settings.json and shown["verbose"]:
            raise UserError("--verbose has no effect with --json, which holds all findings")
        module_of(Settings, "study").run_and_show(settings, **shown)


if __name__ == "__main__":
    main()
