"""The maps, folds and offset profiles of a run, made a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attribution import BASE
from nope_probe.analyses.contrasts import contrast_map
from nope_probe.analyses.distances import cells_by_distance, distance_sums, profile_of_means
from nope_probe.analyses.pattern_rows import pattern_distance_sums
from nope_probe.analyses.shapley import INTACT, Condition, Contrast, base, shapley, source_terms
from nope_probe.experiments.ablation.conditions import ConditionMaps, Measured
from nope_probe.experiments.ablation.plan import Plan
from nope_probe.experiments.split_tables import profiles_table
from nope_probe.maps.centred import block_cells, centred_rows
from nope_probe.maps.folds import pooled
from nope_probe.maps.stored_maps import StoredMaps, row_blocks
from nope_probe.runtime.checkpoint import tensor_writer

Means = Float[Tensor, "fold layer offset"]
MAPS_BYTES = 1 << 26
Rows = Float[Tensor, "row key_pos"]


@dataclass(frozen=True, kw_only=True)
class MapRows:
    """Rows of one layer of a map.

    Attributes:
        name: the map's name.
        layer, start: the layer and the first row.
        rows: nats, with all keys.
    """

    name: str
    layer: int
    start: int
    rows: Rows


class RunMaps:
    """The maps of an attribution by name, nats.

    `score/<kept>` per condition (of further replacements `score_<replacement>/<kept>`) and
    `mean_covariance/<term>` are score maps; `pattern/all`, `pattern/mean_term`,
    `pattern/covariance_term`, `source/<term>` and `shapley/<player>` (of further player sets
    `shapley_<set>/<player>`, of further replacements these with `_<replacement>` before the slash)
    are patterns. The Shapley maps of a set, with that of `base` where no source plays, add up to
    the positional part of the pattern.

    Args:
        plan: the conditions.
        measured: their score maps.
        skip_keys: how many first keys the patterns leave out.
    """

    def __init__(self, plan: Plan, measured: Measured, skip_keys: int) -> None:
        self.measured, self.skip_keys = measured, skip_keys
        self.scores = named_scores(plan, measured)
        self.contrasts = _pattern_contrasts(plan)
        self.by_replacement = {
            name: _shapley_contrasts(plan, f"_{name}") for name in measured.others
        }
        self.has_mean_term = measured.intact.layers[0].mean_term is not None

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shape [layer, query_pos, key_pos] of each map."""
        n_layers, n = len(self.measured.intact.layers), self.measured.intact.n
        names = [*self.scores, *self.contrasts, *chain(*self.by_replacement.values())]
        if self.has_mean_term:
            for term in ("mean", "covariance"):
                names += [f"mean_covariance/{term}", f"pattern/{term}_term"]
        return dict.fromkeys(names, (n_layers, n, n))

    def blocks(self, n_bytes: int = MAPS_BYTES) -> Iterator[MapRows]:
        """Yield all maps by blocks of rows; n_bytes are those of all conditions' rows."""
        n, n_maps = self.measured.intact.n, len(self.measured.maps) + 1
        for layer in range(len(self.measured.intact.layers)):
            for start, stop in row_blocks(n, n_maps, n_bytes):
                yield from self._scores(layer, start, stop)
                yield from self._patterns(layer, start, stop)
                if self.has_mean_term:
                    yield from self._terms(layer, start, stop)

    def _scores(self, layer: int, start: int, stop: int) -> Iterator[MapRows]:
        for name, maps in self.scores.items():
            rows = maps.layers[layer].mean[start:stop]
            yield MapRows(name=name, layer=layer, start=start, rows=rows)

    def _patterns(self, layer: int, start: int, stop: int) -> Iterator[MapRows]:
        patterns = self._condition_patterns(self.measured.maps, layer, start, stop)
        for name, contrast in self.contrasts.items():
            rows = contrast_map(contrast, patterns)
            yield MapRows(name=name, layer=layer, start=start, rows=rows)
        for replacement, contrasts in self.by_replacement.items():
            others = self.measured.others[replacement]
            changed = patterns | self._condition_patterns(others, layer, start, stop)
            for name, contrast in contrasts.items():
                rows = contrast_map(contrast, changed)
                yield MapRows(name=name, layer=layer, start=start, rows=rows)

    def _condition_patterns(
        self, maps: ConditionMaps, layer: int, start: int, stop: int
    ) -> dict[Condition, Rows]:
        """Return rows of the pattern of each condition."""
        return {
            condition: self._pattern(each.layers[layer].mean[start:stop], start)
            for condition, each in maps.items()
        }

    def _terms(self, layer: int, start: int, stop: int) -> Iterator[MapRows]:
        intact = self.measured.intact.layers[layer]
        assert intact.mean_term is not None
        known = pooled(intact.mean_term.rows(start, stop), self.measured.intact.counts)
        score = intact.mean[start:stop]
        mean = torch.full_like(score, torch.nan)
        mean[:, :stop] = known
        for term, rows in (("mean", mean), ("covariance", score - mean)):
            place = {"layer": layer, "start": start}
            yield MapRows(name=f"mean_covariance/{term}", rows=rows, **place)
            yield MapRows(name=f"pattern/{term}_term", rows=self._pattern(rows, start), **place)

    def _pattern(self, rows: Rows, start: int) -> Rows:
        """Return rows of a pattern with all keys, NaN outside the kept cells."""
        stop = start + len(rows)
        pattern = torch.full_like(rows, torch.nan)
        inside = centred_rows(rows[:, :stop], start, self.skip_keys)
        pattern[:, :stop] = inside.where(block_cells(start, stop, self.skip_keys), torch.nan)
        return pattern


