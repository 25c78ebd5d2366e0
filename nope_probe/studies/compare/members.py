"""The compared runs: their contents, and the check that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from safetensors import safe_open

from nope_probe.analyses.attention import AttentionSplit
from nope_probe.errors import UserError
from nope_probe.figures.words import listed
from nope_probe.files import JsonObject
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.rows import MapRows
from nope_probe.removal import INTACT
from nope_probe.run.folder import Run, read_run
from nope_probe.run.manifest import Manifest
from nope_probe.run.paths import checkpoint_dir
from nope_probe.studies.attention.analyse import splits_of

COMPARED = ("ablate", "attention", "behaviour", "circuit", "scores", "trace")
LENGTHS = ("score/intact", "score", "gram/a")  # maps of `ablate`, `scores` and `circuit`


@dataclass(frozen=True, kw_only=True)
class Member:
    """A compared run.

    Attributes:
        label: its name in figures and tables.
        folder: its folder.
        run: its contents.
    """

    label: str
    folder: Path
    run: Run

    @property
    def manifest(self) -> Manifest:
        """The run's manifest."""
        return self.run.manifest

    @property
    def kind(self) -> str:
        """The command that wrote the run."""
        return self.manifest.kind

    @property
    def settings(self) -> JsonObject:
        """The settings that the run was made with."""
        return self.manifest.settings

    @property
    def skip_keys(self) -> int:
        """How many first keys its positional patterns leave out."""
        return self.manifest.skip_keys

    @property
    def sequences(self) -> tuple[str, int | None, tuple[int, ...]]:
        """The checksum of its sequences, and their folds."""
        return self.manifest.data.sha256, self.settings.get("folds"), self.manifest.fold_sizes

    @property
    def seq_len(self) -> int:
        """The length of its sequences, in tokens: that of its maps, or of its settings."""
        maps = self.run.arrays.get("maps", {})
        for key in LENGTHS:
            if key in maps:
                return int(maps[key].shape[-1])
        return int(self.settings["seq_len"])

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers whose score maps it has."""
        return [*self.manifest.layers]

    @cached_property
    def attention(self) -> dict[tuple[int, int], AttentionSplit]:
        """The parts of each head's attention, by layer and head; empty without other texts.

        Raises:
            UserError: for a run of an earlier version.
        """
        if self.kind != "attention" or "weights" not in self.run.maps:
            return {}
        kept, sizes = self.run.arrays.get("estimates"), self.manifest.fold_sizes
        if kept is None:
            raise UserError(f"{self.folder} keeps no estimates of folds: run its command again")
        estimates, gaps = (torch.from_numpy(kept[name]) for name in ("estimates", "gaps"))
        return splits_of(estimates, gaps, torch.tensor(sizes), self.layers)

    def folds(self, item: str, removed: str = INTACT.name) -> LayerMaps | None:
        """Return the fold means of a map; None if the run did not keep them.

        Args:
            item: a layer such as `L2`, or a circuit's stage such as `(f)`.
            removed: in runs of `ablate`, the condition; `intact` for the intact model.
        """
        path = self.folder / "folds.safetensors"
        if path.name not in self.manifest.checksums:
            return None
        of_kind = {"ablate": f"score/{removed}", "circuit": f"gram/{item[1]}"}
        key = of_kind.get(self.kind, "score")
        with safe_open(path, "numpy") as file:
            if key not in file.keys():  # noqa: SIM118
                return None
            cells = file.get_slice(key)
            is_stage = self.kind == "circuit"
            cells = cells[:] if is_stage else cells[:, self.layers.index(int(item[1:]))]
        kept, sizes = self.run.query_positions, self.manifest.fold_sizes
        queries = None if kept is None else torch.from_numpy(kept)
        counts = torch.tensor(sizes) if sizes else None
        packed = torch.from_numpy(cells)
        folds = MapRows.of_cells(packed.shape[1], queries).unpack(packed)
        return LayerMaps.of(folds, counts, queries, self.skip_keys)

    @property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """The run's tables."""
        return self.run.tables


def read_members(folders: Sequence[Path], labels: Sequence[str] = ()) -> list[Member]:
    """Read the runs, and check that they can be compared.

    Args:
        folders: their folders.
        labels: their names; by default the models' names, or the folders' if models are the same.

    Raises:
        UserError: for fewer than two runs, a folder without a finished run, or runs of different
            commands, lengths or skipped keys.
    """
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
        Member(label=name, folder=folder, run=run)
        for name, folder, run in zip(names, folders, runs, strict=True)
    ]
    for member in members:
        _validate(members[0], member)
    return members


def _labels(folders: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    models = [Path(run.manifest.model_name).name for run in runs]
    names = [folder.resolve().name for folder in folders]
    if all(models) and len({*models}) == len(models):
        return models
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def _validate(base: Member, other: Member) -> None:
    pair = f"{base.folder} and {other.folder}"
    if other.kind not in COMPARED:
        raise UserError(
            f"{other.folder} is of {other.kind}: runs of {listed(COMPARED)} can be compared"
        )
    if other.kind != base.kind:
        raise UserError(f"{pair} are of different commands, {base.kind} and {other.kind}")
    if other.skip_keys != base.skip_keys:
        raise UserError(
            f"{pair} skip different numbers of keys, {base.skip_keys} and {other.skip_keys}; "
            "run one again with the --skip-keys of the other"
        )
    if base.seq_len != other.seq_len:
        lengths = f"{base.seq_len} and {other.seq_len}"
        raise UserError(f"{pair} have sequences of different lengths, {lengths}")
    if not np.array_equal(_rows(base), _rows(other)):
        raise UserError(f"{pair} have maps of different rows; run one again with --query-rows")
    if other.kind == "circuit" and other.settings["layer"] != base.settings["layer"]:
        layers = " and ".join(f"L{member.settings['layer']}" for member in (base, other))
        raise UserError(f"{pair} are of different blocks, {layers}")


def _rows(member: Member) -> Int[np.ndarray, " row"]:
    """Return the queries of chosen rows; empty if the maps have all rows."""
    queries = member.run.query_positions
    return np.empty(0, dtype=np.int64) if queries is None else queries


def share_sequences(members: Sequence[Member]) -> bool:
    """Return whether all runs had the same sequences, dealt to the same number of folds."""
    first = members[0].sequences
    return all(member.sequences == first for member in members)
