"""Session: a run of a command, from its settings to its folder, as every command uses it.

A session validates the settings and the run's folder before anything is computed, joins the
processes that share the run, loads the model, opens the checkpoint of an unfinished run, and turns
signals into a saved state. The computation is in the command's study. A run is resumed only where
settings, versions, weights, model files and data are the same: their hashes identify it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from nope_probe.data.documents import validate_folds
from nope_probe.data.sequences import Sequences, gaussian, read_tokens, sequences
from nope_probe.data.tokenizing import padding_note
from nope_probe.errors import TooFewLayersError, UserError, beyond_context
from nope_probe.files import JsonObject, json_checksum
from nope_probe.hooks.ablation import foreign_hooks
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import hugging_face_config, validate_inputs
from nope_probe.hooks.reading.calibration import tensor_checksum
from nope_probe.hooks.removing.written import ABLATED
from nope_probe.maps.folds import default_folds, folds_of
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import is_on_hub
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.flags import CommandSettings, folder_of, refuse
from nope_probe.run.folder import UNUSED_IN_FILE, Run, is_finished, record_sources, write_run
from nope_probe.run.manifest import FileRecord, Manifest, RunData, RunModel, versions
from nope_probe.run.process_group import (
    Processes,
    device_of_process,
    out_of_memory_is_a_user_error,
    process_group,
)
from nope_probe.run.processes import (
    Signals,
    checkpoint_dir,
    locked,
    print_line,
    status,
    validate_memory,
)
from nope_probe.run.settings import GIVEN, RunSettings

SIZES = "--seq-len, the number of sequences or samples, or that of layers"
OF_INPUTS = ("name", "bos", "bos_token", "sha256", "notes")  # what a manifest says of them
NOT_KEPT = "nothing was kept; a run with out=FOLDER goes on where it was interrupted"
Chosen = TypeVar("Chosen", bound=RunSettings)
Settings_co = TypeVar("Settings_co", covariant=True, bound=CommandSettings)
# Where a model came from, where it is, and who wrote it do not change its numbers.
_UNUSED = {*UNUSED_IN_FILE, "_commit_hash", "name_or_path", "model_name", "tokenizer_name"}
_UNUSED |= {"device", "n_devices"}


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
        UserError: if there is no such model, or it lacks a layer that the run measures.
    """
    if not isinstance(settings, RunSettings):
        return None
    doing = f"loading TransformerLens and {settings.model}"
    with status(doing, has_bars=is_on_hub(settings.model)):
        # TransformerLens takes seconds to import, and a finished run is shown without it.
        from nope_probe.models.load import load

        layers = partial(
            load,
            settings.model,
            device=device,
            dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
            revision=settings.revision,
            device_map=settings.device_map,
            n_ctx=settings.positions,
            allow_unused=settings.allow_unused,
            adapter=settings.adapter,
        )
        try:
            loaded = layers(n_layers=settings.depth)
        except TooFewLayersError:
            if settings.layers not in ("auto", "all"):
                raise
            loaded = layers(n_layers=None)
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


