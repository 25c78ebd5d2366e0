"""The command line: settings parsed by tyro, and every end of a command in one line on stderr."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated, Any, NoReturn, TypeVar, get_args

import tyro
from docstring_parser.google import parse as parse_docstring

from nope_probe.errors import UserError, did_you_mean, line_of, printable
from nope_probe.files import JsonObject, validate_image
from nope_probe.run.flags import CommandSettings, flag_of, folder_of, hints_of
from nope_probe.run.processes import (
    HEAD_START,
    Signals,
    is_first_of_machine,
    is_first_process,
    process_count,
    program,
    record_error,
    status,
)
from nope_probe.studies.commands import COMMANDS, Command

Settings = TypeVar("Settings", bound=CommandSettings)
NARROWEST = 20  # columns of a terminal: rich prints nothing into 0, and tyro never ends below 8
GROUP = "_group"  # at the end of the names of groups of flags


@dataclass(frozen=True, kw_only=True)
class Showing:
    """Flags on what is shown, which do not identify a run.

    Attributes:
        image: Draw the first figure of the page into this .pdf, .png or .svg file too (needs
            Chrome).
        verbose: Print all tables, and how to read them; without it, the result alone.
        dry_run: Print the passes, their memory and, after a timed batch of each kind, their time.
    """

    image: Path | None = None
    verbose: bool = False
    dry_run: bool = False


def parse(
    settings: type[Settings], showing: Sequence[str] = (), subcommand: str = ""
) -> tuple[Settings, JsonObject]:
    """Return the settings on the command line, and the values of further flags by name.

    Args:
        settings: a dataclass, whose docstring is the help.
        showing: the flags on what is shown.
        subcommand: the name that was typed before the flags, if one was.

    Raises:
        UserError: for an image that cannot be drawn at that path.
    """
    typed = " ".join(filter(None, [*program(), subcommand]))
    arguments = sys.argv[2:] if subcommand else sys.argv[1:]
    if "--version" in arguments:
        print_version()
    see = f"(see {typed} --help)"
    with one_line_for_a_box(see):
        groups: Any
        groups, unknown = tyro.cli(
            in_boxes(settings, showing),
            prog=typed,
            args=arguments,
            description=help_text(settings, [f"{typed} {given}" for given in settings.examples]),
            return_unknown_args=True,
        )
    if unknown:
        declared: type = settings
        hidden, hints = tyro.conf.Suppress, hints_of(declared)
        shown = [*(name for name in hints if hidden not in get_args(hints[name])), *showing]
        given = " ".join(unknown)
        instead = did_you_mean(unknown[0], map(flag_of, shown))
        layer = re.match(r"--layer[ =]L?(\d+)", given)
        if layer and "layers" in shown:  # of which a number is how many
            instead = f"did you mean --layers {layer[1]}:{int(layer[1]) + 1}?"
        if not given.startswith("-"):
            instead = "a value follows its flag, as --model NAME does"
        raise UserError("; ".join(filter(None, [f"unknown: {given}", instead])) + f" {see}")
    values = dict(vars(groups))
    for name in [name for name in values if name.endswith(GROUP)]:
        values |= vars(values.pop(name))
    if process_count() > 1:  # so that torch prints nothing about a connection that it loses
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    chosen = {name: values.pop(name) for name in showing}
    if chosen.get("image") is not None:
        validate_image(chosen["image"])
    return settings(**values), chosen


def help_text(settings: type, examples: Sequence[str]) -> str:
    """Return the description of settings, and command lines as examples, above the boxes of help.

    tyro joins all lines but those that are indented, and wraps none.
    """
    width = min(100, shutil.get_terminal_size().columns)
    indented = TextWrapper(width, initial_indent="  ", subsequent_indent="  ")
    described = parse_docstring(settings.__doc__ or "").description or ""
    first, *others = described.split("\n\n")
    lines = [first, *map(indented.fill, others)]
    if examples:
        lines += ["", "Examples:", *(f"  {example}".rstrip() for example in examples)]
    return "\n".join(lines)


def print_version() -> NoReturn:
    """Print the version of the package, and end the process."""
    sys.stdout.write(f"nope-probe {version('nope-probe')}\n")
    sys.exit(0)


def in_boxes(settings: type[CommandSettings], showing: Sequence[str]) -> type:
    """Return a dataclass of dataclasses: the flags of each box of the help.

    The flags that a command declares itself are in the first box, which has no title.
    """
    titles: dict[str, str] = {}
    for kind in filter(is_dataclass, reversed(settings.__mro__)):
        title = ""
        for name in (setting.name for setting in fields(kind)):
            title = vars(kind).get("boxes", {}).get(name, title)
            titles.setdefault(name, "" if kind is settings else title)
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    declared: type = settings
    for setting in fields(declared):
        hint, default = hints_of(declared)[setting.name], field(default=setting.default)
        groups.setdefault(titles[setting.name], []).append((setting.name, hint, default))
    for name in showing:
        groups.setdefault("output", []).append((name, hints_of(Showing)[name], vars(Showing)[name]))
    boxes: list[Any] = []
    for title, flags in groups.items():
        if not title:
            boxes += flags
            continue
        box: Any = make_dataclass("Group", flags)
        shown = (tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title, help=""))
        boxes.append((title + GROUP, Annotated[box, *shown]))
    return make_dataclass("Groups", boxes, kw_only=True)


def run_and_show(command: Command, subcommand: str = "") -> None:
    """Run a command line, and print its result; draw its first figure for `--image`.

    A finished run is shown without torch. With `--dry-run`, only what would be run is printed.
    """
    # Threads of torch that spin while they wait take the cores of other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with one_line_errors():
        chosen, shown = parse(command.settings, command.settings.showing, subcommand)
        chosen.validate()
        dry = shown.pop("dry_run", False)
        if dry and any(shown.values()):
            raise UserError(
                "--image and --verbose have no effect with --dry-run, which runs nothing"
            )
        from nope_probe.run.folder import is_finished  # pandas, which --help lacks

        recorded = chosen.recorded()
        folder = folder_of(chosen, recorded)
        # Tokens of a file identify their run, and take torch to read.
        if dry or chosen.tokens or not is_finished(folder, recorded, chosen.sources()):
            with status("looking for model and data"):
                chosen.validate_reach()
            with status("loading torch"):
                run = command.study()
            folder = run(chosen, dry=True) if dry else run(chosen)
        if dry:
            return
        if is_first_process():
            from nope_probe.studies.page import show

            show(command.report, folder, **shown)


def run_subcommand() -> None:
    """Run the command that the first argument names, or list all commands.

    Raises:
        UserError: for a name that is no command.
    """
    given = sys.argv[1:2]
    if given in ([], ["--help"], ["-h"]):
        sys.stdout.write(overview())
        return
    if given == ["--version"]:
        print_version()
    (name,) = given
    if name not in COMMANDS:
        there = f"there are {', '.join(COMMANDS)}"
        raise UserError(f"no command {name!r}; {did_you_mean(name, COMMANDS)} {there}")
    run_and_show(COMMANDS[name], name)


def overview() -> str:
    """Return the help of the umbrella command: what each command does, in one line."""
    typed = " ".join(program())
    lines = [
        f"usage: {typed} COMMAND [OPTIONS]",
        "",
        "Find where a decoder's positional attention pattern comes from: the causal mask, RoPE, or",
        "the learned weights.",
        "",
        "commands:",
        *(f"  {name:<10} {import_module(f'nope_probe.{name}').__doc__}" for name in COMMANDS),
        "",
        "examples:",
        f"  {typed} ablate --model rope-tiny",
        f"  {typed} circuit --help",
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def one_line_for_a_box(see: str) -> Iterator[None]:
    """Turn the box that tyro draws on stderr around an error into one line.

    Raises:
        UserError: with the first paragraph in the box, and what to see.
    """
    drawn = io.StringIO()
    try:
        with redirect_stderr(drawn):
            yield
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        lines = [line.strip("│| \t") for line in drawn.getvalue().splitlines()]
        in_box = takewhile(re.compile(r"\w").search, lines[1:])  # after the title
        text = " ".join(in_box) or " ".join(lines)  # of which some are no box
        text = text.removeprefix("Error parsing ").rstrip(".")
        text = re.sub(r"invalid literal for int.*: (.*)", r"expected a whole number, got \1", text)
        text = re.sub(r"could not convert string to float: ", "expected a number, got ", text)
        raise UserError(f"{text} {see}") from None
    except AssertionError as error:  # an unknown shell for --tyro-print-completion
        raise UserError(str(error)) from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on stderr for an error that is no fault of the code.

    A user's mistake has exit code 2, a fault of the environment (a full disk, a closed terminal) 1,
    an interruption 130 (SIGINT) or 143 (SIGTERM). Of the processes that torchrun starts on a
    machine, the first prints its line; torchrun prints which failed first, and its error. A reader
    of stdout that goes away (`| head`) ends the process as SIGPIPE does.
    """
    open_standard_streams()
    try:
        try:
            with Signals(message=""), _one_line_warnings():
                yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        said = f": {error}" if str(error) else ""
        _end(f"interrupted{said}", 128 + getattr(error, "signum", signal.SIGINT))
    except BrokenPipeError:
        discard_output()
        sys.exit(128 + signal.SIGPIPE)
    except (UserError, OSError, MemoryError) as error:
        if isinstance(error, OSError):
            discard_output()
        text, code = line_of(error)
        record_error(UserError(text))  # without a traceback
        _end(f"error: {text}", code)
    except Exception as error:
        record_error(error)
        raise


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Show warnings for users as one line of the first process, without a place in the code."""
    with_place: Any = warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], *place: Any) -> str:
        if category is not UserWarning:
            return with_place(message, category, *place)
        return f"{printable(str(message))}\n" * is_first_of_machine()

    warnings.formatwarning = formatted  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = with_place


def open_standard_streams() -> None:
    """Open closed standard streams on nothing, and let output escape what it cannot encode.

    Without this, the next file that is opened takes the number of a closed stream, and its output.
    A container may set the terminal's columns to 0, into which nothing fits.
    """
    if "COLUMNS" in os.environ:
        os.environ["COLUMNS"] = str(max(NARROWEST, shutil.get_terminal_size().columns))
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = io.TextIOWrapper(io.FileIO(os.devnull, mode), encoding="utf-8")
            setattr(sys, name, stream)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):  # in a notebook it is of another kind
            output.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Send the rest of stdout nowhere, so that the interpreter can end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(message: str, code: int) -> NoReturn:
    """End the process, after its line if it is the first of its machine."""
    if is_first_of_machine():
        sys.stderr.write(f"{printable(message)}\n")
    elif code < 128:
        # The line has to come first: torchrun ends all processes as soon as a process ends.
        time.sleep(HEAD_START)
    sys.exit(code)
