"""Compare captures through fused attention with a plain forward pass: python benchmarks/fused.py.

Each round runs all ways in one process, so that a busy machine slows all; ratios are to the plain
pass of the same round: the same model in transformers, with SDPA. The paper's way keeps all
attention weights (eager, `output_attentions`).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from capture import Settings, build, config_of, tokens_of

from nope_probe import Ablation, ablated, capture_scores
from nope_probe.hooks.layer import layers_of

REMOVED: tuple[tuple[str, ...], ...] = ((), ("mask",), ("rope",), ("w_k",), ("w_v",))
ROUNDS = 6


def main() -> None:
    settings = Settings(n_kv_heads=4, batch_size=4, n_seqs=4)
    model, tokens = build(settings), tokens_of(settings)
    plains = {way: plain_model(settings, way) for way in ("sdpa", "eager")}
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: plain_pass(plains["sdpa"], tokens),
        "the paper's": lambda: plain_pass(plains["eager"], tokens),
        "hooked": lambda: hooked_capture(model, tokens),
    }
    for remove in REMOVED:
        name = "fused, " + (f"without {remove[0]}" if remove else "intact")
        ways[name] = lambda remove=remove: fused_capture(model, tokens, remove)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, each in times.items():
        ratios = [a / b for a, b in zip(each[1:], times["plain"][1:], strict=True)]  # 1st warms up
        middle = statistics.median(ratios)
        print(f"{name:20} {middle:.2f} [{min(ratios):.2f}, {max(ratios):.2f}] plain passes")


def plain_model(settings: Settings, attention: str) -> Any:
    """Return a plain model of the same sizes."""
    from transformers import LlamaForCausalLM

    config = config_of(settings)
    config._attn_implementation = attention
    return LlamaForCausalLM(config).eval()


def plain_pass(model: Any, tokens: torch.Tensor) -> None:
    with torch.inference_mode():
        model(tokens, output_attentions=model.config._attn_implementation == "eager")


def fused_capture(model: Any, tokens: torch.Tensor, remove: Any) -> None:
    with ablated(model, Ablation(remove=remove, gain="norm")):
        capture_scores(model, tokens, batch_size=4, n_folds=4)


def hooked_capture(model: Any, tokens: torch.Tensor) -> None:
    """Capture with a hook on one block's scores, which then have to be computed."""
    point = layers_of(model)[0].point("attn.hook_attn_scores")
    point.add_hook(lambda scores, hook: None)
    try:
        capture_scores(model, tokens, batch_size=4, n_folds=4)
    finally:
        point.fwd_hooks.pop().hook.remove()


if __name__ == "__main__":
    main()
