"""Compare streamed score maps with the bare forward pass and with caching scores: time and memory.

    python benchmarks/capture.py [--seq-len 1024] [--batch-size 2]

Rounds alternate between the three in one process, so that a busy machine slows all; each one's peak
memory is that of a process of its own. The model is random: 4 layers, d_model 1024, 16 heads. On a
GPU, the shape of Llama-3.1-8B, whose bfloat16 maps are compared with float32 ones:

    python benchmarks/capture.py --device cuda --dtype bfloat16 --d-model 4096 --n-heads 32 \
        --n-kv-heads 8 --d-mlp 14336 --d-vocab 128256 --batch-size 8 --n-seqs 64 [--n-layers 32]
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import rounds
import torch
import tyro

from nope_probe import capture_scores, load
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import run_forward
from nope_probe.hooks.layers.tap import StopForward

What = Literal["bare", "streamed", "cached"]
WAYS: tuple[What, ...] = ("bare", "streamed", "cached")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How large the model and the data are."""

    n_layers: int = 4
    d_model: int = 1024
    n_heads: int = 16
    n_kv_heads: int = 16
    d_mlp: int = 2816
    d_vocab: int = 2048
    seq_len: int = 1024
    batch_size: int = 2
    n_seqs: int = 16
    rounds: int = 3
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    only: What | None = None
    """Run one way, and print its peak memory alone."""


def main(settings: Settings) -> None:
    if settings.only is not None:
        print(json.dumps(peak_of(settings, settings.only)))
        return
    model = build(settings)
    ways = {way: action(settings, model, way) for way in WAYS}
    times: dict[What, list[float]] = {way: [] for way in WAYS}
    for _ in range(settings.rounds + 1):
        for way in WAYS:
            times[way].append(seconds(settings, ways[way]))
    del model
    n_tokens = settings.n_seqs * settings.seq_len
    bare = statistics.median(times["bare"][1:])
    print(f"{n_tokens} tokens in sequences of {settings.seq_len}, {settings.n_layers} layers")
    for way in WAYS:
        typical = statistics.median(times[way][1:])  # the first round warms up
        base, peak = peak_alone(settings, way)
        print(
            f"{way:9} {n_tokens / typical:10.0f} tokens/s  {typical / bare:.2f} bare passes  "
            f"peak {peak:.0f} MB, {peak - base:.0f} MB above the loaded model"
        )
    if settings.dtype == "bfloat16":
        rms, largest, size = rounding(settings)
        print(f"bfloat16 maps are off by {rms:.2g} nats RMS, at most {largest:.2g}, of {size:.2g}")


def config_of(settings: Settings) -> Any:
    """Return the configuration of a Llama of these sizes."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.d_vocab,
        hidden_size=settings.d_model,
        intermediate_size=settings.d_mlp,
        num_hidden_layers=settings.n_layers,
        num_attention_heads=settings.n_heads,
        num_key_value_heads=settings.n_kv_heads,
        max_position_embeddings=settings.seq_len,
    )


def build(settings: Settings, dtype: str | None = None) -> Any:
    """Write a folder with a random Llama, and load it as a user would, in its dtype or another."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    shipped = Path(sys.modules["nope_probe"].__path__[0], "checkpoints", "nope-tiny")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with torch.device(settings.device):
            made = LlamaForCausalLM(config_of(settings)).to(getattr(torch, settings.dtype))
        made.save_pretrained(folder)
        del made
        AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
        loaded = load(folder, device=settings.device, dtype=getattr(torch, dtype or settings.dtype))
        return loaded.model


def rounding(settings: Settings) -> tuple[float, float, float]:
    """Compare bfloat16 maps with float32 ones of the same weights: RMS and largest error, size."""
    maps = []
    for dtype in ("bfloat16", "float32"):
        maps.append(capture_scores(build(settings, dtype), tokens_of(settings), batch_size=1).mean)
    error = (maps[0] - maps[1]).nan_to_num()
    cells = maps[1].isfinite().sum()
    rms, size = ((m.nan_to_num().square().sum() / cells).sqrt() for m in (error, maps[1]))
    return float(rms), float(error.abs().max()), float(size)


def tokens_of(settings: Settings) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(settings.d_vocab, (settings.n_seqs, settings.seq_len), generator=generator)


def action(settings: Settings, model: Any, way: What) -> Callable[[], object]:
    tokens = tokens_of(settings)
    if way == "streamed":
        return lambda: capture_scores(model, tokens, batch_size=settings.batch_size)
    return lambda: (bare if way == "bare" else cached)(model, tokens, settings.batch_size)


def bare(model: Any, tokens: torch.Tensor, batch_size: int) -> None:
    """Run the model up to its last scores, as the other ways do."""
    last = layers_of(model)[-1].point("attn.hook_attn_scores")
    with torch.inference_mode(), hooks_attached([(last, stop)]):
        for start in range(0, len(tokens), batch_size):
            run_forward(model, tokens[start : start + batch_size])


def cached(model: Any, tokens: torch.Tensor, batch_size: int) -> None:
    """Average scores over sequences as one does with TransformerLens alone, without folds."""
    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(len(model.blocks))]
    sums = [0.0] * len(names)
    with torch.inference_mode():
        for start in range(0, len(tokens), batch_size):
            batch = tokens[start : start + batch_size].to(next(model.parameters()).device)
            _, cache = model.run_with_cache(batch, names_filter=lambda name: name in names)
            for layer, name in enumerate(names):
                sums[layer] = sums[layer] + cache[name].mean(1).sum(0)


def stop(tensor: torch.Tensor, hook: object) -> None:
    raise StopForward


def seconds(settings: Settings, act: Callable[[], object]) -> float:
    def finished() -> None:
        act()
        if settings.device != "cpu":
            torch.cuda.synchronize()

    return rounds.seconds(finished)


def peak_of(settings: Settings, way: What) -> tuple[float, float]:
    """Return the memory before one way runs, and its peak, MB."""
    act = action(settings, model := build(settings), way)
    del model
    if settings.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        act()
        return base / 2**20, torch.cuda.max_memory_allocated() / 2**20
    base, rise = rounds.peak_rise(act)
    return base, base + rise


def peak_alone(settings: Settings, way: What) -> tuple[float, float]:
    """Return what `peak_of` returns in a process of its own."""
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in asdict(settings).items()
        if name != "only"
    ]
    command = [sys.executable, "-W", "ignore", __file__, *flags, f"--only={way}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(json.loads(ended.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main(tyro.cli(Settings))
