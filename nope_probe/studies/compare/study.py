"""The `compare` command's run: finished runs next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from nope_probe.errors import UserError
from nope_probe.files import JsonObject
from nope_probe.run.folder import Run
from nope_probe.run.processes import status
from nope_probe.run.session import Session
from nope_probe.studies.compare.analyse import differences_table
from nope_probe.studies.compare.heads import changes_table
from nope_probe.studies.compare.members import Member, read_members, share_sequences
from nope_probe.studies.compare.page import Comparison, headline, report
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
        return self.members[0].manifest.kind

    def recorded(self) -> JsonObject:
        """Return the identity of a comparison: the runs' names, and their files' checksums."""
        runs = [
            {"label": member.label, "checksums": dict(member.manifest.checksums)}
            for member in self.members
        ]
        return {"runs": runs}


def run_members(settings: Settings, members: Sequence[Member]) -> Path:
    """Compare runs unless the comparison is finished, and return its folder.

    Raises:
        UserError: for runs that cannot be compared, or a folder inside a run.
    """
    session = Session("compare", Compared(**vars(settings), members=members), asked=settings)
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
    changes = changes_table(members)
    table = differences_table(members, changes)
    if table.empty:
        raise UserError("the runs have no numbers in common")
    tables = {"differences": table}
    if not changes.empty:
        tables["changes"] = changes
    compared = Comparison(
        compared=members[0].manifest.kind,
        labels=tuple(member.label for member in members),
        folders=tuple(str(member.folder) for member in members),
        same_sequences=share_sequences(members),
        headline=tuple(headline(members, tables)),
    )
    manifest = replace(session.manifest(), sources=None, results=asdict(compared))
    run = Run(manifest=manifest, tables=tables)
    return replace(run, page=report(run, session.folder, members).html(manifest))


def run_and_show(settings: Settings, verbose: bool) -> None:
    """Compare the runs, and print what differs."""
    members = read_members(settings.runs, settings.labels)
    folder = run_members(settings, members)
    show(partial(report, folder=folder, members=members), folder, verbose=verbose)
