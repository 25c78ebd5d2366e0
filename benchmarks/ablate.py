"""Time the conditions of the default ablate run against plain forward passes, side by side.

    python benchmarks/ablate.py [--model rope-tiny] [--n-seqs 512]

Rounds alternate between the two, so that a busy machine slows both; the ratio is the result.
"""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro

from nope_probe import load, sequences
from nope_probe.experiments.ablation.conditions import CaptureOptions, ConditionRunner
from nope_probe.experiments.ablation.plan import make_plan
from nope_probe.hooks.calibration import calibrate
from nope_probe.hooks.components import components
from nope_probe.hooks.forward import run_forward
from nope_probe.runtime.checkpoint import RunCheckpoint


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which model, on how many sequences."""

    model: str = "rope-tiny"
    n_seqs: int = 512
    seq_len: int = 64
    batch_size: int = 32


def main(settings: Settings) -> None:
    loaded = load(settings.model)
    model = loaded.model
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=settings.n_seqs, seq_len=settings.seq_len)
    tokens = data.inputs
    base = peak_memory()
    options = CaptureOptions(n_layers=loaded.info.n_layers, batch_size=settings.batch_size)
    plan = make_plan(components(model), None)
    gains = calibrate(model, tokens, batch_size=settings.batch_size)

    def plain() -> None:
        with torch.inference_mode():
            for start in range(0, len(tokens), settings.batch_size):
                run_forward(model, tokens[start : start + settings.batch_size])

    plain()
    ratios = {}
    for index, condition in enumerate(plan.conditions):
        before = seconds(plain)
        runner = ConditionRunner(model, plan, options, RunCheckpoint())
        ours = seconds(lambda c=condition, r=runner, i=index: r.condition(str(i), data, c, gains))
        ratios[condition] = 2 * ours / (before + seconds(plain))
    slowest = max(ratios, key=ratios.__getitem__)
    print(f"{len(ratios)} conditions of {len(tokens)} sequences of {settings.seq_len} tokens")
    print(f"one plain forward pass over them: {seconds(plain):.2f} s")
    print(f"a condition takes {statistics.mean(ratios.values()):.2f} plain passes on average,")
    print(f"  {ratios[frozenset()]:.2f} for the intact model,")
    print(f"  {ratios[slowest]:.2f} for the slowest: without {' '.join(sorted(slowest))}")
    print(f"peak memory {peak_memory():.0f} MB, of which {base:.0f} MB before the first condition")


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(tyro.cli(Settings))