def _pattern_contrasts(plan: Plan) -> dict[str, Contrast]:
    """Return by name the maps that are contrasts of the patterns of the first replacement."""
    found: dict[str, Contrast] = {"pattern/all": {INTACT: 1.0}}
    for name, term in source_terms(plan.position).items():
        found[f"source/{name}"] = term
    return found | _shapley_contrasts(plan)


def _shapley_contrasts(plan: Plan, suffix: str = "") -> dict[str, Contrast]:
    """Return by name the Shapley maps of all player sets."""
    found: dict[str, Contrast] = {}
    for index, players in enumerate(plan.player_sets):
        prefix = ("shapley" if index == 0 else f"shapley_{players.name}") + suffix
        for player in players.players:
            found[f"{prefix}/{player.name}"] = shapley(players, player)
        if not players.has_source:
            found[f"{prefix}/{BASE}"] = base(players)
    return found


def named_scores(plan: Plan, measured: Measured) -> dict[str, StoredMaps]:
    """Return the score maps of all conditions by their names in a run."""
    named = {f"score/{plan.name(condition)}": each for condition, each in measured.maps.items()}
    for replacement, others in measured.others.items():
        for condition, each in others.items():
            named[f"score_{replacement}/{plan.name(condition)}"] = each
    return named


def write_maps(path: Path, maps: RunMaps) -> None:
    """Write all maps to a file, in float32.

    Raises:
        StorageError: if it cannot be written.
    """
    with tensor_writer(path, maps.shapes) as write:
        for block in maps.blocks():
            write(block.name, (block.layer, block.start), block.rows.float().numpy())


def write_folds(path: Path, plan: Plan, measured: Measured) -> None:
    """Write each condition's fold maps as lower triangles [fold, layer, cell], in float32.

    Raises:
        StorageError: if the file cannot be written.
    """
    named = named_scores(plan, measured)
    cells = {name: [each.folds.cells for each in maps.layers] for name, maps in named.items()}
    shapes = {name: (each[0].shape[0], len(each), each[0].shape[1]) for name, each in cells.items()}
    with tensor_writer(path, shapes) as write:
        for name, layers in cells.items():
            for layer, folds in enumerate(layers):
                for fold in range(folds.shape[0]):
                    write(name, (fold, layer), folds[fold].float().numpy())


def source_offsets_table(plan: Plan, measured: Measured, skip_keys: int) -> pd.DataFrame:
    """Return the table of offset profiles: layer, term, offset, and the mean with its bounds.

    The terms are `score`, `all` (the pattern) and those of `source_terms`, which add up to `all`.
    """
    contrasts, intact = source_terms(plan.position), measured.intact
    needed = {INTACT, *(condition for term in contrasts.values() for condition in term)}
    patterns = {each: _pattern_means(measured.maps[each], skip_keys) for each in needed}
    profiles = {name: contrast_map(term, patterns) for name, term in contrasts.items()}
    terms = {"score": _score_means(intact, skip_keys), "all": patterns[INTACT], **profiles}
    return profiles_table(
        {name: profile_of_means(each, counts=intact.counts) for name, each in terms.items()}
    )


def _pattern_means(maps: StoredMaps, skip_keys: int) -> Means:
    """Return the means of fold patterns at each distance."""
    sums = [pattern_distance_sums(each.folds, skip_keys) for each in maps.layers]
    return _means(torch.stack(sums, 1), skip_keys)


def _score_means(maps: StoredMaps, skip_keys: int) -> Means:
    """Return the means of fold scores at each distance."""
    sums = torch.zeros(len(maps.counts), len(maps.layers), maps.n, dtype=torch.float64)
    for layer, each in enumerate(maps.layers):
        for start, stop in row_blocks(maps.n, len(maps.counts)):
            cells = block_cells(start, stop, skip_keys)
            rows = each.folds.rows(start, stop).double().where(cells, 0.0)
            sums[:, layer] += distance_sums(rows, start, maps.n)
    return _means(sums, skip_keys)


def _means(sums: Float[Tensor, "fold layer distance"], skip_keys: int) -> Means:
    n_offsets = sums.shape[-1] - 1 - skip_keys
    counts = cells_by_distance(sums.shape[-1], skip_keys)
    return (sums / counts.clamp_min(1))[..., 1 : n_offsets + 1]
