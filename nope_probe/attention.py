"""Split each head's attention into position, the same in every text, and content."""

from nope_probe.cli import command
from nope_probe.studies.attention import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
