"""The runs that are compared: what each holds, and whether they can be compared at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.errors import UserError
from nope_probe.runtime.folder import Run, checkpoint_dir, read_manifest, read_run

# The command of a run whose manifest does not name it, by a table that only this command writes.
TABLES = {"sources": "ablate", "stages": "circuit", "steps": "simulate", "pattern": "scores"}
NOT_COMPARED = ("reproduce", "compare")
INTACT = "intact"
UNITS = {"circuit": "inner product"}  # of a command's maps, if not nats
Map = Float[np.ndarray, "query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One of the runs that are compared.

    Attributes:
        label: its name in figures and tables.
        folder: where it is.
        run: what it holds.
    """

    label: str
    folder: Path
    run: Run

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What was run."""
        return self.run.manifest

    @property
    def kind(self) -> str:
        """The command that wrote the run."""
        return kind_of(self.run)

    @property
    def skip_keys(self) -> int:
        """How many first keys its positional patterns leave out."""
        return int(self.manifest.get("skip_keys", 0))

    @property
    def tokens(self) -> str:
        """The checksum of its sequences; empty for a simulation."""
        data = self.manifest.get("data", {})
        return str(data.get("sha256", "")) if isinstance(data, Mapping) else ""

    @property
    def fold_sizes(self) -> list[int] | None:
        """How many sequences each fold has; None if the run does not say."""
        return self.manifest.get("fold_sizes")

    @property
    def intact(self) -> str:
        """What the intact model keeps, as the run's tables write it."""
        return str(self.manifest.get("conditions", [INTACT])[0])

    @cached_property
    def maps(self) -> dict[str, Map]:
        """The score or Gram maps by name: `L0`, `(a)`, `alpha=0, L0`."""
        return dict(self._maps())

    def _maps(self) -> Iterator[tuple[str, Map]]:
        held = self.run.arrays.get("maps", {})
        if self.kind == "circuit":
            for name in sorted(each for each in held if each.startswith("gram/")):
                yield f"({name.removeprefix('gram/')})", held[name]
            return
        for name, about in self._score_names(held).items():
            for layer, values in enumerate(held[name]):
                yield f"{about}L{layer}", values

    def _score_names(self, held: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Return the names of the score maps to compare, each with what precedes its layers."""
        if self.kind == "simulate":
            names = [name for name in held if name.startswith("score/")]
            return {name: f"{name.removeprefix('score/')}, " for name in names}
        name = f"score/{self.intact}" if self.kind == "ablate" else "score"
        return {name: ""} if name in held and held[name].ndim == 3 else {}

    def errors(self, name: str) -> Map | None:
        """Return the standard errors of a map's cells; None if the run did not keep them."""
        held = self.run.arrays.get("maps", {})
        if self.kind == "circuit":
            return held.get(f"se/{name.strip('()')}")
        *about, layer = name.split(", ")
        found = held.get("/".join(["se", *about]))
        return None if found is None else found[int(layer.removeprefix("L"))]

    def folds(self, name: str, kept: str = INTACT) -> Float[np.ndarray, "fold cell"] | None:
        """Return the fold means of a map as lower triangles; None if the run did not keep them.

        Args:
            name: the map, as in `maps`.
            kept: in runs of `ablate`, of which condition; `intact` for the intact model.
        """
        from safetensors import safe_open

        path = self.folder / "folds.safetensors"
        if not path.is_file():
            return None
        key, layer = self._fold_key(name, kept)
        with safe_open(path, "numpy") as file:
            if key not in file.keys():  # noqa: SIM118
                return None
            cells = file.get_slice(key)
            return cells[:] if layer is None else cells[:, layer]

    def _fold_key(self, name: str, kept: str) -> tuple[str, int | None]:
        if self.kind == "circuit":
            return f"gram/{name.strip('()')}", None
        layer = int(name.split(", ")[-1].removeprefix("L"))
        if self.kind == "ablate":
            return f"score/{self.intact if kept == INTACT else kept}", layer
        return "score", layer

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The run's tables, in which the intact model is called so."""
        found = {}
        for name, table in self.run.tables.items():
            if "kept" in table:
                table = table.assign(kept=table["kept"].replace(self.intact, INTACT))
            found[name] = table
        return found


def kind_of(run: Run) -> str:
    """Return the command that wrote a run."""
    named = run.manifest.get("kind")
    return str(named or next((TABLES[name] for name in TABLES if name in run.tables), "unknown"))


def read_members(folders: Sequence[Path], labels: Sequence[str] = ()) -> list[Member]:
    """Read the runs, and check that they can be compared.

    Args:
        folders: their folders.
        labels: their names; by default their models', or their folders' where these are the same.

    Raises:
        UserError: for fewer than two, for a folder that holds no finished run, and for runs of
            different commands, lengths or skipped keys.
    """
    if len(folders) < 2:
        raise UserError(f"expected two runs or more to compare, got {len(folders)}")
    if labels and len(labels) != len(folders):
        raise UserError(f"{len(folders)} runs need as many --labels, got {len(labels)}")
    if len({each.resolve() for each in folders}) < len(folders):
        raise UserError("a run was given twice")
    runs = [_read(folder) for folder in folders]
    names = list(labels) or _labels(folders, runs)
    if len({*names}) < len(names):
        raise UserError("two runs have the same label; name them with --labels")
    members = [
        Member(label=name, folder=folder, run=run)
        for name, folder, run in zip(names, folders, runs, strict=True)
    ]
    _validate(members)
    return members


def _read(folder: Path) -> Run:
    if not folder.is_dir():
        unfinished = checkpoint_dir(folder).is_dir()
        raise UserError(
            f"the run in {folder} is not finished; run its command again"
            if unfinished
            else f"there is no folder {folder}"
        )
    read_manifest(folder)
    return read_run(folder)


def _labels(folders: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    models = [str((run.manifest.get("model") or {}).get("name", "")) for run in runs]
    names = [Path(name).name for name in models]
    own = [folder.resolve().name for folder in folders]
    if all(names) and len({*names}) == len(names):
        return names
    return own if len({*own}) == len(own) else [str(folder) for folder in folders]


def _validate(members: Sequence[Member]) -> None:
    first = members[0]
    for each in members:
        if each.kind in NOT_COMPARED:
            raise UserError(f"{each.folder} is a page of {each.kind}, not an experiment")
    for each in members[1:]:
        pair = f"{first.folder} and {each.folder}"
        if each.kind != first.kind:
            raise UserError(f"{pair} are of different commands, {first.kind} and {each.kind}")
        if each.skip_keys != first.skip_keys:
            raise UserError(
                f"{pair} skip different numbers of keys, {first.skip_keys} and {each.skip_keys}; "
                "run one again with the --skip-keys of the other"
            )
        lengths = [{len(values) for values in member.maps.values()} for member in (first, each)]
        if lengths[0] != lengths[1]:
            said = " and ".join(", ".join(map(str, sorted(some))) or "none" for some in lengths)
            raise UserError(f"{pair} have sequences of different lengths, {said}")
        if each.kind == "circuit" and each.manifest["layer"] != first.manifest["layer"]:
            layers = f"L{first.manifest['layer']} and L{each.manifest['layer']}"
            raise UserError(f"{pair} are of different blocks, {layers}")


def share_sequences(members: Sequence[Member]) -> bool:
    """Return whether all runs had the same sequences, dealt to the same number of folds."""
    folds = [(each.manifest.get("settings", {}).get("folds"), each.fold_sizes) for each in members]
    tokens = {each.tokens for each in members}
    return len(tokens) == 1 and "" not in tokens and all(each == folds[0] for each in folds)
