"""Train the paper's NoPE model or its RoPE twin, tiny or at 1.5B, into a Hugging Face folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nope_probe.command import run_command
from nope_probe.errors import UserError

PresetName = Literal["nope-tiny", "rope-tiny", "nope-1.5b", "rope-1.5b"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a preset learns, but RoPE: both twins share it.

    Attributes:
        batch_tokens: tokens per optimiser step, over all processes.
        micro_batch: sequences per process and forward pass.
        threads: torch threads (a fixed number makes a CPU run reproducible); None leaves them.
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train the paper's NoPE model or its RoPE twin, and write a Hugging Face folder.

    The tiny presets train on the text of this Python's standard library, in about half an hour on
    one core. The 1.5B presets stream FineWeb-Edu and want GPUs: start them with
    `accelerate launch` or `torchrun`, whose settings (FSDP, precision) Trainer takes over.
    """

    preset: Annotated[PresetName, tyro.conf.arg(help="Which model to train.")]
    out: Annotated[Path | None, tyro.conf.arg(help="Folder to write [runs/train-PRESET].")] = None
    steps: Annotated[int | None, tyro.conf.arg(help="Stop early; the recipe's by default.")] = None
    seed: Annotated[int, tyro.conf.arg(help="Seed of weights and data order.")] = 0
    resume: Annotated[bool, tyro.conf.arg(help="Go on from the newest checkpoint in OUT.")] = False


def main() -> None:
    """Run the command line."""
    run_command(Settings, train)


def train(settings: Settings) -> None:
    """Train a preset and save weights, tokenizer, model card, dynamics and held-out loss."""
    from nope_probe.configured import smollm3_config
    from nope_probe.training import corpus_of, evaluate, make_trainer, save, tokenizer_of

    name, size = settings.preset, settings.preset.split("-")[1]
    recipe = RECIPES[size]
    out = settings.out or Path("runs") / f"train-{name}"
    if out.is_file():
        raise UserError(f"--out {out} is a file")
    if settings.steps is not None and settings.steps < 1:
        raise UserError(f"expected at least 1 step, got {settings.steps}")
    _fix_randomness(settings.seed, recipe.threads)
    tokenizer = tokenizer_of(recipe)
    corpus = corpus_of(recipe, tokenizer, settings.seed)
    trainer = make_trainer(
        smollm3_config(recipe.size, rope=name.startswith("rope")),
        tokenizer,
        corpus,
        recipe,
        out=out,
        steps=settings.steps or recipe.steps,
        seed=settings.seed,
    )
    trainer.train(resume_from_checkpoint=settings.resume or None)
    save(trainer, tokenizer, out, name=name, recipe=asdict(recipe), losses=evaluate(trainer))


def _fix_randomness(seed: int, threads: int | None) -> None:
    import torch
    from transformers import set_seed

    if threads is not None:
        torch.set_num_threads(threads)
    set_seed(seed)


if __name__ == "__main__":
    main()
