"""Recipes: the settings that decide what a preset learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nope_probe.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings that decide what a preset learns, except RoPE; both twins share a recipe.

    Attributes:
        batch_tokens: tokens per optimiser step, over all processes.
        micro_batch: the largest number of sequences per process and forward pass.
        threads: torch threads, fixed for reproducible runs on a CPU; None leaves the default.
    """

    size: Literal["tiny", "1.5b"]
    data: str
    tokenizer: str
    seq_len: int
    batch_tokens: int
    micro_batch: int
    steps: int
    learning_rate: float
    warmup: int
    min_lr: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    bf16: bool = False
    threads: int | None = None


RECIPES: dict[str, Recipe] = {
    # 10.2M tokens, four passes over the library: 20 to 30 minutes on one core.
    "tiny": Recipe(
        size="tiny",
        data="stdlib",
        tokenizer="byte-level BPE of 2,048 trained on the same text",
        seq_len=128,
        batch_tokens=16 * 128,
        micro_batch=16,
        steps=5000,
        learning_rate=3e-3,
        warmup=100,
        threads=1,
    ),
    # Section 4.2 of the paper: 20B tokens of FineWeb-Edu, 1M a batch, context 1024.
    "1.5b": Recipe(
        size="1.5b",
        data="HuggingFaceFW/fineweb-edu",
        tokenizer="meta-llama/Llama-3.1-8B",
        seq_len=1024,
        batch_tokens=1024 * 1024,
        micro_batch=8,
        steps=19_074,
        learning_rate=3e-4,
        warmup=1000,
        bf16=True,
    ),
}


def split_batch(recipe: Recipe, n_processes: int) -> tuple[int, int]:
    """Return the sequences of a forward pass, and how many passes a process makes in a step.

    Together the processes take exactly the recipe's tokens.

    Example:
        >>> split_batch(RECIPES["tiny"], 1), split_batch(RECIPES["tiny"], 4)
        ((16, 1), (4, 1))

    Raises:
        UserError: if the processes cannot share the sequences equally.
    """
    n_seqs = recipe.batch_tokens // recipe.seq_len
    if n_seqs % n_processes:
        raise UserError(
            f"the {n_seqs} sequences of a step cannot be shared equally by {n_processes} processes"
        )
    own = n_seqs // n_processes
    size = max(size for size in range(1, recipe.micro_batch + 1) if own % size == 0)
    return size, own // size
