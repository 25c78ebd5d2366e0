"""The public `run_*` functions: a command's run of a model by name, or of a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import reduce
from inspect import getdoc, signature
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from types import GenericAlias, UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

import tyro

from nope_probe.errors import UserError, as_tuple
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.layers.objects import Model
from nope_probe.hooks.removing.written import ABLATED
from nope_probe.models.names import validate_reachable
from nope_probe.run.flags import hints_of, refuse, settings_from
from nope_probe.run.folder import Run, read_run
from nope_probe.run.process_group import device_of_process
from nope_probe.run.processes import print_line, process_count
from nope_probe.run.session import Session, on_inputs
from nope_probe.run.settings import OF_INPUTS, RunSettings
from nope_probe.studies.commands import COMMANDS
from nope_probe.studies.readings import as_sequences
from nope_probe.studies.study import Study

ModelOrName: TypeAlias = str | Model
Out: TypeAlias = Path | str | None
Settings = TypeVar("Settings", bound=RunSettings)
Function = TypeVar("Function", bound=Callable[..., Run])
OF_MODEL = ("adapter", "tokens", "revision", "allow_unused", "device", "device_map", "dtype")


def takes_options(settings: type, function: Function) -> Function:
    """Return a function that shows the flags of its command as its options.

    `inspect.signature` gives their types and defaults, and the docstring the sentences of `--help`.
    """
    shown = signature(function)
    *parameters, _ = shown.parameters.values()
    described, raises, rest = (getdoc(function) or "").partition("\n\nRaises:")
    for name, hint in hints_of(settings).items():
        extras = get_args(hint)
        if name not in shown.parameters and tyro.conf.Suppress not in extras:
            option = parameters[-1].replace(name=name, default=getattr(settings, name))
            parameters.append(option.replace(annotation=taken_for(hint)))
            (said,) = [extra.help for extra in extras if getattr(extra, "help", None)]
            described += "\n" + fill(f"    {name}: {said}", 92, subsequent_indent=" " * 8)
    vars(function)["__signature__"] = shown.replace(parameters=parameters)
    function.__doc__ = described + raises + rest
    return function


def taken_for(hint: object) -> Any:
    """Return the type that a call from Python takes for a setting of some type.

    Example:
        >>> taken_for(tuple[str, ...] | Path | None)
        str | collections.abc.Collection[str] | pathlib.Path | None
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return taken_for(arguments[0])
    if origin is tuple:
        return arguments[0] | GenericAlias(Collection, arguments[:1])
    if origin in (Union, UnionType):
        return reduce(or_, map(taken_for, arguments))
    return Path | str if hint is Path else hint


def run_of(
    study: type[Study[Settings]],
    kind: type[Settings],
    model: ModelOrName,
    inputs: Given | None,
    out: Out,
    options: Mapping[str, object],
) -> Run:
    """Run a command from Python, and read its tables and maps.

    A model in memory is studied in all of its layers, unless the options say otherwise.

    Args:
        study: the command's.
        kind: the class of its settings.
        model: a name, as the command takes it, what `load` returns, a HookedTransformer or a
            TransformerBridge.
        inputs: what the captures take; by default the sequences that the options describe.
        out: the folder of the run; by default a temporary one.
        options: the command's flags, with underscores.

    Raises:
        UserError: for what cannot be done.
    """
    if out is None and process_count() > 1:
        raise UserError("several processes share the folder of a run: name it, out=FOLDER")
    options = {**options, "out": out}
    if isinstance(model, str):
        options["model"] = model
    _validate_options(options, inputs)
    settings, loaded, data = settings_from(kind, options), None, None
    if isinstance(model, str):
        if inputs is not None:  # whose sequences are made with its tokenizer
            validate_reachable(settings.model, settings.revision)
            loaded = study.load(settings, device_of_process(settings.device))
    else:
        _validate_absent(options, OF_MODEL, "a model in memory")
        from nope_probe.models.load import as_loaded  # needs TransformerLens

        loaded = as_loaded(model)
        layers = settings.layers if "layers" in options else "all"
        settings = replace(settings, model=loaded.info.name, layers=layers)
        refuse(settings.mistakes_of(loaded.info))
        if settings.removes and loaded.model in ABLATED:
            instead = " or take confirm=0" if "confirm" in vars(settings) else ""
            raise UserError(
                "the model is ablated already, and this run removes components itself: leave "
                f"`ablated` first{instead}"
            )
    in_memory = None if isinstance(model, str) else loaded
    call = call_of(settings, in_memory is not None, inputs is not None)
    if inputs is not None and loaded is not None:
        data = as_sequences(loaded.model, inputs)
        settings = on_inputs(settings, data, settings.folds if "folds" in options else None)
    with TemporaryDirectory(prefix="nope-probe-") as temporary:
        settings = replace(settings, out=settings.out or Path(temporary, "run"))
        session = Session(
            settings,
            study.load if loaded is None else lambda settings, device: loaded,
            inputs=data,
            model=in_memory,
            call=call,
            is_kept=out is not None,
        )
        run = read_run(study.carry_out(session))
    if run.manifest.data.padding:
        print_line(run.manifest.data.padding)
    return replace(run, headline=COMMANDS[kind.command].report(run).headline.html())


def call_of(settings: RunSettings, in_memory: bool, on_inputs: bool) -> str:
    """Return the call of a function that gives settings, without those that are the default.

    Args:
        settings: as they were asked for.
        in_memory: whether the model is one in memory.
        on_inputs: whether sequences were given.

    Example:
        >>> from nope_probe.ablate import Settings
        >>> call_of(Settings(seq_len=32, remove=("mask",)), False, True)
        "run_ablations('rope-tiny', inputs, seq_len=32, remove=('mask',))"
    """
    chosen = settings.chosen()
    chosen.pop("model", None)
    given = ["model" if in_memory else repr(settings.model), *["inputs"] * on_inputs]
    values = {k: str(v) if isinstance(v, Path) else v for k, v in chosen.items()}
    return f"{settings.function}({', '.join([*given, *(f'{k}={v!r}' for k, v in values.items())])})"


def _validate_options(options: Mapping[str, object], inputs: Given | None) -> None:
    """Check for options that no call from Python takes, or that given inputs leave without effect.

    Raises:
        UserError: naming the option.
    """
    named = options.get("replacement")
    if named is not None and not all(isinstance(name, str) for name in as_tuple(named)):
        raise UserError(
            "a run takes replacements by name: a weight that you make is for Ablation and ablated, "
            "inside which capture_scores and capture_losses measure the model"
        )
    if inputs is not None:
        _validate_absent(options, (*OF_INPUTS, "tokens"), "given inputs")


def _validate_absent(options: Mapping[str, object], names: Collection[str], given: str) -> None:
    for name in options:
        if name in names:
            raise UserError(f"{name} has no effect next to {given}: leave it out")
