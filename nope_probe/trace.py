"""Trace who writes the position that each layer reads, without removing anything."""

from nope_probe.cli import command
from nope_probe.studies.trace import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
