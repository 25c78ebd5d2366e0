"""Find out what the heads at the top of an order do: remove RoPE, content or mask from them."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.heads import Settings

EXAMPLES = (
    "--model rope-tiny --k 1 4",
    "--model smollm2-135m --remove rope --k 1 5 --n-seqs 32 --seq-len 128",
)

main = partial(run_and_show, "heads", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
