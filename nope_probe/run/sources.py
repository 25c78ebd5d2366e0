"""The model and the sequences that settings describe: whether they are within reach, and made."""

from __future__ import annotations

import torch

from nope_probe.data.documents import file_of, is_data_set, validate_folds, validate_readable
from nope_probe.data.sequences import Sequences, gaussian, sequences
from nope_probe.errors import TooFewLayersError, UserError, beyond_context
from nope_probe.hooks.layers.model import validate_inputs
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import is_on_hub, validate_hub_answers, validate_reachable
from nope_probe.run.processes import status
from nope_probe.run.settings import RunSettings, SessionSettings


def validate_reach(settings: SessionSettings) -> None:
    """Check that model and data are on this machine or within reach, without loading them.

    Raises:
        UserError: naming what works offline; for sequences beyond the model's context.
    """
    if not isinstance(settings, RunSettings):
        return
    from nope_probe.models.context import validate_context  # needs transformers

    model, revision = settings.model, settings.revision
    validate_reachable(model, revision)
    validate_context(model, settings.seq_len, beyond=settings.beyond_context, revision=revision)
    if not settings.reads_corpus:
        return
    if not is_data_set(settings.data):
        validate_readable(settings.data)
    elif file_of(settings.data) is None:
        validate_hub_answers(f"the data set {settings.data}")


def load_model(settings: SessionSettings, device: str) -> LoadedModel | None:
    """Load the first layers of the model that settings name; None if they name none.

    Raises:
        UserError: if there is no such model.
    """
    if not isinstance(settings, RunSettings):
        return None
    return load_first_layers(settings, device)


def load_first_layers(settings: RunSettings, device: str) -> LoadedModel:
    """Load the first layers that settings study: by default 4, or all of a model that has fewer.

    Raises:
        UserError: as `load_layers` does.
    """
    try:
        return load_layers(settings, device, settings.depth)
    except TooFewLayersError:
        if settings.layers != "auto":
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
    settings.validate_layers(loaded.info)
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
        start=settings.windows,
        bos=settings.bos,
        pack=settings.pack,
        shuffle=settings.shuffle,
    )
    validate_inputs(loaded.model, made.inputs)
    validate_folds(settings.data, made.n_documents, settings.folds)
    return made
