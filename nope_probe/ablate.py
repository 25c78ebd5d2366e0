"""Attribute the positional attention pattern to mask, RoPE and weights."""

from nope_probe.cli import command
from nope_probe.studies.ablate import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
