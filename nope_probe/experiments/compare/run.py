"""The `compare` command's run: finished runs beside each other, without their models."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nope_probe.runtime.distributed import validate_one_process
from nope_probe.runtime.folder import Run, check_output_dir, write_run
from nope_probe.runtime.places import output_folder
from nope_probe.runtime.provenance import command_line, versions
from nope_probe.runtime.session import default_output_dir

if TYPE_CHECKING:  # --help needs neither numpy nor pandas
    import numpy as np

    from nope_probe.experiments.compare.maps import Compared
    from nope_probe.experiments.compare.members import Member

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare finished runs of one command with the first of them.

    Draws their positional patterns on one scale and their differences, with intervals that are
    paired where the runs had the same sequences, and puts their tables side by side, on one page
    and in differences.csv.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        _arg(help="The folders of the runs; the first is the one to compare with."),
    ]
    labels: Annotated[
        tuple[str, ...], _arg(help="Their names [their models, or their folders].")
    ] = ()
    out: Annotated[Path | None, _arg(help="Folder of the comparison [runs/compare-HASH].")] = None


def run(settings: Settings) -> Path:
    """Compare the runs unless that is finished, and return the comparison's folder.

    Raises:
        UserError: for runs that cannot be compared.
    """
    from nope_probe.experiments.compare.members import read_members

    validate_one_process()
    started = time.time()
    members = read_members(settings.runs, settings.labels)
    recorded = recorded_settings(members)
    default = default_output_dir("compare", members[0].kind, recorded)
    folder = default if settings.out is None else output_folder(settings.out)
    if not check_output_dir(folder, recorded):
        write_run(folder, analyse(members, recorded, folder, started))
    return folder


def recorded_settings(members: Sequence[Member]) -> dict[str, Any]:
    """Return what identifies a comparison: the runs' names, and the checksums of their files."""
    return {
        "runs": [
            {"label": each.label, "checksums": dict(each.manifest["checksums"])} for each in members
        ]
    }


def analyse(
    members: Sequence[Member], recorded: dict[str, Any], folder: Path, started: float
) -> Run:
    """Compare the runs' maps and tables, and return the run."""
    from nope_probe.experiments.compare.maps import compare_maps
    from nope_probe.experiments.compare.members import share_sequences
    from nope_probe.experiments.compare.page import compare_page
    from nope_probe.experiments.compare.summary import headline
    from nope_probe.experiments.compare.tables import differences_table

    maps, table = compare_maps(members), differences_table(members)
    manifest = {
        "command": command_line(),
        "kind": "compare",
        "settings": recorded,
        "compared": members[0].kind,
        "labels": [each.label for each in members],
        "folders": [str(each.folder) for each in members],
        "same_sequences": share_sequences(members),
        "headline": headline(members, maps, table),
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 3),
    }
    links = [
        Path(os.path.relpath(each.folder / "report.html", folder)).as_posix() for each in members
    ]
    return Run(
        manifest=manifest,
        arrays={"maps": _arrays(maps)},
        tables={"differences": table},
        page=compare_page(members, maps, table, manifest, links),
    )


def _arrays(maps: Sequence[Compared]) -> dict[str, np.ndarray]:
    """Return the differences by run and map: `difference/<label>/<name>`, float32."""
    return {
        f"difference/{label}/{each.name}": found.values.astype("float32")
        for each in maps
        for label, found in each.differences.items()
    }
