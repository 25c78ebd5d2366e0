"""The maps and folds of a run by name, made a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attribution import BASE
from nope_probe.analyses.pattern_rows import contrast_map
from nope_probe.analyses.shapley import INTACT, Condition, Contrast, base, shapley, source_terms
from nope_probe.experiments.ablation.plan import ConditionMaps, Measured, Plan
from nope_probe.maps.centred import KeptCells, centred_rows
from nope_probe.maps.folds import pooled
from nope_probe.maps.rows import row_blocks
from nope_probe.maps.stored_maps import StoredMaps, shared_cells
from nope_probe.runtime.checkpoint import tensor_writer

MAPS_BYTES = 1 << 26
QUERIES = "query_positions"  # exact in float32: below 2**24
Rows = Float[Tensor, "row key_pos"]


class RunMaps:
    """The maps of an attribution by name, nats.

    `score/<kept>` per condition (of further replacements `score_<replacement>/<kept>`) and
    `mean_covariance/<term>` are score maps; `pattern/all`, `pattern/mean_term`,
    `pattern/covariance_term`, `source/<term>` and `shapley/<player>` (of further player sets
    `shapley_<set>/<player>`, of further replacements these with `_<replacement>` before the slash)
    are patterns; replacements that only tell what is lost have score maps alone. The
    Shapley maps of a set, with that of `base` where no source plays, add up to the positional part
    of the pattern. Where maps do not have the rows of all queries, `query_positions` are the
    queries of their rows.

    Args:
        plan: the conditions.
        measured: their score maps.
        skip_keys: how many first keys the patterns leave out.
    """

    def __init__(self, plan: Plan, measured: Measured, skip_keys: int) -> None:
        self.intact, self.skip_keys = measured.intact, skip_keys
        self.n_conditions = len(measured.maps)
        self.scores = named_scores(plan, measured)
        # The patterns of further replacements take the place of those of the first.
        self.contrasts: list[tuple[ConditionMaps, dict[str, Contrast]]] = [
            (measured.maps, _pattern_contrasts(plan)),
            *((maps, _shapley_contrasts(plan, f"_{n}")) for n, maps in measured.others.items()),
        ]
        self.has_mean_term = measured.intact.layers[0].mean_term is not None

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shape [layer, row, key_pos] of each map."""
        names = [*self.scores]
        for _, contrasts in self.contrasts:
            names += contrasts
        if self.has_mean_term:
            for term in ("mean", "covariance"):
                names += [f"mean_covariance/{term}", f"pattern/{term}_term"]
        n_layers, n_rows = len(self.intact.layers), len(self.intact.query_positions)
        return dict.fromkeys(names, (n_layers, n_rows, self.intact.n))

    def blocks(self, n_bytes: int = MAPS_BYTES) -> Iterator[tuple[str, int, int, Rows]]:
        """Yield all maps by blocks of rows: name, the layer's place, first row, and rows.

        Args:
            n_bytes: the size of a row block of all conditions.
        """
        for place, intact in enumerate(self.intact.layers):
            cells = shared_cells([intact.folds], self.skip_keys)
            queries, row = self.intact.query_positions, 0
            for start, stop in row_blocks(queries, self.intact.n, self.n_conditions + 1, n_bytes):
                for name, rows in self._rows(place, start, stop, row, cells):
                    yield name, place, row, rows
                row += stop - start

    def _rows(
        self, layer: int, start: int, stop: int, row: int, cells: KeptCells
    ) -> Iterator[tuple[str, Rows]]:
        """Yield some queries of one layer of each map. The intact model sees the fewest keys."""
        rows_of_block = slice(row, row + stop - start)
        for name, maps in self.scores.items():
            yield name, maps.layers[layer].mean[rows_of_block]
        patterns: dict[Condition, Rows] = {}
        for condition_maps, contrasts in self.contrasts:
            for condition, maps in condition_maps.items():
                patterns[condition] = _pattern(maps.layers[layer].mean[rows_of_block], start, cells)
            for name, contrast in contrasts.items():
                yield name, contrast_map(contrast, patterns)
        intact = self.intact.layers[layer]
        if intact.mean_term is not None:
            score = intact.mean[rows_of_block]
            mean = torch.full_like(score, torch.nan)
            mean[:, :stop] = pooled(intact.mean_term.rows(start, stop), self.intact.counts)
            for term, rows in (("mean", mean), ("covariance", score - mean)):
                yield f"mean_covariance/{term}", rows
                yield f"pattern/{term}_term", _pattern(rows, start, cells)


def _pattern(rows: Rows, start: int, cells: KeptCells) -> Rows:
    """Return rows of a pattern with all keys, NaN outside the kept cells."""
    stop = start + len(rows)
    kept, pattern = cells.rows(start, stop), torch.full_like(rows, torch.nan)
    pattern[:, :stop] = centred_rows(rows[:, :stop], kept).where(kept, torch.nan)
    return pattern


def _pattern_contrasts(plan: Plan) -> dict[str, Contrast]:
    """Return by name the maps that are contrasts of the patterns of the first replacement."""
    contrasts: dict[str, Contrast] = {"pattern/all": {INTACT: 1.0}}
    for name, term in source_terms(plan.sources).items():
        contrasts[f"source/{name}"] = term
    return contrasts | _shapley_contrasts(plan)


def _shapley_contrasts(plan: Plan, suffix: str = "") -> dict[str, Contrast]:
    """Return by name the Shapley maps of all player sets."""
    contrasts: dict[str, Contrast] = {}
    for index, players in enumerate(plan.player_sets):
        prefix = ("shapley" if index == 0 else f"shapley_{players.name}") + suffix
        for player in players.players:
            contrasts[f"{prefix}/{player.name}"] = shapley(players, player)
        if not players.has_source:
            contrasts[f"{prefix}/{BASE}"] = base(players)
    return contrasts


def named_scores(plan: Plan, measured: Measured) -> dict[str, StoredMaps]:
    """Return the score maps of all conditions by their names in a run."""
    named = {f"score/{plan.name(condition)}": maps for condition, maps in measured.maps.items()}
    for replacement, others in (*measured.others.items(), *measured.checks.items()):
        for condition, maps in others.items():
            named[f"score_{replacement}/{plan.name(condition)}"] = maps
    return named


def write_maps(path: Path, maps: RunMaps) -> None:
    """Write all maps to a file, in float32, and their rows' queries where some queries have no row.

    Raises:
        StorageError: if it cannot be written.
    """
    shapes: dict[str, tuple[int, ...]] = {**maps.shapes}
    queries, n = maps.intact.query_positions, maps.intact.n
    if len(queries) < n:
        shapes[QUERIES] = (len(queries),)
    with tensor_writer(path, shapes) as write:
        for name, layer, row, rows in maps.blocks():
            write(name, (layer, row), rows.float().numpy())
        if QUERIES in shapes:
            write(QUERIES, (0,), queries.float().numpy())


def write_folds(path: Path, plan: Plan, measured: Measured) -> None:
    """Write each condition's fold maps as lower triangles [fold, layer, cell], in float32.

    Raises:
        StorageError: if the file cannot be written.
    """
    named = named_scores(plan, measured)
    cells = {
        name: [layer_map.folds.cells for layer_map in maps.layers] for name, maps in named.items()
    }
    shapes = {
        name: (of_layers[0].shape[0], len(of_layers), of_layers[0].shape[1])
        for name, of_layers in cells.items()
    }
    with tensor_writer(path, shapes) as write:
        for name, layers in cells.items():
            for layer, folds in enumerate(layers):
                for fold in range(folds.shape[0]):
                    write(name, (fold, layer), folds[fold].float().numpy())
