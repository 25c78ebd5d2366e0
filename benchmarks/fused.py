"""Compare captures through fused attention with a plain forward pass: python benchmarks/fused.py.

Each round runs all ways in one process, so that a busy machine slows all; ratios are to the plain
pass of the same round: the same model in transformers, with SDPA. The paper's way keeps all
attention weights (eager, `output_attentions`). Peak memory is that of a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import llama
import torch
import tyro
from rounds import interleaved_times, peak_rise, ratios
from rows import Row, row, show

from nope_probe import Ablation, ablated, capture_attention, capture_need, capture_scores
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import layers_of

if TYPE_CHECKING:
    pass

REMOVED: tuple[tuple[str, ...], ...] = ((), ("mask",), ("rope",), ("w_k",), ("w_v",))
Alone: TypeAlias = Literal["plain", "intact"]
EAGER = "the paper's way (eager, all attention weights)"
SIZES = llama.Settings(n_kv_heads=4, batch_size=4, n_seqs=4)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare score maps of 4 layers at 1,024 tokens with a plain forward pass."""

    rounds: int = 5
    memory: bool = True
    """Measure peak memory too."""
    json: bool = False
    """Print the rows as JSON."""
    alone: Alone | None = None
    """Run one way, and print its peak memory alone (used by this file itself)."""


def main(settings: Settings) -> None:
    if settings.alone is not None:
        print(json.dumps(memory_of(settings.alone)))
        return
    show([*times(settings.rounds), *(memory() if settings.memory else [])], as_json=settings.json)


def times(rounds: int) -> list[Row]:
    """Return each way's time over the plain pass's."""
    model, tokens = llama.build(SIZES), llama.tokens_of(SIZES)
    plains = {way: llama.plain_model(SIZES, way) for way in ("sdpa", "eager")}
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: llama.plain_pass(plains["sdpa"], tokens),
        EAGER: lambda: llama.plain_pass(plains["eager"], tokens),
        "attention of all heads": lambda: capture_attention(model, tokens, batch_size=4, n_folds=4),
        "need of RoPE, all heads": lambda: capture_need(model, tokens, "rope", batch_size=4),
        "score maps, hooked scores": lambda: hooked_capture(model, tokens),
    }
    for remove in REMOVED:
        name = "score maps, " + (f"without {remove[0]}" if remove else "intact")
        ways[name] = lambda remove=remove: fused_capture(model, tokens, remove)
    found = interleaved_times(ways, rounds)
    rows = [time_row(name, ratios(found, name, "plain")) for name in ways if name != "plain"]
    of_eager = ratios(found, "attention of all heads", EAGER)
    unit, against = "times its time", "the paper's way, 4 layers, 1,024 tokens"
    goal = "at most 1.3"
    return [*rows, row("attention of all heads", of_eager, unit, against=against, goal=goal)]


def time_row(name: str, values: list[float]) -> Row:
    against, unit = "a plain SDPA pass, 4 layers, 1,024 tokens", "times its time"
    goals = {"score maps, intact": "at most 0.9", "need of RoPE, all heads": "at most 2.2"}
    goals |= {f"score maps, without {part}": "at most 1" for part in ("mask", "rope", "w_k", "w_v")}
    return row(name, values, unit, against=against, goal=goals.get(name, ""))


def memory() -> list[Row]:
    """Return the peak above the loaded model, over the plain pass's."""
    rises = {way: alone(way) for way in ("plain", "intact")}
    against = f"a plain SDPA pass ({rises['plain']:.0f} MB)"
    ratio = rises["intact"] / rises["plain"]
    return [
        row("score maps, intact", [rises["intact"]], "MB above the loaded model"),
        row(
            "score maps, intact", [ratio], "times its memory", against=against, goal="at most 1.15"
        ),
    ]


def alone(way: str) -> float:
    command = [sys.executable, "-W", "ignore", __file__, f"--alone={way}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ended.stdout.splitlines()[-1])


def memory_of(way: Alone) -> float:
    tokens = llama.tokens_of(SIZES)
    if way == "plain":
        model = llama.plain_model(SIZES, "sdpa")
        return peak_rise(lambda: llama.plain_pass(model, tokens))[1]
    loaded = llama.build(SIZES)
    return peak_rise(lambda: fused_capture(loaded, tokens, ()))[1]


def fused_capture(model: HookedModel, tokens: torch.Tensor, remove: tuple[str, ...]) -> None:
    with ablated(model, Ablation(remove=remove, replacement="identity", gain="norm")):
        capture_scores(model, tokens, batch_size=4, n_folds=4)


def hooked_capture(model: HookedModel, tokens: torch.Tensor) -> None:
    """Capture with a hook on one block's scores, which then have to be computed."""
    point = layers_of(model)[0].point("attn.hook_attn_scores")
    point.add_hook(lambda scores, hook: None)
    try:
        capture_scores(model, tokens, batch_size=4, n_folds=4)
    finally:
        point.fwd_hooks.pop().hook.remove()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
