"""Measure whole commands on long sequences from outside: python benchmarks/commands.py.

Every command runs in another process on a random Llama, next to a process that makes plain SDPA
passes over as many sequences. Peaks are those of the processes, as the operating system counts
them: what a process maps of files counts too. Phases are read off a command's lines on stderr and
its files: capture lasts from the line `running ...` to the end of the progress bar, then follow
analysis and writing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rows import Row, row, show

# Sources alone, and the default removals of one measure, else passes are all that takes time.
FLAGS: dict[str, tuple[str, ...]] = {
    "ablate": ("--data", "random", "--remove", "sources"),
    "trace": ("--data", "random"),
    "behaviour": ("--data", "stdlib", "--pack", "--measures", "loss", "--remove", "mask"),
}
PLAIN = "plain passes"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure whole commands."""

    commands: tuple[str, ...] = tuple(FLAGS)
    seq_len: int = 8192
    n_layers: int = 2
    d_model: int = 256
    n_seqs: int = 8
    folds: int = 8
    json: bool = False
    """Print the rows as JSON."""
    plain: Path | None = None
    """Run plain passes alone, with the model of this folder (used by this file itself)."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A process from outside: its peak in MB, and the lines that it wrote with their times, s."""

    peak: float
    lines: list[tuple[float, str]]

    def last(self, text: str) -> float:
        """Return the time of the last line that contains a text."""
        return max(when for when, line in self.lines if text in line)


def main(settings: Settings) -> None:
    if settings.plain is not None:
        run_plain(settings, settings.plain)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = build(settings, Path(folder, "model"))
        sizes = ("--seq-len", str(settings.seq_len), "--n-seqs", str(settings.n_seqs))
        plain = measure((__file__, *sizes, "--plain", str(model)))
        rows = [row(f"{PLAIN}, {settings.seq_len:,} tokens: peak", [plain.peak], "MB")]
        for command in settings.commands:
            out = Path(folder, command)
            flags = (*sizes, "--layers", "all", "--batch-size", "1", "--model", str(model))
            flags += ("--folds", str(settings.folds), *FLAGS[command], "--out", str(out))
            measured = measure(("-m", f"nope_probe.{command}", *flags))
            rows += rows_of(settings, command, measured, plain, out)
    show(rows, as_json=settings.json)


def rows_of(
    settings: Settings, command: str, measured: Measured, plain: Measured, out: Path
) -> list[Row]:
    """Return the peak of a command above that of plain passes, and its phases."""
    work = f"{command}, {settings.seq_len:,} tokens, {settings.n_layers} layers"
    begun, captured = measured.last("running "), measured.last("%|")
    written = (out / "tokens.safetensors").stat().st_mtime
    ended = measured.last("took ")
    one_pass = (plain.last("done") - plain.last("loaded")) / settings.n_seqs
    capture, analysis = captured - begun, written - captured
    above = row(
        f"{work}: peak",
        [measured.peak - plain.peak],
        "MB",
        against=PLAIN,
        goal="at most 1,024",
    )
    return [
        above,
        row(f"{work}: capture", [capture / one_pass], "passes", against=PLAIN),
        row(f"{work}: capture", [capture], "s"),
        row(f"{work}: analysis", [analysis], "s", goal="at most its capture"),
        row(f"{work}: writing", [ended - written], "s"),
    ]


def measure(command: tuple[str, ...]) -> Measured:
    """Run Python in a process of its own, and return its peak and its lines on stderr."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    lines: list[tuple[float, str]] = []
    while text := os.read(process.stderr.fileno(), 1 << 16):
        lines += [(time.time(), line) for line in text.decode().replace("\r", "\n").splitlines()]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n" + "\n".join(line for _, line in lines))
    return Measured(peak=usage.ru_maxrss / 1024, lines=lines)


def run_plain(settings: Settings, model: Path) -> None:
    """Run plain passes over random sequences, one at a time, to the logits."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
    tokens = torch.randint(plain.config.vocab_size, (settings.n_seqs, settings.seq_len))
    with torch.inference_mode():
        sys.stderr.write("loaded\n")
        for sequence in tokens:
            plain(sequence[None], use_cache=False)
        sys.stderr.write("done\n")


def build(settings: Settings, folder: Path) -> Path:
    """Write a folder with a random Llama, and return it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shipped = Path(__file__).parents[1] / "nope_probe" / "checkpoints" / "nope-tiny"
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.d_model,
        intermediate_size=11 * settings.d_model // 4,
        num_hidden_layers=settings.n_layers,
        num_attention_heads=settings.d_model // 64,
        num_key_value_heads=max(1, settings.d_model // 256),
        max_position_embeddings=settings.seq_len,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(tyro.cli(Settings))
