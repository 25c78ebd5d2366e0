"""Measure the peak memory of `ablate`, and which part of its time analysis takes.

    python benchmarks/memory.py [--lengths 256 512 1024] [--layers 2 4]

Each run is a process of its own, on a random Llama (d_model 1024, 16 query and 4 key heads). Memory
is what the process holds in RAM; that of files that are mapped and shared counts too. The peak is
that above the loaded model. Times are of the processor, so that a busy machine changes little.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rounds import resident
from rows import Row, row, show


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which runs."""

    lengths: tuple[int, ...] = (256, 512, 1024)
    layers: tuple[int, ...] = (2, 4)
    n_seqs: int = 8
    folds: int = 8
    d_model: int = 1024
    model: str | None = None
    """A model's name or folder; by default a random one is built."""
    only: bool = False
    """Run the first length and number of layers in this process, and print what it took."""
    json: bool = False
    """Print the rows as JSON."""


def main(settings: Settings) -> None:
    if settings.only:
        print(json.dumps(measured(settings)))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = settings.model or build(settings, Path(folder, "model"))
        for n_layers in settings.layers:
            for length in settings.lengths:
                rows += rows_of(n_layers, length, alone(settings, model, n_layers, length))
    show(rows, as_json=settings.json)


def rows_of(n_layers: int, length: int, found: dict[str, float]) -> list[Row]:
    """Return what a run took: memory above the model's, and the time of its analysis."""
    work = f"ablate, 40 conditions, {n_layers} layers, {length:,} tokens"
    unit, goal = "MB above the loaded model", "under 2,000"
    share = row(
        f"{work}: analysis ({found['analysis_wall']:.0f} s)",
        [found["share"]],
        "of its time",
        against=f"its capture ({found['capture_wall']:.0f} s)",
        goal="under 0.15",
    )
    parts = ("capture", "analysis")
    return [*(row(f"{work}: {each}", [found[each]], unit, goal=goal) for each in parts), share]


def build(settings: Settings, folder: Path) -> str:
    """Write a folder with a random Llama, and return it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shipped = Path(__file__).parents[1] / "nope_probe" / "checkpoints" / "nope-tiny"
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.d_model,
        intermediate_size=11 * settings.d_model // 4,
        num_hidden_layers=max(settings.layers),
        num_attention_heads=settings.d_model // 64,
        num_key_value_heads=settings.d_model // 256,
        max_position_embeddings=max(settings.lengths),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def alone(settings: Settings, model: str, n_layers: int, length: int) -> dict[str, float]:
    """Return what `measured` returns in a process of its own."""
    chosen = asdict(settings) | {"lengths": [length], "layers": [n_layers], "model": model}
    flags = ["--only"]
    for name, value in chosen.items():
        if name not in ("only", "json"):
            flags += [f"--{name.replace('_', '-')}"]
            flags += [str(each) for each in (value if isinstance(value, list) else [value])]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *flags],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def measured(settings: Settings) -> dict[str, float]:
    """Return the memory of the model, and above it that of capture and analysis, MB; and times."""
    from nope_probe.experiments.ablation import analyse
    from nope_probe.experiments.ablation.run import Settings as Ablate
    from nope_probe.experiments.ablation.run import measure, plan_of
    from nope_probe.runtime.session import Session

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        chosen = Ablate(
            model=settings.model,
            layers=settings.layers[0],
            seq_len=settings.lengths[0],
            n_seqs=settings.n_seqs,
            folds=settings.folds,
            out=Path(folder, "run"),
            device="cpu",
        )
        with Session("ablate", chosen) as session:
            found["model"] = resident("VmRSS")
            plan = plan_of(session)
            with peak(found, "capture"):
                measured_maps = measure(session, plan)
            with peak(found, "analysis"):
                session.write(analyse.analyse(session, plan, measured_maps))
        found["disk"] = sum(each.stat().st_size for each in Path(folder, "run").iterdir()) / 2**20
    found["share"] = found["analysis_seconds"] / found["capture_seconds"]
    return found


@contextmanager
def peak(found: dict[str, Any], name: str) -> Iterator[None]:
    """Note the peak memory above the model, MB, and the seconds of the processor."""
    # What came before would hide what follows: reset the peak.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = time.process_time()
    wall = time.perf_counter()
    yield
    found[f"{name}_seconds"] = time.process_time() - start
    found[f"{name}_wall"] = time.perf_counter() - wall
    found[name] = resident("VmHWM") - found["model"]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(tyro.cli(Settings))
