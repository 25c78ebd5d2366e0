"""Time the score maps of a deep model's first layers against the paper's way.

    python benchmarks/first_layers.py [--n-layers 32] [--mapped 4] [--d-model 256] [--seq-len 512]

Each round runs all ways in one process, so that a busy machine slows all; ratios are to the plain
pass of the same round: the same model in transformers, with SDPA, all layers and logits. The
paper's way keeps all attention weights of all layers (eager, `output_attentions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from llama import Settings as Sizes
from llama import build, plain_model, plain_pass, tokens_of
from rounds import interleaved_times, ratios
from rows import row, show

from nope_probe import capture_scores


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare maps of a deep model's first layers with the paper's way, which runs them all."""

    n_layers: int = 32
    mapped: int = 4
    d_model: int = 256
    seq_len: int = 512
    n_seqs: int = 4
    rounds: int = 5
    json: bool = False
    """Print the rows as JSON."""


def main(settings: Settings) -> None:
    sizes = sizes_of(settings)
    tokens = tokens_of(sizes)
    deep = build(sizes)
    plains = {way: plain_model(sizes, way) for way in ("sdpa", "eager")}
    layers = range(settings.mapped)
    first = f"maps of the first {settings.mapped} layers of {settings.n_layers}"
    per_head = f"{first}, of each head too"
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: plain_pass(plains["sdpa"], tokens),
        "paper": lambda: plain_pass(plains["eager"], tokens),
        first: lambda: capture_scores(deep, tokens, layers=layers, n_folds=4),
        per_head: lambda: capture_scores(deep, tokens, layers=layers, n_folds=4, per_head=True),
    }
    times = interleaved_times(ways, settings.rounds)
    against = f"a plain SDPA pass, {settings.n_layers} layers, {settings.seq_len} tokens"
    rows = [
        row(name, ratios(times, name, "plain"), "times its time", against=against)
        for name in (first, per_head)
    ]
    paper = "the paper's way, all layers (eager, all attention weights)"
    gains = ratios(times, "paper", first)
    rows.append(row(first, gains, "times less time", against=paper, goal="at least 16"))
    show(rows, as_json=settings.json)


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


if __name__ == "__main__":
    torch.manual_seed(0)
    main(tyro.cli(Settings, description=__doc__))
