"""Compare finished runs of one command: every number that they share, with intervals and tests."""

from nope_probe.cli import command
from nope_probe.studies.compare import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
