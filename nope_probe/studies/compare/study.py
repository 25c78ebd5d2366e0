"""The `compare` command's run: finished runs next to each other, or those of two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nope_probe.errors import UserError
from nope_probe.files import JsonObject
from nope_probe.maps.folds import folds_of
from nope_probe.run.flags import settings_from
from nope_probe.run.folder import Run
from nope_probe.run.process_group import device_of_process
from nope_probe.run.processes import status
from nope_probe.run.session import Session
from nope_probe.run.settings import RunSettings
from nope_probe.run.sources import load_first_layers
from nope_probe.studies.ablation.study import Ablate
from nope_probe.studies.attention.study import SplitAttention
from nope_probe.studies.compare.analyse import differences_table, explorer_of_runs
from nope_probe.studies.compare.heads import changes_table, head_distances
from nope_probe.studies.compare.members import Member, read_members, share_sequences
from nope_probe.studies.compare.page import Comparison, headline, report
from nope_probe.studies.compare.settings import OF_RUNS, Settings
from nope_probe.studies.page import show
from nope_probe.studies.study import Study, run_study

STUDIES: dict[str, type[Study[Any]]] = {"ablate": Ablate, "attention": SplitAttention}


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
        return {"runs": runs} | ({"distances": True} if self.models else {})


def folders_of(settings: Settings) -> tuple[Path, ...]:
    """Return the folders of the compared runs, after running the study on `models` if given."""
    study = STUDIES[settings.study]
    return settings.runs or tuple(run_study(study, chosen) for chosen in runs_of_models(settings))


def runs_of_models(settings: Settings) -> list[RunSettings]:
    """Return the settings of the runs of both models."""
    kind = STUDIES[settings.study].settings_class()
    shared = {name: getattr(settings, name) for name in OF_RUNS}
    if settings.text is not None:
        shared["text"] = settings.text
    return [settings_from(kind, {**shared, "model": model}) for model in settings.models]


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
            distances = measured_distances(settings, members)
            with status("comparing and writing", in_logs=True):
                session.write(analyse(session, members, distances))
    return folder


def measured_distances(settings: Settings, members: Sequence[Member]) -> pd.DataFrame | None:
    """Return how far the heads of the two models are from each other, the farthest first.

    Returns:
        None where it is not known: of finished runs, of `ablate`, or if the tokens differ.

    Raises:
        UserError: if a model cannot be loaded.
    """
    if not settings.models or settings.study != "attention" or not share_sequences(members):
        return None
    base, other = (
        load_first_layers(chosen, device_of_process(chosen.device)).model
        for chosen in runs_of_models(settings)
    )
    arrays, (one, two) = members[0].arrays["tokens"], (member.manifest for member in members)
    tokens, documents = torch.from_numpy(arrays["tokens"]), arrays.get("documents")
    with status("comparing both models' attention in each text", in_logs=True):
        return head_distances(
            base,
            other,
            tokens,
            layers=[layer for layer in one.layers if layer in two.layers],
            fold_of=folds_of(
                len(tokens),
                settings.folds,
                None if documents is None else torch.from_numpy(documents),
            ),
        )


def analyse(
    session: Session[Compared], members: Sequence[Member], distances: pd.DataFrame | None
) -> Run:
    """Compare the runs' tables, and return the run."""
    changes = changes_table(members)
    table = differences_table(members, changes)
    if table.empty:
        raise UserError("the runs have no numbers in common")
    tables = {"differences": table}
    if not changes.empty:
        tables["changes"] = changes
    if distances is not None:
        tables["distances"] = distances
    compared = Comparison(
        compared=members[0].manifest.kind,
        labels=tuple(member.label for member in members),
        folders=tuple(str(member.folder) for member in members),
        same_sequences=share_sequences(members),
        headline=tuple(headline(members, tables)),
    )
    manifest = replace(session.manifest(), sources=None, results=asdict(compared))
    run = Run(manifest=manifest, tables=tables)
    shown = report(run, session.folder, members, explorer_of_runs(members))
    return replace(run, page=shown.html(manifest))


def run_and_show(settings: Settings, verbose: bool) -> None:
    """Compare the runs, and print what differs."""
    settings.validate()
    members = read_members(folders_of(settings), settings.labels)
    folder = run_members(settings, members)
    show(partial(report, folder=folder, members=members), folder, verbose=verbose)
