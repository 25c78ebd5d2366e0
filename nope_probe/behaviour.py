"""Measure what a model can no longer do without mask, RoPE or weights."""

from nope_probe.cli import command
from nope_probe.studies.behaviour import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
