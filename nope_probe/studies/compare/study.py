"""The `compare` command's run: finished runs next to each other, without their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nope_probe.errors import UserError
from nope_probe.run.folder import Run
from nope_probe.run.identity import versions
from nope_probe.run.processes import command_line, status
from nope_probe.run.session import Session
from nope_probe.studies.compare.analyse import differences_table, explorer_of_runs
from nope_probe.studies.compare.members import Member, read_members, share_sequences
from nope_probe.studies.compare.page import headline, report
from nope_probe.studies.compare.settings import Settings
from nope_probe.studies.page import show


@dataclass(frozen=True, kw_only=True)
class Compared(Settings):
    """The settings, and the runs that they name.

    Attributes:
        members: the runs, read and checked.
    """

    members: Sequence[Member]

    @property
    def subject(self) -> str:
        """The command that wrote the runs, for the default folder's name."""
        return self.members[0].kind

    def recorded(self) -> dict[str, Any]:
        """Return the identity of a comparison: the runs' names, and their files' checksums."""
        runs = [
            {"label": member.label, "checksums": dict(member.manifest["checksums"])}
            for member in self.members
        ]
        return {"runs": runs}


def run(settings: Settings) -> Path:
    """Compare the runs unless the comparison is finished, and return its folder.

    Raises:
        UserError: for runs that cannot be compared, or a folder inside a run.
    """
    return run_members(settings, read_members(settings.runs, settings.labels))


def run_members(settings: Settings, members: Sequence[Member]) -> Path:
    """Compare runs that were read and checked; see `run`."""
    session = Session("compare", Compared(**vars(settings), members=members))
    folder = session.folder
    for member in members:
        if folder.resolve().is_relative_to(member.folder.resolve()):
            raise UserError(
                f"{folder} is in the run {member.folder}: take --out outside of the runs"
            )
    with session:
        if not session.finished:
            with status("comparing and writing", in_logs=True):
                session.write(analyse(session, members))
    return folder


def analyse(session: Session[Compared], members: Sequence[Member]) -> Run:
    """Compare the runs' tables, and return the run."""
    table = differences_table(members)
    if table.empty:
        raise UserError("the runs have no numbers in common")
    manifest = {
        "command": command_line(),
        "kind": "compare",
        "settings": session.recorded,
        "compared": members[0].kind,
        "labels": [member.label for member in members],
        "folders": [str(member.folder) for member in members],
        "same_sequences": share_sequences(members),
        "headline": headline(members, table),
        "versions": versions(),
        **session.timing(),
    }
    run = Run(manifest=manifest, tables={"differences": table})
    shown = report(run, session.folder, members, explorer_of_runs(members))
    return replace(run, page=shown.html(manifest))


def run_and_show(settings: Settings, verbose: bool) -> None:
    """Compare the runs, and print what differs."""
    members = read_members(settings.runs, settings.labels)
    folder = run_members(settings, members)
    show(partial(report, folder=folder, members=members), folder, verbose=verbose)
