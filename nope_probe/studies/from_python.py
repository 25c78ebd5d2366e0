"""The public `run_*` functions: a command's run of a model by name, or of a model in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TypeAlias, TypeVar

from nope_probe.errors import UserError, as_tuple
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.layers.objects import Model
from nope_probe.hooks.removing.block_ablation import is_ablated
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import validate_reachable
from nope_probe.models.parity import as_loaded
from nope_probe.run.folder import Run
from nope_probe.run.process_group import own_device
from nope_probe.run.processes import process_count
from nope_probe.run.session import Call
from nope_probe.run.settings import OF_INPUTS, RunSettings, options_of, settings_from
from nope_probe.run.sources import load_first_layers
from nope_probe.studies.engine import as_sequences, on_inputs
from nope_probe.studies.study import Study, run_study

ModelOrName: TypeAlias = str | Model
Settings = TypeVar("Settings", bound=RunSettings)
Result = TypeVar("Result", bound=Run)
Function = TypeVar("Function", bound=Callable[..., Run])
OF_MODEL = ("adapter", "tokens", "revision", "allow_unused", "device", "device_map", "dtype")


def takes(kind: type[RunSettings]) -> Callable[[Function], Function]:
    """Attach to a function of any options the signature and the help of a command's settings.

    Args:
        kind: the class of the settings; parameters of the function's own take their place.
    """

    def documented(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options, lines = [], [""]
        for option, text in options_of(kind):
            if option.name not in signature.parameters:
                options.append(option)
                lines += wrap(
                    f"{option.name}: {text}",
                    width=100,
                    initial_indent=" " * 8,
                    subsequent_indent=" " * 12,
                    break_on_hyphens=False,
                )
        function.__annotations__ |= {option.name: option.annotation for option in options}
        before, raises, after = (function.__doc__ or "").partition("\n\n    Raises:")
        function.__doc__ = before + "\n".join(lines) + raises + after
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *options])
        return function

    return documented


def run_of(
    result: type[Result],
    study: type[Study[Settings]],
    kind: type[Settings],
    model: ModelOrName,
    inputs: Given | None,
    out: Path | str | None,
    options: Mapping[str, object],
) -> Result:
    """Run a command from Python, and read its tables and maps.

    Args:
        result: the class of what is read.
        study: the command's.
        kind: the class of its settings.
        model: a name, as the command takes it, or a model that `load` takes or returns.
        inputs: what the captures take; by default the sequences that the options describe.
        out: the folder of the run; by default a temporary one.
        options: the command's flags, with underscores.

    Raises:
        UserError: for what cannot be done.
    """
    if out is None and process_count() > 1:
        raise UserError("several processes share the folder of a run: name it, out=FOLDER")
    settings, call = _settings_of(kind, model, inputs, {**options, "out": out})
    with TemporaryDirectory(prefix="nope-probe-") as temporary:
        settings = replace(settings, out=settings.out or Path(temporary, "run"))
        folder = run_study(study, settings, replace(call, is_kept=out is not None))
        return result.read(folder)


def _settings_of(
    kind: type[Settings], model: ModelOrName, inputs: Given | None, options: Mapping[str, object]
) -> tuple[Settings, Call]:
    """Return the settings of a run, and the model and sequences that are not made from them.

    A model in memory is studied in all of its layers, and given sequences are dealt to 8 folds or
    as many as there are documents, unless the options say otherwise.

    Raises:
        UserError: for an option that does not exist, or has no effect.
    """
    named = options.get("replacement")
    if named is not None and not all(isinstance(name, str) for name in as_tuple(named)):
        raise UserError(
            "a run takes replacements by name: a weight of your own is for Ablation and ablated, "
            "inside which capture_scores and capture_losses measure the model"
        )
    if inputs is not None:
        _refuse(options, (*OF_INPUTS, "tokens"), "inputs of your own")
    if isinstance(model, str):
        settings = settings_from(kind, {**options, "model": model})
        if inputs is None:
            return settings, Call()
        loaded = _load(settings)
    else:
        settings = settings_from(kind, {"layers": "all", **options})
        _refuse(options, OF_MODEL, "a model in memory")
        loaded = as_loaded(model)
        settings = replace(settings, model=loaded.info.name)
        settings.validate_layers(loaded.info)
        _validate_intact(loaded, settings)
    if inputs is None:
        return settings, Call(loaded=loaded)
    data = as_sequences(loaded.model, inputs)
    n_folds = settings.folds if "folds" in options else None
    return on_inputs(settings, loaded, data, n_folds, is_named=isinstance(model, str))


def _validate_intact(loaded: LoadedModel, settings: RunSettings) -> None:
    """Check that a model is outside `ablated`, where a run cannot remove components itself."""
    if settings.removes and is_ablated(loaded.model):
        instead = " or take confirm=0" if "confirm" in vars(settings) else ""
        raise UserError(
            "the model is ablated already, and this run removes components itself: leave "
            f"`ablated` first{instead}"
        )


def _refuse(options: Mapping[str, object], names: Collection[str], given: str) -> None:
    for name in options:
        if name in names:
            raise UserError(f"{name} has no effect next to {given}: leave it out")


def _load(settings: RunSettings) -> LoadedModel:
    """Load the model that the settings name, before the run: inputs become its tokens."""
    validate_reachable(settings.model, settings.revision)
    return load_first_layers(settings, own_device(settings.device))
