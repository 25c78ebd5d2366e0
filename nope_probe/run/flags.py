"""Flags: their bounds, their help, and the checks of all settings.

Numbers are within bounds, words are choices, paths are absolute, and a flag that has no effect
next to the other flags is refused, never ignored. A flag's help is in the docstring of its class.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from annotated_types import Interval
from docstring_parser.google import parse as parse_docstring
from pydantic import AfterValidator, Strict

from nope_probe.errors import UserError, as_tuple, did_you_mean, validate_types
from nope_probe.files import JsonObject, json_checksum, local_path
from nope_probe.run.processes import output_folder, validate_one_process

Chosen = TypeVar("Chosen", bound="CommandSettings")


LARGEST = 2**31 - 1  # so that products with sizes of a model fit into 64 bits
SEED = Interval(ge=0, le=2**32 - 1)  # as NumPy takes it
COUNT = Interval(ge=1, le=LARGEST)
LAYERS = Interval(ge=1, le=1000)
SEQ_LEN = Interval(ge=4, le=LARGEST)
ALPHA = Interval(ge=0, lt=1)
LocalPath = Annotated[Path, Strict(False), AfterValidator(local_path)]

Mistakes: TypeAlias = Iterator[tuple[object, str]]  # whether something is wrong, and the message


def refuse(mistakes: Mistakes) -> None:
    """Refuse the first mistake that is made.

    Raises:
        UserError: with its message.
    """
    for is_made, message in mistakes:
        if is_made:
            raise UserError(message)


class CommandSettings:
    """A base for the settings of commands: frozen dataclasses, whose fields are the flags.

    Numbers have an `Interval` and words are `Literal`s, in the annotations. A `LocalPath` becomes
    absolute; in Python it may be given as text. Values from Python are checked against their types
    too. By default a run has one process's CPU, no model and no files.

    Example:
        >>> from nope_probe.ablate import Settings
        >>> Settings(n_seqs=0)
        Traceback (most recent call last):
        nope_probe.errors.UserError: --n-seqs 0 should be greater than or equal to 1
    """

    command: ClassVar[str]
    function: ClassVar[str] = ""  # that runs the command from Python
    examples: ClassVar[tuple[str, ...]] = ()  # arguments, for its help
    showing: ClassVar[tuple[str, ...]] = ("image", "verbose", "dry_run")  # flags on what is shown
    boxes: ClassVar[Mapping[str, str]] = {}  # titles in its help, by the class's first flag there
    unrecorded: ClassVar[tuple[str, ...]] = ("out", "tokens")  # they change no number and no name
    in_one_process: ClassVar[bool] = True
    # Where settings have no such flag: see `RunSettings`.
    out: LocalPath | None = None
    tokens: LocalPath | None = None

    def __post_init__(self) -> None:
        kind: type = type(self)
        vars(self).update(validate_types(hints_of(kind), vars(self), flag_of))

    def chosen(self) -> JsonObject:
        """Return the settings that are not the default, by name."""
        every: Any = self
        return {f.name: x for f in fields(every) if (x := getattr(self, f.name)) != f.default}

    @property
    def program(self) -> tuple[str, ...]:
        """The words before the flags that run the command; a recipe is a script."""
        return ("python", "-m", f"nope_probe.{self.command}")

    def typed(self) -> str:
        """Return the command line that gives these settings, without those that are the default.

        Example:
            >>> from nope_probe.ablate import Settings
            >>> Settings(seq_len=32, shuffle=True, remove=("mask", "w_q")).typed()
            'python -m nope_probe.ablate --shuffle --seq-len 32 --remove mask w_q'
        """
        kind: type = type(self)
        words, hints = [*self.program], hints_of(kind)
        for name, value in self.chosen().items():
            if isinstance(value, bool):
                words.append(flag_of(name if value else f"no_{name}"))
            elif tyro.conf.Positional in get_args(hints[name]):
                words += map(str, as_tuple(value))
            else:
                words += [flag_of(name), *map(str, as_tuple(value))]
        return shlex.join(words)

    @property
    def device(self) -> str:
        """The torch device, or `auto`."""
        return "cpu"

    @property
    def subject(self) -> str:
        """What the default folder is named after: the model, if there is one."""
        return str(vars(self).get("model", ""))

    def recorded(self) -> JsonObject:
        """Return the settings that identify the run, as the manifest holds them."""
        return {name: value for name, value in vars(self).items() if name not in self.unrecorded}

    def sources(self) -> dict[str, Path | None]:
        """Return the paths of the model's and the data's files; None for files elsewhere."""
        return {}

    def memory(self, n_maps: int = 1, d_model: int = 0, n_heads: int = 0, d_vocab: int = 0) -> int:
        """Return the bytes that the run needs above its model, at least."""
        return 0

    def validate(self) -> None:
        """Check what can be checked without the model.

        Raises:
            UserError: naming the flag.
        """
        if self.in_one_process:
            validate_one_process()
        refuse(self.mistakes())

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before a model is loaded, each with a message and a way out."""
        yield from ()

    def validate_reach(self) -> None:
        """Check what names and files say of the model and the data, before torch is imported.

        Raises:
            UserError: naming what is not there, or what works offline.
        """


