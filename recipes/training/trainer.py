"""Hugging Face's Trainer with a recipe's settings, and the folder that it leaves."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from corpus import Corpus
from nope_probe.analyses.pattern import Measures, measure
from nope_probe.errors import UserError
from nope_probe.files import JsonObject, atomic_write, write_json
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.models.load import to_hooked
from nope_probe.run.processes import Signals, is_first_process, process_count
from presets import Recipe, split_batch
from training_folder import FINISHED, mark_whole

SAVE_EVERY = 1000  # steps
N_MEASURED = 24  # steps at which the pattern is measured


def make_trainer(
    config: SmolLM3Config,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    recipe: Recipe,
    *,
    out: Path,
    steps: int,
    seed: int,
) -> Trainer:
    """Return the Trainer of a model of this configuration, with a recipe's settings."""
    config.bos_token_id = config.eos_token_id = tokenizer.bos_token_id
    model = SmolLM3ForCausalLM(config)
    trainer = Trainer(
        model=model,
        args=_arguments(recipe, out, steps, seed),
        train_dataset=corpus.train,
        eval_dataset=corpus.held_out,
    )
    validate_tokens_per_step(trainer.args, recipe)
    for printing in (PrinterCallback, ProgressCallback):  # both print dictionaries
        trainer.remove_callback(printing)
    trainer.add_callback(SayLoss())
    if not trainer.args.disable_tqdm:
        trainer.add_callback(Bar())
    if recipe.size == "tiny":
        tokens = corpus.held_out[:512]["input_ids"][:, :64]
        trainer.add_callback(Dynamics(out / "dynamics.csv", tokens, steps))
    return trainer


def _arguments(recipe: Recipe, out: Path, steps: int, seed: int) -> TrainingArguments:
    micro_batch, n_passes = split_batch(recipe, process_count())
    return TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=recipe.micro_batch,
        gradient_accumulation_steps=n_passes,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": recipe.min_lr},
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        max_grad_norm=recipe.clip,
        bf16=recipe.bf16,
        logging_steps=50,
        save_steps=SAVE_EVERY,
        save_total_limit=2,  # the newest may be half-written
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=seed,
        data_seed=seed,
        disable_tqdm=not sys.stderr.isatty(),
    )


def validate_tokens_per_step(arguments: TrainingArguments, recipe: Recipe) -> None:
    """Check that a step takes the recipe's tokens: Trainer gives a batch to each visible GPU.

    Raises:
        UserError: for another number of tokens.
    """
    n_seqs = arguments.train_batch_size * arguments.gradient_accumulation_steps
    tokens = n_seqs * arguments.world_size * recipe.seq_len
    if tokens != recipe.batch_tokens:
        raise UserError(
            f"a step would take {tokens} tokens, not the recipe's {recipe.batch_tokens}: set "
            "CUDA_VISIBLE_DEVICES to one GPU, or start one process for each with torchrun"
        )


class SayLoss(TrainerCallback):
    """Writes the loss of training to stderr, in nats per token, at the steps that Trainer logs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write a line if the log holds a loss of training, in the first process."""
        if "loss" in (logs or {}) and state.is_world_process_zero:
            done = f"step {state.global_step:,} of {state.max_steps:,}"
            loss = f"loss {float(logs['loss']):.3f} nats per token"
            tqdm.write(f"{done}: {loss}", file=sys.stderr)


class Bar(ProgressCallback):
    """Shows Trainer's progress bar, and leaves the loss to `SayLoss`."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write nothing."""


