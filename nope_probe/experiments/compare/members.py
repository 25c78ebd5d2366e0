"""The compared runs: their contents, and the check that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor

from nope_probe.conditions import INTACT
from nope_probe.errors import UserError
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.rows import MapRows
from nope_probe.runtime.folder import Run, read_run
from nope_probe.runtime.places import checkpoint_dir

NOT_COMPARED = ("reproduce", "compare")
UNITS = {"circuit": "inner product"}  # units of a command's maps, if not nats
Map: TypeAlias = Float[np.ndarray, "row key_pos"]


@dataclass(frozen=True, kw_only=True)
class StoredMap:
    """A map of a run.

    Attributes:
        mean: the mean over all sequences, nats (inner products for a Gram map).
        errors: the standard errors of its cells; None if the run did not keep them.
        key: the name of its fold means in the run.
        place: its layer's place in these fold means; None if they belong to a single map.
    """

    mean: Map
    errors: Map | None
    key: str
    place: int | None = None


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
    def manifest(self) -> Mapping[str, Any]:
        """The run's manifest."""
        return self.run.manifest

    @property
    def kind(self) -> str:
        """The command that wrote the run."""
        return str(self.manifest.get("kind", "an older version"))

    @property
    def skip_keys(self) -> int:
        """How many first keys its positional patterns leave out."""
        return int(self.manifest.get("skip_keys", 0))

    @property
    def sequences(self) -> tuple[str, int | None, list[int] | None]:
        """The checksum of its sequences (empty for a simulation), and their folds."""
        checksum = str(self.manifest.get("data", {}).get("sha256", ""))
        return checksum, self.manifest.get("settings", {}).get("folds"), self.fold_sizes

    @property
    def lengths(self) -> list[int]:
        """The lengths of its sequences, in tokens: those of its maps, or of its settings."""
        of_maps = {stored.mean.shape[-1] for stored in self.maps.values()}
        return sorted(of_maps or {self.manifest["settings"]["seq_len"]})

    @property
    def fold_sizes(self) -> list[int] | None:
        """The number of sequences in each fold; None if it is not recorded."""
        return self.manifest.get("fold_sizes")

    @property
    def intact(self) -> str:
        """The tables' value of `kept` for the intact model."""
        return str(self.manifest.get("conditions", [INTACT.name])[0])

    @cached_property
    def maps(self) -> dict[str, StoredMap]:
        """The score or Gram maps by name: `L0`, `(a)`, `alpha=0, L0`."""
        held = self.run.arrays.get("maps", {})
        if self.kind == "circuit":
            return {
                f"({key[-1]})": StoredMap(mean=held[key], errors=held.get(f"se/{key[-1]}"), key=key)
                for key in sorted(held)
                if key.startswith("gram/")
            }
        keys = {"": f"score/{self.intact}" if self.kind == "ablate" else "score"}
        if self.kind == "simulate":
            scores = [key for key in held if key.startswith("score/")]
            keys = {f"{key.removeprefix('score/')}, ": key for key in scores}
        maps = {}
        for about, key in keys.items():
            errors, means = held.get(key.replace("score", "se", 1)), held.get(key)
            if means is None:  # of another command, which keeps no score maps
                continue
            layers = self.manifest.get("layers", range(len(means)))
            for place, (layer, mean) in enumerate(zip(layers, means, strict=True)):
                error = None if errors is None else errors[place]
                stored = StoredMap(mean=mean, errors=error, key=key, place=place)
                maps[f"{about}L{layer}"] = stored
        return maps

    @property
    def query_positions(self) -> Int[Tensor, " row"] | None:
        """The queries of the maps' rows; None if all queries have rows."""
        queries = self.run.query_positions
        return None if queries is None else torch.from_numpy(queries)

    def folds(self, name: str, kept: str = INTACT.name) -> LayerMaps | None:
        """Return the fold means of a map; None if the run did not keep them.

        Args:
            name: the map, as in `maps`.
            kept: in runs of `ablate`, the condition; `intact` for the intact model.
        """
        path, stored = self.folder / "folds.safetensors", self.maps[name]
        if path.name not in self.manifest.get("checksums", {}):
            return None
        key = stored.key if kept == INTACT.name else f"score/{kept}"
        with safe_open(path, "numpy") as file:
            if key not in file.keys():  # noqa: SIM118
                return None
            cells = file.get_slice(key)
            cells = cells[:] if stored.place is None else cells[:, stored.place]
        queries, sizes = self.query_positions, self.fold_sizes
        counts = None if sizes is None else torch.tensor(sizes)
        packed = torch.from_numpy(cells)
        folds = MapRows.of_cells(packed.shape[1], queries).unpack(packed)
        return LayerMaps.of(folds, counts, queries, self.skip_keys)

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The run's tables, in which the intact model has the name `intact`."""
        named = {"kept": {self.intact: INTACT.name}}
        return {name: table.replace(named) for name, table in self.run.tables.items()}


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
    models = [Path((run.manifest.get("model") or {}).get("name", "")).name for run in runs]
    own = [folder.resolve().name for folder in folders]
    if all(models) and len({*models}) == len(models):
        return models
    return own if len({*own}) == len(own) else [str(folder) for folder in folders]


def _validate(base: Member, other: Member) -> None:
    pair = f"{base.folder} and {other.folder}"
    if other.kind in NOT_COMPARED:
        raise UserError(f"{other.folder} is a page of {other.kind}, not an experiment")
    if other.kind != base.kind:
        raise UserError(f"{pair} are of different commands, {base.kind} and {other.kind}")
    if other.skip_keys != base.skip_keys:
        raise UserError(
            f"{pair} skip different numbers of keys, {base.skip_keys} and {other.skip_keys}; "
            "run one again with the --skip-keys of the other"
        )
    if base.lengths != other.lengths:
        lengths = (base.lengths, other.lengths)
        said = " and ".join(", ".join(map(str, some)) for some in lengths)
        raise UserError(f"{pair} have sequences of different lengths, {said}")
    if not np.array_equal(_rows(base), _rows(other)):
        raise UserError(f"{pair} have maps of different rows; run one again with --query-rows")
    if other.kind == "circuit" and other.manifest["layer"] != base.manifest["layer"]:
        layers = f"L{base.manifest['layer']} and L{other.manifest['layer']}"
        raise UserError(f"{pair} are of different blocks, {layers}")


def _rows(member: Member) -> Int[np.ndarray, " row"]:
    """Return the queries of chosen rows; empty if the maps have all rows."""
    queries = member.run.query_positions
    return np.empty(0, dtype=np.int64) if queries is None else queries


def share_sequences(members: Sequence[Member]) -> bool:
    """Return whether all runs had the same sequences, dealt to the same number of folds."""
    first = members[0].sequences
    return bool(first[0]) and all(member.sequences == first for member in members)