class Session(Generic[Settings_co]):
    """A run in progress, or a finished one.

    Args:
        settings: the command's.
        load: loads the model onto a device; by default the first layers that the settings name.
        model: a model in memory, which no name leads back to, in place of the one to load.
        inputs: the sequences, if the settings do not describe them.
        call: the call from Python that asked for the run; by default the command was typed.
        is_kept: whether the folder outlives the session, so that its page can be opened.

    Attributes:
        folder: the run's folder.
        finished: whether the folder holds the finished run; then no model is loaded.
        recorded: the settings as the manifest holds them.
        loaded: the model, if the run has one.
        weights: its fingerprint; empty without a model.
        files: the paths of the files of the model and of the data that the run reads.
        sources: the record of these files.
        checkpoint: the finished parts of the run, and its stream in progress.
        started: the start, in seconds of the monotonic clock, which is never set back.

    Raises:
        UserError: for tokens that cannot be read.
    """

    loaded: LoadedModel
    sources: dict[str, FileRecord | None]
    checkpoint: RunCheckpoint

    def __init__(
        self,
        settings: Settings_co,
        load: Callable[[Settings_co, str], LoadedModel | None] = load_model,
        *,
        model: LoadedModel | None = None,
        inputs: Sequences | None = None,
        call: str = "",
        is_kept: bool = True,
    ) -> None:
        self.typed = call or settings.typed()
        if isinstance(settings, RunSettings) and settings.tokens is not None:
            settings, inputs = on_tokens(settings, settings.tokens)
        self.settings, self._load_model = settings, load
        self.in_memory, self.inputs, self.is_kept = model, inputs, is_kept
        self.recorded = settings.recorded() | self._given()
        self.folder = folder_of(settings, self.recorded)
        self.files = settings.sources()
        if model is not None:
            self.files.pop("model", None)
        self.finished, self.started, self.weights = False, time.monotonic(), ""
        self.processes = Processes()

    def _given(self) -> JsonObject:
        """Return the identity of the model and of the sequences that have no path."""
        record = JsonObject()
        if self.in_memory is not None:
            model = self.in_memory.model
            record = {"weights": fingerprint(model), **interventions(model)}
        if self.inputs is not None:
            checksum = tensors_checksum(self.inputs.to_tensors())
            record |= {"inputs": checksum, "kind": self.inputs.kind}
        return {"given": record} if record else {}

    @contextmanager
    def opened(self) -> Iterator[Session[Settings_co]]:
        """Check the settings, and prepare the run unless it is finished.

        Raises:
            UserError: for settings, a folder or a model that cannot be used, and for the finished
                run of a model in memory: whatever changed the model since cannot be seen; at the
                end, if the device ran out of memory.
            Interrupted: on a signal; progress is saved.
        """
        self.settings.validate()
        self.finished = is_finished(self.folder, self.recorded, self.files)
        if self.finished and self.in_memory is not None:
            raise UserError(
                f"{self.folder} holds a finished run, and a model in memory is run anew: name "
                "another folder, or take read_run to read it"
            )
        with ExitStack() as stack:
            if not self.finished:
                self._start(stack)
            yield self
            self.processes.barrier()

    def _start(self, stack: ExitStack) -> None:
        """Join the processes, lock the run, load the model and open the checkpoint."""
        validate_memory(self.settings.memory(), SIZES)
        signals = stack.enter_context(Signals())
        if self.in_memory is None:
            with status("looking for model and data"):
                validate_reach(self.settings)
        with status("loading torch"):
            of_model = self.in_memory and next(self.in_memory.model.parameters()).device
            device = device_of_process(str(of_model or self.settings.device))
        self.processes = stack.enter_context(process_group(device))
        stack.enter_context(out_of_memory_is_a_user_error())
        if self.processes.is_first:
            stack.enter_context(locked(checkpoint_dir(self.folder)))
            self.finished = is_finished(self.folder, self.recorded, self.files)  # again
        self.finished = self.processes.broadcast(self.finished)
        if not self.finished:
            about, folder = self._load(device), checkpoint_dir(self.folder)
            checkpoint = RunCheckpoint(folder, about, self.processes, signals)
            self.checkpoint = stack.enter_context(checkpoint)
            if not self.is_kept:
                signals.message = NOT_KEPT

    def _load(self, device: str) -> JsonObject:
        """Load the model, if the run has one, and return the run's identity."""
        self.sources = record_sources(self.files)
        loaded = self.in_memory or self._load_model(self.settings, device)
        if loaded is not None:
            given = self.recorded.get("given", {})
            self.loaded, self.weights = loaded, given.get("weights") or fingerprint(loaded.model)
        made_with = {"settings": self.recorded, "versions": versions(), "weights": self.weights}
        return made_with | self.sources

    def sequences(
        self: Session[RunSettings], key: str = "inputs", *, settings: RunSettings | None = None
    ) -> Sequences:
        """Return the run's sequences: made once, in the first process, and then read.

        Args:
            key: the sequences' name in the checkpoint.
            settings: of other sequences than those of the run.

        Raises:
            UserError: in the first process, if they cannot be made.
        """
        if key not in self.checkpoint:
            tensors = {}
            if self.processes.is_first:
                made, chosen = self.inputs, settings or self.settings
                if made is None or settings is not None:
                    with status(f"reading {chosen.data}"):
                        made = make_sequences(chosen, self.loaded)
                validate_inputs(self.loaded.model, made.inputs)
                tensors = made.to_tensors()
            self.checkpoint.save(key, tensors)
        return Sequences.from_tensors(self.checkpoint.load(key))

    def manifest(self) -> Manifest:
        """Return the manifest of any run: its identity, settings, versions and duration."""
        manifest = Manifest(
            kind=self.settings.command,
            command=self.typed,
            settings=self.recorded,
            versions=versions(),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self.started, 3),
            sources=self.sources,
        )
        if not self.weights:
            return manifest
        parameters = list(self.loaded.model.parameters())
        return replace(
            manifest,
            model=RunModel(**vars(self.loaded.info), weights=self.weights),
            threads=torch.get_num_threads(),
            device=", ".join(sorted({str(parameter.device) for parameter in parameters})),
            dtype=str(parameters[0].dtype).removeprefix("torch."),
        )

    def manifest_of(self: Session[RunSettings], inputs: Sequences) -> Manifest:
        """Return the manifest of a run of a model on sequences; a text alone is one fold."""
        n_folds = self.settings.folds if self.settings.reads_corpus else 1
        fold_of = folds_of(len(inputs), n_folds, inputs.documents)
        padding = padding_note(inputs.inputs, self.loaded.tokenizer, bos=inputs.bos)
        return replace(
            self.manifest(),
            data=RunData(**{name: getattr(inputs, name) for name in OF_INPUTS}, padding=padding),
            documents=None if inputs.documents is None else inputs.n_documents,
            distinct_sequences=inputs.n_distinct,
            fold_sizes=tuple(fold_of.bincount().tolist()),
            skip_keys=self.settings.n_first(inputs.kind != "vectors"),
        )

    def write(self, run: Run) -> None:
        """Write the finished run, and remove the checkpoint."""
        write_run(self.folder, run)
        self.checkpoint.discard()
        if run.manifest.seconds:
            print_line(f"took {run.manifest.seconds:.0f} s")


