"""The model and the sequences of a run: described by settings, or given in their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from nope_probe.data.documents import validate_folds
from nope_probe.data.sequences import InputKind, Sequences, gaussian, read_tokens, sequences
from nope_probe.errors import TooFewLayersError, UserError, beyond_context
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given, as_inputs, begins_alike, blocks_of, layers_of
from nope_probe.maps.folds import default_folds
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import is_on_hub
from nope_probe.run.flags import CommandSettings, refuse
from nope_probe.run.processes import status
from nope_probe.run.settings import GIVEN, RunSettings

Chosen = TypeVar("Chosen", bound=RunSettings)


def validate_reach(settings: CommandSettings) -> None:
    """Check that model and data are on this machine or within reach, without loading them.

    Raises:
        UserError: naming what works offline; for sequences beyond the model's context.
    """
    settings.validate_reach()
    if isinstance(settings, RunSettings) and settings.data != GIVEN:
        from nope_probe.models.context import validate_context  # needs transformers

        model, revision = settings.model, settings.revision
        validate_context(model, settings.seq_len, beyond=settings.beyond_context, revision=revision)


def load_model(settings: CommandSettings, device: str) -> LoadedModel | None:
    """Load the first layers that settings study, or all of a model that has fewer.

    Returns:
        The model; None if the settings name none.

    Raises:
        UserError: as `load_layers` does, also for fewer layers than `--layers` names.
    """
    if not isinstance(settings, RunSettings):
        return None
    try:
        return load_layers(settings, device, settings.depth)
    except TooFewLayersError:
        if settings.layers not in ("auto", "all"):
            raise
        return load_layers(settings, device, None)


def load_layers(settings: RunSettings, device: str, depth: int | None) -> LoadedModel:
    """Load some first layers of the model, all for None.

    Raises:
        UserError: if there is no such model, or it lacks a layer that the run measures.
    """
    doing = f"loading TransformerLens and {settings.model}"
    with status(doing, has_bars=is_on_hub(settings.model)):
        # TransformerLens takes seconds to import, and a finished run is shown without it.
        from nope_probe.models.load import load

        loaded = load(
            settings.model,
            n_layers=depth,
            device=device,
            dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
            revision=settings.revision,
            device_map=settings.device_map,
            n_ctx=settings.positions,
            allow_unused=settings.allow_unused,
            adapter=settings.adapter,
        )
    refuse(settings.mistakes_of(loaded.info))
    return loaded


def make_sequences(settings: RunSettings, loaded: LoadedModel) -> Sequences:
    """Make the inputs: vectors for a parameter-free model, tokens for any other.

    Args:
        settings: the run's.
        loaded: the model.

    Raises:
        UserError: if the model cannot take the data, or there are too few sequences.
    """
    info = loaded.info
    if settings.seq_len > info.n_ctx and not settings.beyond_context:
        raise beyond_context(settings.seq_len, info.n_ctx)
    if (settings.data == "gaussian") != info.parameter_free:
        kind = "gaussian vectors" if info.parameter_free else "text or random tokens"
        raise UserError(f"{info.name} takes {kind}, not --data {settings.data}")
    n_seqs, seq_len, seed = settings.n_seqs, settings.seq_len, settings.seed
    if settings.data == "gaussian":
        return gaussian(n_seqs, seq_len, info.d_model, settings.alpha, seed)
    made = sequences(
        settings.data,
        tokenizer=loaded.tokenizer,
        d_vocab=info.d_vocab,
        n_seqs=n_seqs,
        seq_len=seq_len,
        seed=seed,
        windows=settings.windows,
        bos=settings.bos,
        pack=settings.pack,
        shuffle=settings.shuffle,
    )
    validate_folds(settings.data, made.n_documents, settings.folds)
    return made


def as_sequences(model: HookedModel, given: Given) -> Sequences:
    """Return sequences with their properties; a first token that all share is a BOS token.

    Raises:
        UserError: for a model or inputs of another kind, or for inputs that the model cannot take.
    """
    inputs = as_inputs(model, given)
    if isinstance(given, Sequences):
        return given
    kind: InputKind = "vectors" if inputs.is_floating_point() else "text"
    return Sequences(inputs=inputs.cpu(), name="tokens", bos=begins_alike(inputs), kind=kind)


def on_inputs(settings: Chosen, data: Sequences, n_folds: int | None) -> Chosen:
    """Return the settings of a run on given sequences.

    Args:
        settings: of the run.
        data: its sequences.
        n_folds: into how many folds they are dealt; by default 8, or as many as there are
            documents.
    """
    n_seqs, seq_len = data.inputs.shape[:2]
    folds = folds_for_intervals(data, n_folds)
    return replace(settings, data=GIVEN, n_seqs=n_seqs, seq_len=seq_len, folds=folds)


def on_tokens(settings: Chosen, file: Path) -> tuple[Chosen, Sequences]:
    """Return the settings and the sequences of a run on the tokens of a file.

    Raises:
        UserError: for a flag that describes other sequences, or tokens that cannot be read.
    """
    settings.validate_tokens(file)
    data, default = read_tokens(file), type(settings).folds == settings.folds
    try:
        return on_inputs(settings, data, None if default else settings.folds), data
    except ValueError as error:
        raise UserError(f"--tokens {file.name}: {error}") from error


def first_layers(model: HookedModel, n_layers: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that attend, among some first layers or all.

    Raises:
        UserError: for more layers than there are, or no attention.
    """
    attending, depth = [layer.index for layer in layers_of(model)], len(blocks_of(model))
    if n_layers is not None and not 1 + attending[0] <= n_layers <= depth:
        raise UserError(f"expected from {1 + attending[0]} to {depth} layers, got {n_layers}")
    return tuple(layer for layer in attending if layer < (n_layers or depth))


def folds_for_intervals(inputs: Sequences, n_folds: int | None) -> int:
    """Return how many folds the sequences are dealt to, 4 at least; by default 8 or fewer.

    Raises:
        UserError: for too few folds, or more than there are sequences (documents).
    """
    most, kind = inputs.n_documents, "sequences" if inputs.documents is None else "documents"
    if most < 4:
        raise UserError(f"expected 4 {kind} or more for intervals, got {most}")
    if n_folds is None:
        return default_folds(most)
    if not 4 <= n_folds <= most:
        raise UserError(f"expected from 4 to {most} folds for {most} {kind}, got {n_folds}")
    return n_folds
