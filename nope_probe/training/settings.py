"""The `train` command's settings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.models.names import validate_hub_answers, validate_reachable
from nope_probe.runtime.places import output_folder, validate_folder_place
from nope_probe.runtime.processes import process_count
from nope_probe.runtime.settings import COUNT, SEED, BoundedSettings
from nope_probe.training.checkpoints import OWN_FILES, validate_same_training
from nope_probe.training.recipes import RECIPES, Recipe, split_batch

PresetName = Literal["nope-tiny", "rope-tiny", "nope-1.5b", "rope-1.5b"]


@dataclass(frozen=True, kw_only=True)
class Settings(BoundedSettings):
    """Train the paper's NoPE model or its RoPE twin, and write a Hugging Face folder.

    The tiny presets train on the text of this Python's standard library, in about half an hour on
    one core. The 1.5B presets stream FineWeb-Edu and need GPUs: start them with
    `accelerate launch` or `torchrun`, whose settings (FSDP, precision) Trainer uses.
    """

    preset: Annotated[PresetName, tyro.conf.arg(help="Which model to train.")]
    out: Annotated[Path | None, tyro.conf.arg(help="Folder to write [runs/train-PRESET].")] = None
    steps: Annotated[
        int | None, COUNT, tyro.conf.arg(help="Stop early; the recipe's by default.")
    ] = None
    seed: Annotated[int, SEED, tyro.conf.arg(help="Seed of weights and data order.")] = 0
    resume: Annotated[bool, tyro.conf.arg(help="Resume from the newest checkpoint in OUT.")] = False

    @property
    def recipe(self) -> Recipe:
        """The settings that the preset shares with its twin."""
        return RECIPES[self.preset.split("-")[1]]

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the run as JSON values; a run continues only its own weights."""
        recipe = self.recipe
        identity = {
            "preset": self.preset,
            "seed": self.seed,
            "steps": self.steps or recipe.steps,
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
