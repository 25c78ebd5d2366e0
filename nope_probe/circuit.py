"""Follow one block, stage by stage, to the next block's scores."""

from nope_probe.cli import command
from nope_probe.studies.circuit import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
