"""The compared runs: their contents, and the check that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from nope_probe.analyses.attention import AttentionSplit
from nope_probe.errors import UserError
from nope_probe.figures.words import listed
from nope_probe.maps.estimates import Estimates
from nope_probe.models.names import resolve
from nope_probe.run.folder import Run, read_run
from nope_probe.run.paths import checkpoint_dir
from nope_probe.studies.attention_run import splits_of

COMPARED = ("ablate", "attention", "behaviour", "circuit", "trace")
LENGTHS = ("score/intact", "gram/a")  # maps of `ablate` and `circuit`


@dataclass(frozen=True, kw_only=True, repr=False)
class Member(Run):
    """A compared run.

    Attributes:
        label: its name in figures and tables.
        folder: its folder.
    """

    label: str
    folder: Path

    @property
    def sequences(self) -> tuple[str, int | None, tuple[int, ...]]:
        """The checksum of its sequences, and their folds."""
        about = self.manifest
        return about.data.sha256, about.settings.get("folds"), about.fold_sizes

    @property
    def seq_len(self) -> int:
        """The length of its sequences, in tokens: that of its maps, or of its settings."""
        maps = self.arrays.get("maps", {})
        for key in LENGTHS:
            if key in maps:
                return int(maps[key].shape[-1])
        return int(self.manifest.settings["seq_len"])

    @cached_property
    def attention(self) -> dict[tuple[int, int], AttentionSplit]:
        """The parts of each head's attention, by layer and head; empty without other texts.

        Raises:
            UserError: for a run of an earlier version.
        """
        if self.manifest.kind != "attention" or "weights" not in self.maps:
            return {}
        kept, sizes = self.arrays.get("estimates"), self.manifest.fold_sizes
        if kept is None:
            raise UserError(f"{self.folder} keeps no estimates of folds: run its command again")
        estimates, gaps = (torch.from_numpy(kept[name]) for name in ("estimates", "gaps"))
        return splits_of(estimates, gaps, torch.tensor(sizes), self.manifest.layers)

    @property
    def replicates(self) -> Mapping[str, np.ndarray]:
        """The estimates of numbers on all folds and without each, by table and column."""
        kept = self.arrays.get("estimates", {})
        return {key: cells for key, cells in kept.items() if f"weights/{key.split('/')[0]}" in kept}

    def estimates(self, key: str, row: int) -> Estimates:
        """Return the estimates of a number in a row of its table."""
        of_table = self.arrays["estimates"][f"weights/{key.split('/')[0]}"]
        weights = of_table if of_table.ndim == 1 else of_table[row]
        n_folds = int((weights > 0).sum())
        return Estimates(
            values=torch.from_numpy(self.arrays["estimates"][key][row, : 1 + n_folds]),
            weights=torch.from_numpy(weights[:n_folds]),
        )


def read_members(folders: Sequence[Path], labels: Sequence[str] = ()) -> list[Member]:
    """Read the runs, and check that they can be compared.

    Args:
        folders: their folders.
        labels: their names; by default the models' names, or the folders' if models are the same.

    Raises:
        UserError: for models, fewer than two runs, a folder without a finished run, or runs of
            different commands, lengths or skipped keys.
    """
    if models := [folder for folder in folders if _is_model(folder)]:
        raise UserError(_commands_instead(folders, models))
    if len(folders) < 2:
        raise UserError(f"expected two runs or more to compare, got {len(folders)}")
    if labels and len(labels) != len(folders):
        raise UserError(f"{len(folders)} runs need as many --labels, got {len(labels)}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a run was given twice")
    for folder in folders:
        if checkpoint_dir(folder).is_dir() and not folder.is_dir():
            raise UserError(f"the run in {folder} is not finished; run its command again")
    runs = [read_run(folder) for folder in folders]
    names = list(labels) or _labels(folders, runs)
    if len({*names}) < len(names):
        raise UserError("two runs have the same label; name them with --labels")
    members = [
        Member(**vars(run), label=name, folder=folder)
        for name, folder, run in zip(names, folders, runs, strict=True)
    ]
    for member in members:
        _validate(members[0], member)
    return members


def _as_typed(folder: Path) -> str:
    """Return a path as it is typed here; settings hold absolute paths."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _is_model(folder: Path) -> bool:
    """Return whether a model is named where a run is expected."""
    name = _as_typed(folder)
    if (folder / "manifest.json").is_file() or ("/" in name and not folder.exists()):
        return False
    try:
        return bool(resolve(name))
    except UserError:
        return False


def _commands_instead(folders: Sequence[Path], models: Sequence[Path]) -> str:
    """Return what to type in the place of a comparison of models: a run of each comes first."""
    runs = {_as_typed(model): f"runs/{model.name}" for model in models}
    commands = [
        f"python -m nope_probe.ablate --model {model} --out {run}" for model, run in runs.items()
    ]
    compared = " ".join(runs.get(name, name) for name in map(_as_typed, folders))
    return (
        f"compare takes the folders of finished runs, not models: run "
        f"{' && '.join([*commands, f'python -m nope_probe.compare {compared}'])}"
    )


def _labels(folders: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    models = [Path(run.manifest.model_name).name for run in runs]
    names = [folder.resolve().name for folder in folders]
    if all(models) and len({*models}) == len(models):
        return models
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def _validate(base: Member, other: Member) -> None:
    pair, one, two = f"{base.folder} and {other.folder}", base.manifest, other.manifest
    if two.kind not in COMPARED:
        raise UserError(
            f"{other.folder} is of {two.kind}: runs of {listed(COMPARED)} can be compared"
        )
    if two.kind != one.kind:
        raise UserError(f"{pair} are of different commands, {one.kind} and {two.kind}")
    if two.skip_keys != one.skip_keys:
        raise UserError(
            f"{pair} skip different numbers of keys, {one.skip_keys} and {two.skip_keys}; "
            "run one again with the --skip-keys of the other"
        )
    if base.seq_len != other.seq_len:
        lengths = f"{base.seq_len} and {other.seq_len}"
        raise UserError(f"{pair} have sequences of different lengths, {lengths}")
    rows = [np.empty(0) if (r := run.query_positions) is None else r for run in (base, other)]
    if not np.array_equal(rows[0], rows[1]):
        raise UserError(f"{pair} have maps of different rows; run one again with --query-rows")
    if two.kind == "circuit" and two.settings["layer"] != one.settings["layer"]:
        layers = " and ".join(f"L{of_run.settings['layer']}" for of_run in (one, two))
        raise UserError(f"{pair} are of different blocks, {layers}")


def share_sequences(members: Sequence[Member]) -> bool:
    """Return whether all runs had the same sequences, dealt to the same number of folds."""
    first = members[0].sequences
    return all(member.sequences == first for member in members)
