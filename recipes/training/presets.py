"""The `train` command's settings, and the recipes: what decides what a preset learns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from nope_probe.errors import UserError
from nope_probe.files import JsonObject
from nope_probe.models.names import validate_hub_answers, validate_reachable
from nope_probe.run.flags import COUNT, LARGEST, SEED, CommandSettings, LocalPath
from nope_probe.run.processes import output_folder, process_count, validate_folder_place
from training_folder import OWN_FILES, validate_same_training

STEP = Interval(ge=0, le=LARGEST)
PresetName = Literal["nope-tiny", "rope-tiny", "nope-1.5b", "rope-1.5b"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings that decide what a preset learns, except RoPE; both twins share a recipe.

    Attributes:
        batch_tokens: tokens per optimiser step, over all processes.
        micro_batch: the largest number of sequences per process and forward pass.
        threads: torch threads, fixed for reproducible runs on a CPU; None leaves the default.
    """

    size: Literal["tiny", "1.5b"]
    data: str
    tokenizer: str
    seq_len: int
    batch_tokens: int
    micro_batch: int
    steps: int
    learning_rate: float
    warmup: int
    min_lr: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    bf16: bool = False
    threads: int | None = None


RECIPES: dict[str, Recipe] = {
    # 10.2M tokens, four passes over the library: 20 to 30 minutes on one core.
    "tiny": Recipe(
        size="tiny",
        data="stdlib",
        tokenizer="byte-level BPE of 2,048 trained on the same text",
        seq_len=128,
        batch_tokens=16 * 128,
        micro_batch=16,
        steps=5000,
        learning_rate=3e-3,
        warmup=100,
        threads=1,
    ),
    # Section 4.2 of the paper: 20B tokens of FineWeb-Edu, 1M a batch, context 1024.
    "1.5b": Recipe(
        size="1.5b",
        data="HuggingFaceFW/fineweb-edu",
        tokenizer="meta-llama/Llama-3.1-8B",
        seq_len=1024,
        batch_tokens=1024 * 1024,
        micro_batch=8,
        steps=19_074,
        learning_rate=3e-4,
        warmup=1000,
        bf16=True,
    ),
}


def split_batch(recipe: Recipe, n_processes: int) -> tuple[int, int]:
    """Return the sequences of a forward pass, and how many passes a process makes in a step.

    Together the processes take exactly the recipe's tokens.

    Example:
        >>> split_batch(RECIPES["tiny"], 1), split_batch(RECIPES["tiny"], 4)
        ((16, 1), (4, 1))

    Raises:
        UserError: if the processes cannot share the sequences equally.
    """
    n_seqs = recipe.batch_tokens // recipe.seq_len
    if n_seqs % n_processes:
        raise UserError(
            f"the {n_seqs} sequences of a step cannot be shared equally by {n_processes} processes"
        )
    n_local = n_seqs // n_processes
    size = max(size for size in range(1, recipe.micro_batch + 1) if n_local % size == 0)
    return size, n_local // size


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    """Train the paper's NoPE model or its RoPE twin, and write a Hugging Face folder.

    The tiny presets train on the text of this Python's standard library, in about half an hour on
    one core. The 1.5B presets stream FineWeb-Edu and need GPUs: start them with
    `accelerate launch` or `torchrun`, whose settings (FSDP, precision) Trainer uses.

    Attributes:
        preset: Which model to train.
        out: Folder to write [runs/train-PRESET].
        steps: Stop early; the recipe's by default.
        snapshots: After which steps to keep the model too, each in a folder OUT/step-N that --model
            takes; 0 is the untrained model.
        seed: Seed of weights and data order.
        resume: Resume from the newest checkpoint in OUT.
    """

    examples = (
        "--preset nope-tiny",
        "--preset rope-tiny --steps 100 --out runs/short",
        "--preset rope-tiny --snapshots 0 30 100 300 1000 2000 5000",
    )
    in_one_process = False

    preset: PresetName
    out: LocalPath | None = None
    steps: Annotated[int | None, COUNT] = None
    snapshots: tuple[Annotated[int, STEP], ...] = ()
    seed: Annotated[int, SEED] = 0
    resume: bool = False

    @property
    def recipe(self) -> Recipe:
        """The settings that the preset shares with its twin."""
        return RECIPES[self.preset.split("-")[1]]

    @property
    def n_steps(self) -> int:
        """How many steps the training has."""
        return self.steps or self.recipe.steps

    @property
    def identity(self) -> JsonObject:
        """The identity of the run as JSON values; a run continues weights with this identity."""
        recipe = self.recipe
        identity = {
            "preset": self.preset,
            "seed": self.seed,
            "steps": self.n_steps,
            "snapshots": self.snapshots,
            "recipe": asdict(recipe),
        }
        return json.loads(json.dumps(identity))

    @property
    def folder(self) -> Path:
        """The folder to write."""
        return output_folder(self.out or Path("runs") / f"train-{self.preset}")

    def validate(self) -> None:
        """Check the settings and the folder before training.

        Raises:
            UserError: naming the flag.
        """
        out, recipe, steps = self.folder, self.recipe, self.steps
        validate_folder_place(out)
        split_batch(recipe, process_count())
        if steps is not None and steps > recipe.steps:
            raise UserError(f"--steps {steps}: {self.preset} has {recipe.steps:,} steps")
        if max(self.snapshots, default=0) > self.n_steps:
            last = max(self.snapshots)
            raise UserError(f"--snapshots {last}: the training has {self.n_steps:,} steps")
        if self.resume:
            validate_same_training(out, self.identity)
            return
        if out.is_dir() and any(path.name not in OWN_FILES for path in out.iterdir()):
            raise UserError(f"{out} holds other files; take --resume, or choose another --out")

    def validate_reach(self) -> None:
        """Check that the tokenizer and data of a preset are on this machine or within reach.

        Raises:
            UserError: naming the part that is missing.
        """
        recipe = self.recipe
        if recipe.size != "tiny":
            validate_reachable(recipe.tokenizer)
            validate_hub_answers(f"the data set {recipe.data}")
