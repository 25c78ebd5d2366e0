"""Time the conditions of the default ablate run against fused forward passes, side by side.

    python benchmarks/ablate.py [--model rope-tiny] [--n-seqs 512]
    python benchmarks/ablate.py --model random --seq-len 1024 --n-seqs 4 --batch-size 4

Each condition stands between two passes of the same model in transformers, with SDPA, to the
logits, so that a busy machine slows both; the ratio is the result. `random` is a model of 4 layers,
d_model 1024, 16 heads and 4 key heads.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from capture import Settings as Sizes
from capture import build, tokens_of
from fused import plain_model

from nope_probe import load, sequences
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.ablation.conditions import CaptureOptions, ConditionRunner
from nope_probe.experiments.ablation.plan import make_plan
from nope_probe.hooks.calibration import calibrate
from nope_probe.hooks.components import components
from nope_probe.runtime.checkpoint import RunCheckpoint


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which model, on how many sequences."""

    model: str = "rope-tiny"
    n_seqs: int = 512
    seq_len: int = 64
    batch_size: int = 32


def main(settings: Settings) -> None:
    model, fused, data = random(settings) if settings.model == "random" else shipped(settings)
    tokens = data.inputs
    base = peak_memory()
    options = CaptureOptions(n_layers=model.cfg.n_layers, batch_size=settings.batch_size)
    plan = make_plan(components(model), None)
    gains = calibrate(model, tokens, batch_size=settings.batch_size)

    def plain() -> None:
        with torch.inference_mode():
            for start in range(0, len(tokens), settings.batch_size):
                fused(tokens[start : start + settings.batch_size])

    plain()
    ratios = {}
    for index, condition in enumerate(plan.conditions):
        before = seconds(plain)
        runner = ConditionRunner(model, plan, options, RunCheckpoint())
        ours = seconds(lambda c=condition, r=runner, i=index: r.condition(str(i), data, c, gains))
        ratios[condition] = 2 * ours / (before + seconds(plain))
    slowest = max(ratios, key=ratios.__getitem__)
    print(f"{len(ratios)} conditions of {len(tokens)} sequences of {settings.seq_len} tokens")
    print(f"one fused forward pass over them: {seconds(plain):.2f} s")
    each = sorted(ratios.values())
    print(f"they take {statistics.mean(each):.2f} fused passes each on average,")
    print(f"  from {each[0]:.2f} to {each[-1]:.2f}, {statistics.median(each):.2f} at the median,")
    print(f"  {ratios[frozenset()]:.2f} the intact model,")
    print(f"  {ratios[slowest]:.2f} the slowest: without {' '.join(sorted(slowest))}")
    print(f"peak memory {peak_memory():.0f} MB, of which {base:.0f} MB before the first condition")


def shipped(settings: Settings) -> tuple[Any, Any, Sequences]:
    """Return a shipped model, the same in transformers, and sequences."""
    from transformers import AutoModelForCausalLM

    loaded = load(settings.model)
    folder = Path(sys.modules["nope_probe"].__path__[0], "checkpoints", settings.model)
    fused = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    n_seqs, n_pos = settings.n_seqs, settings.seq_len
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=n_seqs, seq_len=n_pos)
    return loaded.model, fused, data


def random(settings: Settings) -> tuple[Any, Any, Sequences]:
    """Return a random model, one of the same sizes in transformers, and random tokens."""
    sizes = Sizes(n_kv_heads=4, seq_len=settings.seq_len, n_seqs=settings.n_seqs)
    data = Sequences(inputs=tokens_of(sizes), name="random")
    return build(sizes), plain_model(sizes, "sdpa"), data


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(tyro.cli(Settings))
