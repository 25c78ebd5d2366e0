"""All commands, in one table: the flags of each, its page, and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe import studies
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


COMMANDS: Mapping[str, Command] = {
    "ablate": Command(ablate.Settings, ablate.report, lambda: studies.Ablate.run),
    "attention": Command(attention.Settings, attention.report, lambda: studies.Attention.run),
    "behaviour": Command(behaviour.Settings, behaviour.report, lambda: studies.Behaviour.run),
    "circuit": Command(circuit.Settings, circuit.report, lambda: studies.CaptureStages.run),
    "compare": Command(compare.Settings, compare.report, lambda: studies.compare_run.run),
    "heads": Command(heads.Settings, heads.report, lambda: studies.Heads.run),
    "trace": Command(trace.Settings, trace.report, lambda: studies.TracePosition.run),
}
