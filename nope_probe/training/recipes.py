"""Recipes: the settings that decide what a preset learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings that decide what a preset learns, except RoPE: both twins share them.

    Attributes:
        batch_tokens: tokens per optimiser step, over all processes.
        micro_batch: sequences per process and forward pass.
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
