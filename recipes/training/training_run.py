"""Train a preset into a Hugging Face folder."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import SmolLM3Config, set_seed

from corpus import corpus_of, tokenizer_of
from nope_probe.files import JsonObject
from nope_probe.run.process_group import connect
from nope_probe.run.processes import (
    Signals,
    checkpoint_dir,
    is_first_process,
    locked,
    process_count,
    status,
)
from presets import Settings
from trainer import (
    MarkWhole,
    Snapshots,
    StopOnSignal,
    evaluate,
    make_trainer,
    save_model,
    train,
)
from training_folder import (
    FINISHED,
    full_disk_is_one_line,
    newest_whole,
    validate_same_training,
    write_identity,
)

# The 1.5B shape is the paper's (section 4.2); its MLP and vocabulary follow from the number of
# parameters and Llama-3's tokenizer.
SHAPES: dict[str, JsonObject] = {
    "tiny": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 2048,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "1.5b": {
        "num_hidden_layers": 22,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 5632,
        "vocab_size": 128_256,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
}


def smollm3_config(size: str, rope: bool) -> SmolLM3Config:
    """Return Hugging Face's configuration of the trained Llama, without RoPE or with it.

    SmolLM3's `no_rope_layers` switches RoPE per layer: 0 is NoPE, 1 is RoPE.
    """
    shape = SHAPES[size]
    switches = [int(rope)] * shape["num_hidden_layers"]
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return SmolLM3Config(**shape, **tokens, use_cache=False, no_rope_layers=switches)


def run(settings: Settings) -> Path:
    """Train a preset, save weights, tokenizer, model card and dynamics, and return their folder.

    A finished run that is resumed stays as it is.

    Raises:
        UserError: for an output folder, a number of steps or a checkpoint that cannot be used.
        StorageError: if the disk is full; whole checkpoints stay.
        Interrupted: on a signal; a process that trains alone saves a checkpoint first.
    """
    out = settings.folder
    settings.validate()
    settings.validate_reach()
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        # Trainer joins the other processes; a minute is enough to see that they are missing.
        store = connect() if process_count() > 1 else None
        if is_first_process():
            stack.enter_context(locked(checkpoint_dir(out)))
            settings.validate()  # another process may have ended in between
        if not (settings.resume and (out / FINISHED).is_file()):
            stack.enter_context(full_disk_is_one_line(out))
            _train(settings, out, signals)
        del store  # the first process may keep it for the other processes
    return out


def closing(settings: Settings, out: Path) -> list[str]:
    """Return lines that name the trained model, its loss and its folder."""
    loss = json.loads((out / FINISHED).read_text(encoding="utf-8"))["held_out_loss"]
    steps, tokens = settings.n_steps, settings.recipe.batch_tokens
    kept = f"Snapshots are in {out}/step-N: run a command on each, and `compare` the runs."
    return [
        f"Trained {settings.preset} for {steps:,} steps of {tokens:,} tokens: its loss on held-out "
        f"text is {loss:.3f} nats per token.",
        f"The model is in {out}: study it with --model {out}",
        *([kept] if settings.snapshots else []),
    ]


def _train(settings: Settings, out: Path, signals: Signals) -> None:
    """Train from the newest whole checkpoint, or from the start, and save the model."""
    name, recipe = settings.preset, settings.recipe
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
            steps=settings.n_steps,
            seed=settings.seed,
        )
    trainer.add_callback(Snapshots(settings.snapshots, out, tokenizer))
    trainer.add_callback(MarkWhole(about))
    trainer.add_callback(StopOnSignal(signals))
    train(trainer, checkpoint, signals)
    save_model(trainer, tokenizer, out, name=name, recipe=asdict(recipe), losses=evaluate(trainer))
