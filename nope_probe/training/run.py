"""Train a preset into a Hugging Face folder."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.models.names import validate_hub_answers, validate_reachable
from nope_probe.runtime.folder import checkpoint_dir, locked, output_folder, validate_folder_place
from nope_probe.runtime.processes import Signals, is_first_process, meet, process_count, status
from nope_probe.runtime.settings import COUNT, SEED, BoundedSettings
from nope_probe.training.checkpoints import (
    FINISHED,
    OWN_FILES,
    full_disk_is_one_line,
    newest_whole,
    validate_same_training,
    write_identity,
)
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


def run(settings: Settings) -> Path:
    """Train a preset, save weights, tokenizer, model card and dynamics, and return their folder.

    A finished run that is resumed stays as it is.

    Raises:
        UserError: for an output folder, a number of steps or a checkpoint that cannot be used.
        StorageError: if the disk is full; whole checkpoints stay.
        Interrupted: on a signal; a process that trains alone saves a checkpoint first.
    """
    out = output_folder(settings.out or Path("runs") / f"train-{settings.preset}")
    validate(settings, out)
    validate_reach(settings)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        # Trainer joins the other processes; a minute is enough to see that they are missing.
        store = meet() if process_count() > 1 else None
        if is_first_process():
            stack.enter_context(locked(checkpoint_dir(out)))
            validate(settings, out)  # another process may have ended in between
        if not (settings.resume and (out / FINISHED).is_file()):
            stack.enter_context(full_disk_is_one_line(out))
            _train(settings, out, signals)
        del store  # the first process may keep it for the other processes
    return out


def closing(settings: Settings, out: Path) -> list[str]:
    """Return lines that name the trained model, its loss and its folder."""
    loss = json.loads((out / FINISHED).read_text(encoding="utf-8"))["held_out_loss"]
    steps, tokens = settings.steps or settings.recipe.steps, settings.recipe.batch_tokens
    return [
        f"Trained {settings.preset} for {steps:,} steps of {tokens:,} tokens: its loss on held-out "
        f"text is {loss:.3f} nats per token.",
        f"The model is in {out}: study it with --model {out}",
    ]


def _train(settings: Settings, out: Path, signals: Signals) -> None:
    """Train from the newest whole checkpoint, or from the start, and save the model."""
    name, recipe = settings.preset, settings.recipe
    with status("loading torch and transformers"):
        import torch
        from transformers import set_seed

        from nope_probe.models.parameter_free import smollm3_config
        from nope_probe.training.corpus import corpus_of, tokenizer_of
        from nope_probe.training.trainer import (
            MarkWhole,
            StopOnSignal,
            evaluate,
            make_trainer,
            save,
            train,
        )

        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        set_seed(settings.seed)
    with status("reading the corpus", has_bars=True):
        tokenizer = tokenizer_of(recipe)
        corpus = corpus_of(recipe, tokenizer, settings.seed)
    about = {**settings.identity, "corpus": corpus.checksum()}
    if settings.resume:
        validate_same_training(out, about)
    checkpoint = newest_whole(out, about) if settings.resume else None
    if is_first_process():
        write_identity(out, about)
    signals.message = "run the same command with --resume to resume"
    with status("building the model"):
        trainer = make_trainer(
            smollm3_config(recipe.size, rope=name.startswith("rope")),
            tokenizer,
            corpus,
            recipe,
            out=out,
            steps=settings.steps or recipe.steps,
            seed=settings.seed,
        )
    trainer.add_callback(MarkWhole(about))
    trainer.add_callback(StopOnSignal(signals))
    train(trainer, checkpoint, signals)
    save(trainer, tokenizer, out, name=name, recipe=asdict(recipe), losses=evaluate(trainer))


def validate(settings: Settings, out: Path) -> None:
    """Check the settings and the folder before training.

    Raises:
        UserError: naming the flag.
    """
    validate_folder_place(out)
    recipe, steps = settings.recipe, settings.steps
    split_batch(recipe, process_count())
    if steps is not None and steps > recipe.steps:
        raise UserError(f"--steps {steps}: {settings.preset} has {recipe.steps:,} steps")
    if settings.resume:
        validate_same_training(out, settings.identity)
        return
    if out.is_dir() and any(path.name not in OWN_FILES for path in out.iterdir()):
        raise UserError(f"{out} holds other files; take --resume, or choose another --out")


def validate_reach(settings: Settings) -> None:
    """Check that the tokenizer and data of a preset are on this machine or within reach.

    Raises:
        UserError: naming the part that is missing.
    """
    recipe = settings.recipe
    if recipe.size != "tiny":
        validate_reachable(recipe.tokenizer)
        validate_hub_answers(f"the data set {recipe.data}")
