"""Compare what `trace` captures with a plain forward pass: python benchmarks/positions.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import llama
import tyro
from llama import plain_model, plain_pass
from rounds import interleaved_times, ratios
from rows import Row, row, show

from nope_probe.hooks.reading.readers import capture_positions

SIZES = llama.Settings(n_kv_heads=4, n_seqs=32, batch_size=8, seq_len=256)
AGAINST = "plain SDPA passes over the data, 4 layers, 256 tokens"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare what heads, or whole layers, bring to 4 readers with a plain forward pass."""

    rounds: int = 3
    json: bool = False
    """Print the rows as JSON."""


def main(settings: Settings) -> None:
    show(times(settings.rounds), as_json=settings.json)


def times(rounds: int) -> list[Row]:
    """Return each way's time over the plain passes'."""
    model, plain, tokens = (
        llama.build(SIZES),
        plain_model(SIZES, "sdpa"),
        llama.tokens_of(SIZES),
    )

    def plain_passes() -> None:
        for batch in tokens.split(SIZES.batch_size):
            plain_pass(plain, batch)

    ways: dict[str, Callable[[], object]] = {
        "plain": plain_passes,
        "writers: heads and MLPs": lambda: capture_positions(model, tokens, batch_size=8),
        "writers: layers": lambda: capture_positions(model, tokens, writers="layers", batch_size=8),
    }
    found = interleaved_times(ways, rounds)
    return [
        row(
            name,
            ratios(found, name, "plain"),
            "times their time",
            against=AGAINST,
            goal="at most 3" if "heads" in name else "",
        )
        for name in ways
        if name != "plain"
    ]


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
