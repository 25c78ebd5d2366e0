"""Capture of long sequences next to a plain SDPA pass: python benchmarks/long_sequences.py.

A random Llama (d_model 1024, 16 heads), at 8,192 tokens in 4 layers and at 32,768 in 2. Times
alternate in one process; peak memory above the loaded model is that of a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import llama
import torch
import tyro
from llama import plain_model, plain_pass
from rounds import interleaved_times, peak_rise, ratios
from rows import Row, row, show

from nope_probe import capture_scores

Way = Literal["capture", "plain"]
LONG, LONGER, FULL = 8192, 32768, 2048
SIZES = llama.Settings(n_seqs=1, batch_size=1)
FOLDS = 8  # of a sequence each


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure time and memory of long sequences."""

    rounds: int = 2
    quick: bool = False
    """Sequences of a quarter of the length: whether it works, not numbers to quote."""
    json: bool = False
    """Print the rows as JSON."""
    n_layers: int = 4
    seq_len: int = LONG
    alone: Way | None = None
    """Print the memory of one way at these sizes alone (used by this file itself)."""


def main(settings: Settings) -> None:
    sizes = replace(SIZES, n_layers=settings.n_layers, seq_len=settings.seq_len)
    if settings.alone is not None:
        print(json.dumps(memory_of(sizes, settings.alone)))
        return
    long, longer = (LONG // 4, LONGER // 4) if settings.quick else (LONG, LONGER)
    of_long = replace(SIZES, n_layers=4, seq_len=long)
    short, growing = (replace(SIZES, n_layers=2, seq_len=n) for n in (long, longer))
    rows = [*time_rows(of_long, settings.rounds), *memory_rows(of_long, "1,024 above plain")]
    rows += [*growth_rows(short, growing), *memory_rows(growing, "2,048 above the model")]
    show([*rows, error_row()], as_json=settings.json)


def time_rows(sizes: llama.Settings, rounds: int) -> list[Row]:
    """Return how long capture takes, in plain passes over the whole model."""
    times = interleaved_times(ways_of(sizes), rounds)
    work = f"capture of {sizes.seq_len:,} tokens, {sizes.n_layers} layers"
    measured = ratios(times, "capture", "plain")
    return [row(work, measured, "times its time", against="plain SDPA pass", goal="at most 1.1")]


def growth_rows(short: llama.Settings, long: llama.Settings) -> list[Row]:
    """Return by what capture's time grows with length, over what the plain pass's does."""
    growth = {}
    times = [interleaved_times(ways_of(sizes), 1, warm_up=False) for sizes in (short, long)]
    for way in ("capture", "plain"):
        growth[way] = times[1][way][0] / times[0][way][0]
    work = f"growth of capture's time from {short.seq_len:,} to {long.seq_len:,} tokens, 2 layers"
    value = growth["capture"] / growth["plain"]
    return [row(work, [value], "times its growth", against="plain SDPA pass", goal="at most 1")]


def memory_rows(sizes: llama.Settings, goal: str) -> list[Row]:
    """Return the peak memory of both ways above the loaded model."""
    rows = []
    for way in ("capture", "plain"):
        flags = [f"--n-layers={sizes.n_layers}", f"--seq-len={sizes.seq_len}", f"--alone={way}"]
        command = [sys.executable, "-W", "ignore", __file__, *flags]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        work = f"memory of the {way} pass, {sizes.seq_len:,} tokens, {sizes.n_layers} layers"
        value = float(json.loads(ended.stdout.splitlines()[-1]))
        rows.append(row(work, [value], "MB", goal=goal if way == "capture" else ""))
    return rows


def error_row() -> Row:
    """Return how far rows of a long run are from those of the full map, of the largest score."""
    sizes = replace(SIZES, n_layers=2, seq_len=FULL, d_model=256, d_mlp=704, n_seqs=8)
    model, tokens = llama.build(sizes), llama.tokens_of(sizes)
    whole = capture_scores(model, tokens, batch_size=1).mean
    some = capture_scores(model, tokens, batch_size=1, query_rows=512)
    expected = whole[:, some.query_positions]
    error = (some.mean - expected).abs().nan_to_num().max() / expected.abs().nan_to_num().max()
    work = f"largest difference of rows from those of the full map, {FULL:,} tokens"
    return row(work, [1e6 * float(error)], "millionths", goal="at most 1")


def ways_of(sizes: llama.Settings) -> dict[Way, partial[object]]:
    """Return capture on the bridge, and the plain model's pass, of the same tokens."""
    model, tokens = llama.build(sizes), llama.tokens_of(sizes)
    plain = plain_model(sizes, "sdpa")
    return {
        "capture": partial(capture_scores, model, tokens, batch_size=1),
        "plain": partial(plain_pass, plain, tokens),
    }


def memory_of(sizes: llama.Settings, way: Way) -> float:
    """Return the peak of one way above the loaded model, MB.

    Capture takes a sequence for every fold, of which there are fewer where a pass takes a minute.
    """
    n_folds = FOLDS if sizes.seq_len < LONGER else 2
    sizes = replace(sizes, n_seqs=n_folds if way == "capture" else 1)
    tokens = llama.tokens_of(sizes)
    if way == "plain":
        act = partial(plain_pass, plain_model(sizes, "sdpa"), tokens)
    else:
        act = partial(capture_scores, llama.build(sizes), tokens, batch_size=1)
    with torch.inference_mode():
        return peak_rise(act)[1]


if __name__ == "__main__":
    main(tyro.cli(Settings))
