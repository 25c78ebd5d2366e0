"""Time the score maps of a deep model's first layers against the paper's way, and a factorial.

    python benchmarks/first_layers.py [--n-layers 32] [--mapped 4] [--d-model 256] [--seq-len 512]

Each round runs all ways in one process, so that a busy machine slows all; ratios are to the plain
pass of the same round: the same model in transformers, with SDPA, all layers and logits. The
paper's way keeps all attention weights of all layers (eager, `output_attentions`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import tyro
from capture import Settings as Sizes
from capture import build, tokens_of
from fused import plain_model, plain_pass

from nope_probe import capture_scores


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How large the model and the data are."""

    n_layers: int = 32
    mapped: int = 4
    d_model: int = 256
    seq_len: int = 512
    n_seqs: int = 4
    rounds: int = 5


def main(settings: Settings) -> None:
    sizes = sizes_of(settings)
    tokens = tokens_of(sizes)
    deep = build(sizes)
    plains = {way: plain_model(sizes, way) for way in ("sdpa", "eager")}
    layers = range(settings.mapped)
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: plain_pass(plains["sdpa"], tokens),
        "the paper's": lambda: plain_pass(plains["eager"], tokens),
        "first layers": lambda: capture_scores(deep, tokens, layers=layers, n_folds=4),
        "each head too": lambda: capture_scores(
            deep, tokens, layers=layers, n_folds=4, per_head=True
        ),
    }
    times = rounds_of(ways, settings.rounds)
    print(f"{settings.mapped} of {settings.n_layers} layers, {settings.seq_len} tokens")
    for name, each in times.items():
        print(f"{name:14} {ratio(each, times['plain'])} plain passes")
    speedup = ratio(times["the paper's"], times["first layers"])
    print(f"the paper's way takes {speedup} times as long as the first layers")


def sizes_of(settings: Settings) -> Sizes:
    """Return the sizes of the model, of head size 32 or more."""
    n_heads = max(1, settings.d_model // 32)
    return Sizes(
        n_layers=settings.n_layers,
        d_model=settings.d_model,
        n_heads=n_heads,
        n_kv_heads=max(1, n_heads // 4),
        d_mlp=settings.d_model * 11 // 4,
        seq_len=settings.seq_len,
        n_seqs=settings.n_seqs,
        batch_size=settings.n_seqs,
    )


def rounds_of(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round; a first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if index:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median of the rounds' ratios, and the least and largest."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


if __name__ == "__main__":
    torch.manual_seed(0)
    main(tyro.cli(Settings))