def folder_of(settings: CommandSettings, recorded: JsonObject) -> Path:
    """Return the folder of a run: `--out`, or a name of its command, its subject and a hash.

    Args:
        settings: the command's.
        recorded: what identifies the run, as its manifest holds it; the hash is of this.

    Example:
        >>> from nope_probe.ablate import Settings
        >>> folder_of(Settings(model="meta-llama/Llama-3.1-8B"), {"seed": 0}).as_posix()
        'runs/ablate-Llama-3.1-8B-de7d7744'
    """
    if settings.out is not None:
        return output_folder(settings.out)
    subject = Path(settings.subject).name or settings.subject
    name = re.sub(r"[^A-Za-z0-9.]+", "-", subject).strip("-")
    parts = (settings.command, name, json_checksum(recorded)[:8])
    return Path("runs") / "-".join(filter(None, parts))


def settings_from(kind: type[Chosen], values: Mapping[str, object]) -> Chosen:
    """Return settings from values by name, with tuples for lists and for single values.

    Args:
        kind: the class of the settings.
        values: some of its values.

    Raises:
        UserError: for a name that is no option, with the nearest option, or all of them.

    Example:
        >>> from nope_probe.behaviour import Settings
        >>> settings_from(Settings, {"measures": "loss", "remove": ["mask", "mlp"]}).remove
        ('mask', 'mlp')
    """
    dataclass_type: type = kind
    hints, chosen = hints_of(dataclass_type), JsonObject(values)
    for name, value in values.items():
        if name not in hints:
            instead = did_you_mean(name, hints) or f"there are {', '.join(sorted(hints))}"
            if name == "layer" and isinstance(value, int):  # `layers` is how many
                instead = f"did you mean layers='{value}:{value + 1}'?"
            raise UserError(f"unknown option {name!r}; {instead}")
        if value is not None and takes_several(hints[name]):
            chosen[name] = as_tuple(value)
    return kind(**chosen)


def takes_several(hint: object) -> bool:
    """Return whether values of a type are tuples, or tuples among others."""
    return get_origin(hint) is tuple or any(map(takes_several, get_args(hint)))


@cache
def hints_of(settings: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, with their annotations and their help.

    The help is the field's entry under `Attributes:` in the docstring of a class that declares it,
    or an annotation, where it holds names that the code knows.
    """
    helps: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        entries = parse_docstring(kind.__doc__ or "").params
        helps |= {entry.arg_name: " ".join((entry.description or "").split()) for entry in entries}
    hints: dict[str, Any] = get_type_hints(settings, include_extras=True)
    for name in helps.keys() & hints.keys():
        if not any(getattr(extra, "help", None) for extra in get_args(hints[name])):
            hints[name] = Annotated[hints[name], tyro.conf.arg(help=helps[name])]
    return {field.name: hints[field.name] for field in fields(settings)}


def flag_of(name: str) -> str:
    """Return the flag of a setting.

    Example:
        >>> flag_of("n_seqs")
        '--n-seqs'
    """
    return f"--{name.replace('_', '-')}"


def without_effect(settings: CommandSettings, names: Collection[str], reason: str) -> Mistakes:
    """Yield for each setting that is not the default whether it has no effect.

    Args:
        settings: the command's.
        names: of the settings without effect.
        reason: why they have no effect, as in `no effect on --data random`.
    """
    for name in settings.chosen():
        yield name in names, f"{flag_of(name)} has no effect {reason}"
