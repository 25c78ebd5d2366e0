"""Time the conditions of the default ablate run against fused forward passes, side by side.

    python benchmarks/ablate.py [--model rope-tiny] [--n-seqs 512]
    python benchmarks/ablate.py --model random --seq-len 1024 --n-seqs 8 --batch-size 4 --every 7

Each condition stands between two passes of the same model in transformers, with SDPA, to the
logits, so that a busy machine slows both; the ratio is the result. `random` is a model of 4 layers,
d_model 1024, 16 heads and 4 key heads.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from llama import Settings as Sizes
from llama import build, plain_model, tokens_of
from rounds import seconds
from rows import row, show

from nope_probe import load, sequences
from nope_probe.data.sequences import Sequences
from nope_probe.hooks.removing.components import components
from nope_probe.studies import ablate
from nope_probe.studies.ablate_run import ablations_of, chosen
from nope_probe.studies.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which model, on how many sequences."""

    model: str = "rope-tiny"
    n_seqs: int = 512
    seq_len: int = 64
    batch_size: int = 32
    every: int = 1
    """Time every so many conditions: more than one where a condition takes long."""
    json: bool = False
    """Print the rows as JSON."""


def main(settings: Settings) -> None:
    model, fused, data = random(settings) if settings.model == "random" else shipped(settings)
    tokens = data.inputs
    default = ablate.Settings()
    sources, removed, _ = chosen(components(model), default)
    ablations = ablations_of(sources, removed, default)
    engine = Engine(model=model, inputs=tokens, batch_size=settings.batch_size)
    engine = engine.calibrated("gains", ablations)
    plain = partial(fused_passes, fused, tokens.split(settings.batch_size))
    plain()
    ratios = []
    for ablation in ablations[:: settings.every]:
        before = seconds(plain)
        ours = seconds(partial(engine.scores, "score", ablation))
        ratios.append(2 * ours / (before + seconds(plain)))
    sizes = f"{len(tokens)} × {settings.seq_len} tokens"
    work = f"a condition of ablate (mean of {len(ratios)}), {settings.model}, {sizes}"
    mean = row(
        work,
        [sum(ratios) / len(ratios)],
        "times its time",
        against="a fused pass to the logits",
        goal="at most 0.7",
    )
    show([replace(mean, low=min(ratios), high=max(ratios))], as_json=settings.json)


def fused_passes(fused: Any, batches: tuple[torch.Tensor, ...]) -> None:
    with torch.inference_mode():
        for batch in batches:
            fused(batch)


def shipped(settings: Settings) -> tuple[Any, Any, Sequences]:
    """Return a shipped model, the same in transformers, and sequences."""
    from transformers import AutoModelForCausalLM

    loaded = load(settings.model)
    folder = Path(sys.modules["nope_probe"].__path__[0], "checkpoints", settings.model)
    fused = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=loaded.model.cfg.dtype
    ).eval()
    n_seqs, n_pos = settings.n_seqs, settings.seq_len
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=n_seqs, seq_len=n_pos)
    return loaded.model, fused, data


def random(settings: Settings) -> tuple[Any, Any, Sequences]:
    """Return a random model, one of the same sizes in transformers, and random tokens."""
    sizes = Sizes(n_kv_heads=4, seq_len=settings.seq_len, n_seqs=settings.n_seqs)
    data = Sequences(inputs=tokens_of(sizes), name="random")
    return build(sizes), plain_model(sizes, "sdpa"), data


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