def fingerprint(model: nn.Module) -> str:
    """Return a hash of every weight, buffer and setting, which identifies a model in memory.

    Buffers that are not stored with the weights count too, such as RoPE's frequencies.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 3)
        >>> before = fingerprint(layer)
        >>> layer.weight.data[2, 1] += 1
        >>> before == fingerprint(layer)
        False
    """
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    return tensors_checksum(tensors, numerical_settings(model))


def tensors_checksum(tensors: Mapping[str, Tensor], *about: JsonObject) -> str:
    """Return a hash of the bits of tensors, and of what else identifies their owner."""
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    return json_checksum([*about, checksums])[:16]


def interventions(model: HookedModel) -> dict[str, str | list[str] | None]:
    """Return what changes a model in memory besides its weights: the ablation, and its hooks.

    `hooks` are the modules on which the user has hooks, `ablation` is the one in effect.
    """
    active = ABLATED.get(model)
    ablation = None if active is None else str(active.ablation)
    return {"ablation": ablation, "hooks": foreign_hooks(model)}


def numerical_settings(model: nn.Module) -> JsonObject:
    """Return the settings that a model's numbers depend on besides its weights.

    A bridge has those of its Hugging Face model, other models those of TransformerLens; a model
    without either has none.
    """
    values, config = hugging_face_config(model), getattr(model, "cfg", None)
    if values is None:
        values = {} if config is None else config.to_dict()
    values = json.loads(json.dumps(values, sort_keys=True, default=_plain))
    return {name: value for name, value in values.items() if name not in _UNUSED}


def _plain(value: Any) -> object:
    """Return a configuration's value as JSON: numbers of NumPy, dtypes and functions by name."""
    if hasattr(value, "item"):
        return value.item()
    return getattr(value, "__name__", None) or str(type(value) if " at 0x" in str(value) else value)


def input_arrays(inputs: Sequences) -> dict[str, np.ndarray]:
    """Return the sequences as `tokens` or `vectors`: a run can be repeated without its data.

    Sequences that are cut out of documents come with their numbers, `documents`.
    """
    name = "vectors" if inputs.inputs.is_floating_point() else "tokens"
    arrays = {name: inputs.inputs.numpy()}
    if inputs.documents is not None:
        arrays["documents"] = inputs.documents.numpy()
    return arrays
