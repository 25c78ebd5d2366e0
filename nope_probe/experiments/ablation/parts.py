"""What the report of an ablation run is drawn from: its maps, pooled, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.components import TABLE
from nope_probe.experiments.ablation import findings
from nope_probe.experiments.ablation.side_by_side import of_first, replacements_of
from nope_probe.experiments.summary import strongest
from nope_probe.maps.downsample import pool
from nope_probe.reports.page import positions

PLAYER_SETS = {"circuits": "shapley_circuits", "players": "shapley"}  # and their maps
SHAPLEY = tuple(PLAYER_SETS.values())
GROUPS = ("pattern", "source", *SHAPLEY)


class Parts:
    """The maps and tables of a run, and the layer that its report shows first.

    Attributes:
        manifest: what was run.
        intact: what the intact model keeps.
        replacements: what removed weights were replaced by, the first being that of the headings.
        tables: the tables that have rows, with the first replacement alone,
        several: and with all replacements.
        score: the score maps of the intact model.
        terms: the maps of patterns by group and name.
        whole: the positional pattern of the intact model.
        layer: the layer with the strongest positional pattern; None if none exceeds the noise.
        shown: the layer that is shown first.
    """

    def __init__(
        self,
        maps: Mapping[str, Any],
        tables: Mapping[str, pd.DataFrame],
        manifest: Mapping[str, Any],
    ) -> None:
        self.manifest = manifest
        self.intact = str(manifest["conditions"][0])
        self.replacements = replacements_of(manifest)
        self.several = {name: table for name, table in tables.items() if len(table)}
        self.tables = of_first(manifest, self.several)
        score = np.asarray(maps[f"score/{self.intact}"])
        names = {group: [key for key in maps if key.startswith(f"{group}/")] for group in GROUPS}
        names |= self._other_shapley(maps)
        n_drawn = sum(len(keys) + 1 for keys in names.values())  # a whole beside its terms
        size = positions(n_drawn, len(score))
        self.score = pool(score, size)
        self.terms = {
            group: {
                key.removeprefix(f"{group}/"): pool(np.asarray(maps[key]), size)
                for key in sorted(keys, key=_order)
            }
            for group, keys in names.items()
        }
        self.whole = self.terms["pattern"]["all"]
        self.shown = int(np.argmax([_spread(each) for each in self.whole.values]))
        self.layer: int | None = self.shown
        if "pattern" in self.tables:
            best = strongest(self.intact_rows())
            self.layer = None if best is None else int(best["layer"])
            self.shown = self.shown if self.layer is None else self.layer

    def _other_shapley(self, maps: Mapping[str, Any]) -> dict[str, list[str]]:
        groups = [f"{group}_{name}" for group in SHAPLEY for name in self.replacements[1:]]
        return {group: [key for key in maps if key.startswith(f"{group}/")] for group in groups}

    def intact_rows(self) -> pd.DataFrame:
        """Return the measures of the intact model's pattern, a row per layer."""
        pattern = self.tables["pattern"]
        return pattern[pattern["kept"] == self.intact]

    def rows(self, name: str, player_set: str) -> pd.DataFrame | None:
        """Return a player set's rows of a table, of all replacements."""
        table = self.several.get(name)
        rows = None if table is None else table[table["player_set"] == player_set]
        return rows if rows is not None and len(rows) else None

    def conjunctions(self, player_set: str) -> Sequence[int]:
        """Return the layers in which all players of a set have about the same share."""
        return list(self.manifest.get("conjunctions", {}).get(player_set, []))

    def noise(
        self, table: pd.DataFrame | None, name: str, column: str
    ) -> dict[str, list[int]] | None:
        """Return per map the layers in which it does not exceed its noise."""
        if table is None:
            return None
        noise = findings.noisy_layers(table, name, column)
        if "pattern" in self.tables:
            rows = self.intact_rows()
            noise["all"] = rows.loc[~(rows["amplitude_low"] > 0), "layer"].astype(int).tolist()
        return noise


def _order(key: str) -> tuple[int, str]:
    """Return a sort key: the order of the words, and unions last."""
    name = key.split("/")[1]
    return list(TABLE).index(name) if name in TABLE else len(TABLE), name


def _spread(cells: Float[np.ndarray, "query_pos key_pos"]) -> float:
    known = cells[np.isfinite(cells)]
    return float(known.std()) if known.size else 0.0
