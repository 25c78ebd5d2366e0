"""Tokens per second and memory on a GPU, at the shape of Llama-3.1-8B: python benchmarks/gpu.py.

Random bfloat16 weights, 4 and 32 layers, 1,024 tokens: a plain SDPA pass, capture, and a condition
of the default `ablate` run (the mean over all of them), in turn; the error of bfloat16 maps against
float32 ones of the same weights, at 4 layers. `--device cpu --d-model 64 --d-vocab 2048 ...` tries
it anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import llama
import torch
import tyro
from llama import plain_model, plain_pass
from rounds import interleaved_times
from rows import Row, row, show

from nope_probe import capture_scores
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.removing.components import components
from nope_probe.studies import ablate
from nope_probe.studies.ablate_run import ablations_of, chosen
from nope_probe.studies.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure a plain pass, capture and ablation on a GPU."""

    device: str = "cuda"
    depths: tuple[int, ...] = (4, 32)
    d_model: int = 4096
    n_heads: int = 32
    n_kv_heads: int = 8
    d_mlp: int = 14336
    d_vocab: int = 128256
    seq_len: int = 1024
    n_seqs: int = 16
    batch_size: int = 8
    rounds: int = 3
    json: bool = False
    """Print the rows as JSON."""


def main(settings: Settings) -> None:
    rows = [each for depth in settings.depths for each in rows_at(settings, depth)]
    rms, largest, size = llama.rounding(sizes_of(settings, settings.depths[0]))
    name = f"bfloat16 maps against float32, {settings.depths[0]} layers (maps of {size:.2g} nats)"
    rows += [row(f"{name}, RMS", [rms], "nats"), row(f"{name}, largest", [largest], "nats")]
    show(rows, as_json=settings.json)


def sizes_of(settings: Settings, n_layers: int) -> llama.Settings:
    """Return the model's sizes and the data's."""
    return llama.Settings(
        n_layers=n_layers,
        d_model=settings.d_model,
        n_heads=settings.n_heads,
        n_kv_heads=settings.n_kv_heads,
        d_mlp=settings.d_mlp,
        d_vocab=settings.d_vocab,
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        n_seqs=settings.n_seqs,
        device=settings.device,
        dtype="bfloat16",
    )


def rows_at(settings: Settings, depth: int) -> list[Row]:
    """Return tokens per second, ratios to the plain pass and memory, at one depth."""
    sizes = sizes_of(settings, depth)
    plain = plain_model(sizes, "sdpa").to(settings.device, torch.bfloat16)
    model, tokens = llama.build(sizes), llama.tokens_of(sizes).to(settings.device)
    n_passes, ablate = ablation(model, tokens.cpu(), settings)
    ways: dict[str, Callable[[], object]] = {
        "a plain SDPA pass": synchronised(partial(plain_batches, plain, tokens, sizes), settings),
        "capture": synchronised(
            partial(capture_scores, model, tokens, batch_size=sizes.batch_size), settings
        ),
        f"a pass of ablate (of {n_passes})": synchronised(ablate, settings),
    }
    parts = dict.fromkeys(ways, 1) | {list(ways)[-1]: n_passes}
    times = interleaved_times(ways, settings.rounds)
    rows = []
    for name, run in ways.items():
        each = [time / parts[name] for time in times[name]]
        work = f"{name}, {depth} layers, {settings.seq_len} tokens"
        rate = [tokens.numel() / time for time in each]
        rows.append(row(work, rate, "tokens/s"))
        if name != "a plain SDPA pass":
            against = times["a plain SDPA pass"]
            values = [a / b for a, b in zip(each, against, strict=True)]
            rows.append(row(work, values, "times its time", against="a plain SDPA pass"))
        if settings.device != "cpu":
            rows.append(row(work, [gpu_rise(run)], "MB above the loaded models"))
    return rows


def ablation(
    model: HookedModel, tokens: torch.Tensor, settings: Settings
) -> tuple[int, Callable[[], object]]:
    """Return how many conditions the default run has, and a function that runs them all."""
    engine = Engine(model=model, inputs=tokens, batch_size=settings.batch_size)
    default = ablate.Settings()
    sources, removed, _ = chosen(components(model), default)
    ablations = ablations_of(sources, removed, default)

    def run() -> None:
        calibrated = engine.calibrated("gains", ablations)
        for ablation in ablations:
            calibrated.scores("score", ablation)

    return len(ablations), run


def plain_batches(model: torch.nn.Module, tokens: torch.Tensor, sizes: llama.Settings) -> None:
    for batch in tokens.split(sizes.batch_size):
        plain_pass(model, batch)


def synchronised(run: Callable[[], object], settings: Settings) -> Callable[[], None]:
    """Return the call with a wait for the GPU at its end."""

    def wait() -> None:
        run()
        if settings.device != "cpu":
            torch.cuda.synchronize()

    return wait


def gpu_rise(run: Callable[[], object]) -> float:
    """Return how far the GPU's memory rises during a call, MB."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
