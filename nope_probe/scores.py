"""Map a model's mean attention scores, whole or per head."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.scores.settings import Settings

EXAMPLES = ("--model nope-tiny --layers all", "--model qwen3-0.6b --per-head --seq-len 256")

main = partial(run_and_show, "scores", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