class MarkWhole(TrainerCallback):
    """Writes the checksums of each checkpoint once all its files are written.

    Args:
        about: the identity of the run.
    """

    def __init__(self, about: JsonObject) -> None:
        self.about = about

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the other processes, whose files are in the checkpoint too."""
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            mark_whole(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.about)


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and ends training after the step in which a signal was received.

    Args:
        signals: the signals of the run.
    """

    def __init__(self, signals: Signals) -> None:
        self.signals = signals

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask Trainer for a checkpoint, and for no further step."""
        if self.signals.received is not None:
            control.should_save = control.should_training_stop = True


class Snapshots(TrainerCallback):
    """Keeps the model after some steps, as `save_model` writes it at the end, in OUT/step-N.

    Args:
        steps: the steps; 0 is the untrained model.
        out: the folder of the training.
        tokenizer: the model's.
    """

    def __init__(
        self, steps: Collection[int], out: Path, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.steps, self.out, self.tokenizer = steps, out, tokenizer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the untrained model; a resumed run has kept its own."""
        if not state.global_step:
            self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the model, if this step is due; training goes on with the weights in float32."""
        if state.global_step in self.steps and state.is_world_process_zero:
            folder = self.out / f"step-{state.global_step}"
            deepcopy(kwargs["model"]).to(torch.bfloat16).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


class Dynamics(TrainerCallback):
    """Writes the measures of each layer's pattern at log-spaced steps to a CSV file.

    Args:
        path: the file.
        tokens: the tokens on which the model is measured.
        n_steps: the number of training steps.
    """

    def __init__(self, path: Path, tokens: Int[Tensor, "seq pos"], n_steps: int) -> None:
        self.path, self.tokens = path, tokens
        self.steps = log_spaced(n_steps)
        self.rows: list[dict[str, float | int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the measures of a resumed run, or measure a new run's model at its start."""
        if state.global_step and self.path.is_file():
            table = pd.read_csv(self.path)
            self.rows = table[table["step"] <= state.global_step].to_dict("records")
        else:
            self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model, if this step is due."""
        if state.global_step in self.steps and state.is_world_process_zero:
            self.rows += pattern_rows(kwargs["model"], self.tokens, state.global_step)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as partial:
                pd.DataFrame(self.rows).to_csv(partial, index=False, float_format="%.6g")


def log_spaced(n_steps: int) -> set[int]:
    """Return step 0 and up to 24 steps from 1 to the last, evenly on a log scale.

    Example:
        >>> sorted(log_spaced(10))
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    """
    ratios = torch.linspace(0, 1, N_MEASURED, dtype=torch.float64)
    return {0, *(round(float(n_steps**ratio)) for ratio in ratios)}


def pattern_rows(
    model: PreTrainedModel, tokens: Int[Tensor, "seq pos"], step: int
) -> list[dict[str, float | int]]:
    """Return a row of pattern measures per layer; the BOS key is left out."""
    maps = capture_scores(to_hooked(model), tokens.cpu())
    names = Measures.__dataclass_fields__
    return [
        {"step": step, "layer": layer, **{name: getattr(measures, name).value for name in names}}
        for layer, measures in measure(maps, skip_keys=1).items()
    ]


class _TrainedAlreadyError(Exception):
    """Raised if the checkpoint to resume from is the last step's."""


class _StopAtLastStep(TrainerCallback):
    """Ends a resumed run before a step beyond its last, once its weights are loaded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= args.max_steps:
            raise _TrainedAlreadyError


def train(trainer: Trainer, checkpoint: Path | None, signals: Signals | None = None) -> None:
    """Train to the last step, from a checkpoint if given.

    Raises:
        Interrupted: on a signal, after the step in progress; with several processes at once,
            because they do not get the signal in the same step.
    """
    alone = signals is not None and process_count() == 1
    with signals.deferred() if signals is not None and alone else nullcontext():
        if checkpoint is None:
            trainer.train()
            return
        trainer.add_callback(_StopAtLastStep())
        with suppress(_TrainedAlreadyError):
            trainer.train(resume_from_checkpoint=str(checkpoint))


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Round the weights to bf16, as they ship; return their held-out loss in nats per token."""
    trainer.model.to(torch.bfloat16).float()
    return {"held_out_loss": float(trainer.evaluate()["eval_loss"])}


def save_model(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    name: str,
    recipe: JsonObject,
    losses: dict[str, float],
) -> None:
    """Write the Hugging Face folder: bf16 weights, tokenizer, recipe and model card."""
    model, is_first = trainer.accelerator.unwrap_model(trainer.model), is_first_process()
    model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True, is_main_process=is_first)
    if not is_first:
        return
    tokenizer.save_pretrained(out)
    record = {
        "name": name,
        "recipe": recipe,
        **losses,
        "python": sys.version.split()[0],
        "seed": trainer.args.seed,
        "processes": trainer.args.world_size,
    }
    card = model_card(record, int(trainer.state.global_step))
    (out / "README.md").write_text(card, encoding="utf-8")
    write_json(out / FINISHED, record)


def model_card(record: JsonObject, steps: int) -> str:
    """Return the README of a trained model, in the Hub's format."""
    recipe, rope = record["recipe"], record["name"].startswith("rope")
    tokens = steps * recipe["batch_tokens"]
    source = {"stdlib": f"the source of Python {record['python']}'s standard library (PSF licence)"}
    return f"""---
license: mit
library_name: transformers
tags: [interpretability, {"rope" if rope else "nope"}]
---
# {record["name"]}

A SmolLM3 decoder {"with RoPE in every layer" if rope else "without position encoding (NoPE)"}, for
research on where positional attention patterns come from. Made by
`python recipes/training/train.py --preset {record["name"]}`; its twin shares everything but RoPE.

- **Data**: {source.get(recipe["data"], recipe["data"])}, {tokens / 1e6:.1f}M tokens in
  sequences of {recipe["seq_len"]}, each beginning with a BOS token.
- **Tokenizer**: {recipe["tokenizer"]}.
- **Recipe**: {steps:,} steps of {recipe["batch_tokens"]:,} tokens; AdamW {recipe["betas"]},
  weight decay {recipe["weight_decay"]}, peak learning rate {recipe["learning_rate"]},
  {recipe["warmup"]} warm-up steps, cosine to {recipe["min_lr"]:.0%}, gradients clipped at
  {recipe["clip"]:g}, seed {record["seed"]}{_shared(record.get("processes", 1))}.
- **Held-out loss**: {record["held_out_loss"]:.3f} nats per token.
- **Dynamics**: `dynamics.csv` holds the measures of each layer's positional pattern over training.
"""


def _shared(n_processes: int) -> str:
    return "" if n_processes == 1 else f", each step shared by {n_processes} processes"
