"""The `compare` command's run: finished runs beside each other, without their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nope_probe.errors import UserError
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import command_line, versions
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import SessionSettings

if TYPE_CHECKING:  # --help needs neither numpy nor pandas
    from nope_probe.experiments.compare.members import Member

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(SessionSettings):
    """Compare finished runs of one command with the first run.

    Draws their positional patterns on one scale, and their differences with intervals, paired if
    the runs had the same sequences. Puts their tables side by side, on one page and in
    differences.csv.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        _arg(help="The folders of the runs; the first is the one to compare with."),
    ]
    labels: Annotated[
        tuple[str, ...], _arg(help="Their names [their models, or their folders].")
    ] = ()
    out: Annotated[Path | None, _arg(help="Folder of the comparison [runs/compare-HASH].")] = None

    @cached_property
    def members(self) -> list[Member]:
        """The runs, read and checked.

        Raises:
            UserError: for runs that cannot be compared.
        """
        from nope_probe.experiments.compare.members import read_members

        return read_members(self.runs, self.labels)

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
    members, session = settings.members, Session("compare", settings)
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


def analyse(session: Session[Settings], members: Sequence[Member]) -> Run:
    """Compare the runs' maps and tables, and return the run."""
    from nope_probe.experiments.compare.analyse import compare_maps, differences_table
    from nope_probe.experiments.compare.members import share_sequences
    from nope_probe.experiments.compare.sections import headline, report

    maps, table = compare_maps(members), differences_table(members)
    manifest = {
        "command": command_line(),
        "kind": "compare",
        "settings": session.recorded,
        "compared": members[0].kind,
        "labels": [member.label for member in members],
        "folders": [str(member.folder) for member in members],
        "same_sequences": share_sequences(members),
        "headline": headline(members, maps, table),
        "versions": versions(),
        **session.timing(),
    }
    differences = {
        f"difference/{label}/{compared.name}": difference.values.astype("float32")
        for compared in maps
        for label, difference in compared.differences.items()
    }
    run = Run(manifest=manifest, arrays={"maps": differences}, tables={"differences": table})
    return replace(run, page=report(run, session.folder, members, maps).html(manifest))
