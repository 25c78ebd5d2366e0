"""All commands, in one table: the flags of each, its page, and what it runs, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from nope_probe.reports.page import Report
from nope_probe.run.flags import CommandSettings
from nope_probe.studies import ablate, attention, behaviour, circuit, compare, heads, trace

if TYPE_CHECKING:
    from nope_probe.run.folder import Run


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        settings: the class of its flags.
        report: makes the page of a finished run, without torch.
        study: imports torch and what it runs: a function from settings to the run's folder.
    """

    settings: type[CommandSettings]
    report: Callable[[Run], Report]
    study: Callable[[], Callable[..., Path]]


def lazy(name: str) -> Callable[[], Callable[..., Path]]:
    """Return a function that imports what a command runs, and returns it."""
    return partial(resolve_name, f"{__name__}.{name}")


COMMANDS: Mapping[str, Command] = {
    "ablate": Command(ablate.Settings, ablate.report, lazy("ablate_run:Ablate.run")),
    "attention": Command(attention.Settings, attention.report, lazy("attention_run:Attention.run")),
    "behaviour": Command(behaviour.Settings, behaviour.report, lazy("behaviour_run:Behaviour.run")),
    "circuit": Command(circuit.Settings, circuit.report, lazy("circuit_run:CaptureStages.run")),
    "compare": Command(compare.Settings, compare.report, lazy("compare_run:run")),
    "heads": Command(heads.Settings, heads.report, lazy("heads_run:Heads.run")),
    "trace": Command(trace.Settings, trace.report, lazy("trace_run:TracePosition.run")),
}
