"""Find out what the heads at the top of an order do: remove RoPE, content or mask from them."""

from nope_probe.cli import command
from nope_probe.studies.heads import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
