"""Time and memory to the plain simulation's precision in its worst layer: ours against plain.

Plain is what the paper does: all samples in memory, batched matmul and softmax, no hooks.
Each side runs in a process of its own, in turn:

    python benchmarks/simulation.py --threads 2
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated

import tyro
from rows import Row, row, show

CASES = ((False, 0.0), (False, 0.2), (True, 0.0), (True, 0.2))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the simulation with a plain one at the same standard error in the worst layer."""

    n_samples: Annotated[int, tyro.conf.arg(help="Of the plain side.")] = 100_000
    n_layers: int = 4
    seq_len: int = 50
    d_model: int = 64
    threads: int = 1
    rounds: int = 1
    repeats: Annotated[int, tyro.conf.arg(help="Of ours in a process; the median counts.")] = 3
    json: bool = False
    """Print the rows as JSON."""
    side: Annotated[str, tyro.conf.arg(help="Run one side only (used by this file itself).")] = ""
    rope: bool = False
    alpha: tuple[float, ...] = (0.0,)
    target_se: float = 0.0


def main(settings: Settings) -> None:
    """Run both sides of each case in turn, each in its own process, and print a table."""
    if settings.side:
        print(json.dumps(run_side(settings)))
        return
    rows = [each for rope, alpha in CASES for each in rows_of(settings, rope, alpha)]
    show(rows, as_json=settings.json)


def rows_of(settings: Settings, rope: bool, alpha: float) -> list[Row]:
    """Return one case's rows: time and memory, plain over ours, and per layer at equal error."""
    settings = replace(settings, rope=rope)
    times, per_layer = [], []
    for _ in range(settings.rounds):
        plain = run_apart(settings, alpha, "plain", 0.0)
        ours = run_apart(settings, alpha, "ours", max(plain["se"]))
        times.append(plain["seconds"] / ours["seconds"])
        per_layer.append(at_equal_error(plain, ours))
    name = f"simulation, {'RoPE' if rope else 'no RoPE'}, alpha {alpha:g}"
    against = f"plain, {settings.n_samples:,} samples ({plain['seconds']:.1f} s)"
    work = f"{name}: {ours['samples']:,} samples ({ours['seconds']:.2f} s)"
    rows = [row(work, times, "times less time", against=against, goal="at least 50")]
    for layer, gains in list(enumerate(zip(*per_layer, strict=True)))[1:]:
        rows.append(
            row(f"{name}, L{layer} at equal error", gains, "times less time", against=against)
        )
    against = f"plain ({plain['rise']:,.0f} MB above its imports)"
    ratio = plain["rise"] / ours["rise"]
    return [*rows, row(name, [ratio], "times less memory", against=against)]


def at_equal_error(plain, ours):
    """Return per layer how many times less time ours takes at an equal error; L0 is exact."""
    layers = list(zip(plain["se"], ours["se"], strict=True))
    return [plain["seconds"] * p**2 / (ours["seconds"] * max(o, 1e-12) ** 2) for p, o in layers]


def run_apart(settings, alpha, side, target):
    flags = ["--alpha", alpha, "--n-samples", settings.n_samples, "--n-layers", settings.n_layers]
    flags += ["--seq-len", settings.seq_len, "--d-model", settings.d_model]
    flags += ["--threads", settings.threads, "--side", side, "--target-se", target]
    flags += ["--repeats", settings.repeats, "--rope" if settings.rope else "--no-rope"]
    command = [sys.executable, __file__, *map(str, flags)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_side(settings):
    """Return the median time of one side, after its imports, with its samples and errors."""
    started = time.perf_counter()
    prepare, run = (prepare_plain, plain) if settings.side == "plain" else (prepare_ours, ours)
    import torch

    torch.set_num_threads(settings.threads)
    prepared = prepare(settings)
    start, before = time.perf_counter() - started, peak_mb()
    seconds = []
    for _ in range(1 if settings.side == "plain" else settings.repeats):
        began = time.perf_counter()
        samples, errors = run(settings, prepared)
        seconds.append(time.perf_counter() - began)
    found = {"samples": samples, "se": errors, "start": start, "peak": peak_mb()}
    return {**found, "seconds": sorted(seconds)[len(seconds) // 2], "rise": peak_mb() - before}


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prepare_ours(settings):
    from nope_probe.analyses.simulation import simulate_scores
    from nope_probe.models.parameter_free import build, parameter_free

    model = build(parameter_free(settings.n_layers, settings.d_model, rope=settings.rope))
    simulate_scores(model, alpha=settings.alpha[0], seq_len=settings.seq_len, n_samples=128, seed=1)
    return model


def ours(settings, model):
    from nope_probe.analyses.simulation import simulate_scores

    found = simulate_scores(
        model, alpha=settings.alpha[0], seq_len=settings.seq_len, target_se=settings.target_se
    )
    return found.n_samples, found.best.pooled_se.tolist()


def prepare_plain(settings):
    import torch

    plain_scores(torch.randn(128, settings.seq_len, settings.d_model), settings)


def plain(settings, _):
    """Average the scores of all samples at once, and take the error from their variance."""
    import torch

    n, d, alpha = settings.n_samples, settings.d_model, settings.alpha[0]
    own = torch.randn(n, settings.seq_len, d)
    shared = torch.randn(n, 1, d)
    x = torch.nn.functional.normalize(own + (alpha / (1 - alpha)) ** 0.5 * shared, dim=-1)
    return n, [deviation / n**0.5 for deviation in plain_scores(x, settings)]


def plain_scores(x, settings):
    import torch

    n = settings.seq_len
    mask = torch.full((n, n), -torch.inf).triu(1)
    below = torch.ones(n, n, dtype=torch.bool).tril(-1)
    deviations = []
    for layer in range(settings.n_layers):
        y = x / x.norm(dim=-1, keepdim=True)
        q = rotated(y) if settings.rope else y
        scores = q @ q.mT + mask
        scores.mean(0)
        # The variance of 1,000 samples will do, and costs the plain side no time.
        deviations.append(scores[:1000].var(0)[below].mean().sqrt().item())
        if layer < settings.n_layers - 1:
            x = scores.softmax(-1) @ y + x
    return deviations


def rotated(y):
    import torch

    n, d = y.shape[1:]
    angles = torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(0, d, 2) / d)
    first, second = y.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=Settings.__doc__))
