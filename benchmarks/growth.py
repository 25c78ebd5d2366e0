"""How time and memory of capture grow with length and depth: python benchmarks/growth.py.

Random Llamas (d_model 256, 8 heads), captured next to a plain SDPA pass in one process;
peak memory above the loaded model in a process of its own. An exponent is the slope of the
logarithms, by least squares.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import llama
import numpy as np
import torch
import tyro
from llama import plain_model, plain_pass
from rounds import interleaved_times, peak_rise
from rows import Row, row, show

from nope_probe import capture_scores
from nope_probe.hooks.layers.hook_points import HookedModel

LENGTHS = (256, 512, 1024, 2048)
DEPTHS = (2, 4, 8)
SIZES = llama.Settings(d_model=256, n_heads=8, n_kv_heads=8, d_mlp=704, n_seqs=8, batch_size=8)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fit how capture's time and memory grow with sequence length and layers."""

    rounds: int = 3
    json: bool = False
    """Print the rows as JSON."""
    n_layers: int = 4
    seq_len: int = 512
    alone: bool = False
    """Print the memory at these sizes alone (used by this file itself)."""


def main(settings: Settings) -> None:
    if settings.alone:
        print(json.dumps(memory_of(settings.n_layers, settings.seq_len)))
        return
    by_length = [(settings.n_layers, length) for length in LENGTHS]
    by_depth = [(depth, settings.seq_len) for depth in DEPTHS]
    show(
        [
            *grown(f"{settings.n_layers} layers, {LENGTHS} tokens", by_length, LENGTHS, settings),
            *grown(f"{settings.seq_len} tokens, {DEPTHS} layers", by_depth, DEPTHS, settings),
        ],
        as_json=settings.json,
    )


def grown(
    name: str, sizes: Sequence[tuple[int, int]], along: Sequence[int], settings: Settings
) -> list[Row]:
    """Return each size's time and memory, and the exponents along them."""
    ways: dict[str, Callable[[], object]] = {}
    for size in sizes:
        model, tokens = made(*size)
        ways[f"capture {size}"] = partial(captured, model, tokens)
        ways[f"plain {size}"] = partial(plain_pass, plain_model(sizes_of(*size), "sdpa"), tokens)
    times = interleaved_times(ways, settings.rounds)
    memory = [alone(*size) for size in sizes]
    rows = []
    for (n_layers, length), rise in zip(sizes, memory, strict=True):
        size = f"capture, {n_layers} layers, {SIZES.n_seqs} × {length} tokens"
        rows.append(row(size, times[f"capture {n_layers, length}"], "s"))
        rows.append(row(size, [rise], "MB above the loaded model"))
    for way, what in (("capture", "time of capture"), ("plain", "time of a plain forward pass")):
        rounds = zip(*(times[f"{way} {size}"] for size in sizes), strict=True)
        slopes = [exponent(along, each) for each in rounds]
        rows.append(row(f"{what}, {name}", slopes, "is the exponent"))
    rows.append(row(f"memory of capture, {name}", [exponent(along, memory)], "is the exponent"))
    return rows


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of log(value) on log(size)."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def sizes_of(n_layers: int, seq_len: int) -> llama.Settings:
    return replace(SIZES, n_layers=n_layers, seq_len=seq_len)


def made(n_layers: int, seq_len: int) -> tuple[HookedModel, torch.Tensor]:
    sizes = sizes_of(n_layers, seq_len)
    return llama.build(sizes), llama.tokens_of(sizes)


def captured(model: HookedModel, tokens: torch.Tensor) -> None:
    capture_scores(model, tokens, batch_size=SIZES.batch_size)


def memory_of(n_layers: int, seq_len: int) -> float:
    model, tokens = made(n_layers, seq_len)
    captured(model, tokens[:, :8])  # what is allocated once
    return peak_rise(lambda: captured(model, tokens))[1]


def alone(n_layers: int, seq_len: int) -> float:
    flags = [f"--n-layers={n_layers}", f"--seq-len={seq_len}", "--alone"]
    command = [sys.executable, "-W", "ignore", __file__, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
