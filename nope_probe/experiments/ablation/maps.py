"""The maps of a run of `ablate`, and its folds, written to files a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attribution import BASE
from nope_probe.analyses.pattern_rows import contrast_map
from nope_probe.analyses.shapley import Contrast, base, shapley, source_terms
from nope_probe.conditions import INTACT, Condition
from nope_probe.experiments.ablation.plan import ConditionMaps, Measured, Plan
from nope_probe.maps.centred import KeptCells, centred_rows
from nope_probe.maps.folds import pooled
from nope_probe.maps.maps import Layers
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
    """

    def __init__(self, plan: Plan, measured: Measured) -> None:
        self.intact = measured.intact
        self.n_conditions = len(measured.maps)
        self.scores = named_scores(plan, measured)
        # The patterns of further replacements take the place of those of the first.
        self.contrasts: list[tuple[ConditionMaps, dict[str, Contrast]]] = [
            (measured.maps, _pattern_contrasts(plan)),
            *((maps, _shapley_contrasts(plan, f"_{n}")) for n, maps in measured.others.items()),
        ]
        self.first = next(iter(measured.intact.values()))
        self.has_mean_term = self.first.mean_term is not None

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shape [layer, row, key_pos] of each map."""
        names = [*self.scores, *(name for _, contrasts in self.contrasts for name in contrasts)]
        if self.has_mean_term:
            for term in ("mean", "covariance"):
                names += [f"mean_covariance/{term}", f"pattern/{term}_term"]
        shape = (len(self.intact), len(self.first.queries), self.first.n)
        return dict.fromkeys(names, shape)

    def blocks(self, n_bytes: int = MAPS_BYTES) -> Iterator[tuple[str, int, int, Rows]]:
        """Yield all maps by blocks of rows: name, the layer's place, first row, and rows.

        Args:
            n_bytes: the size of a row block of all conditions.
        """
        for place, (layer, intact) in enumerate(self.intact.items()):
            cells, row = intact.pattern.apart, 0
            for start, stop in intact.folds.where.blocks(self.n_conditions + 1, n_bytes):
                for name, rows in self._rows(layer, start, stop, row, cells):
                    yield name, place, row, rows
                row += stop - start

    def _rows(
        self, layer: int, start: int, stop: int, row: int, cells: KeptCells
    ) -> Iterator[tuple[str, Rows]]:
        """Yield some queries of one layer of each map. The intact model sees the fewest keys."""
        rows_of_block = slice(row, row + stop - start)
        for name, maps in self.scores.items():
            yield name, maps[layer].mean(rows_of_block)
        patterns: dict[Condition, Rows] = {}
        for condition_maps, contrasts in self.contrasts:
            for condition, maps in condition_maps.items():
                patterns[condition] = _pattern(maps[layer].mean(rows_of_block), start, cells)
            for name, contrast in contrasts.items():
                yield name, contrast_map(contrast, patterns)
        intact = self.intact[layer]
        if intact.mean_term is not None:
            score = intact.mean(rows_of_block)
            mean = torch.full_like(score, torch.nan)
            mean[:, :stop] = pooled(intact.mean_term.folds.rows(start, stop), intact.counts)
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
    sources = {f"source/{name}": term for name, term in source_terms(plan.sources).items()}
    return {"pattern/all": {INTACT: 1.0}, **sources, **_shapley_contrasts(plan)}


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


def named_scores(plan: Plan, measured: Measured) -> dict[str, Layers]:
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
    queries, n = maps.first.queries, maps.first.n
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
    intact = next(iter(measured.intact.values()))
    n_folds, n_cells = intact.folds.n_folds, int((intact.queries + 1).sum())
    shape = (n_folds, len(measured.intact), n_cells)
    with tensor_writer(path, dict.fromkeys(named, shape)) as write:
        for name, layers in named.items():
            for place, maps in enumerate(layers.values()):
                for fold in range(n_folds):
                    write(name, (fold, place), maps.folds.cells_of(fold).float().numpy())
