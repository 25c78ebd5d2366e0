"""The offset profiles of an attribution: of the scores, the pattern, and each source's term."""

from __future__ import annotations

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.contrasts import contrast_map
from nope_probe.analyses.distances import cells_by_distance, distance_sums, profile_of_means
from nope_probe.analyses.pattern_rows import pattern_distance_sums
from nope_probe.analyses.shapley import INTACT, source_terms
from nope_probe.experiments.ablation.conditions import Measured
from nope_probe.experiments.ablation.plan import Plan
from nope_probe.experiments.split_tables import profiles_table
from nope_probe.maps.centred import block_cells
from nope_probe.maps.stored_maps import StoredMaps, row_blocks

Means = Float[Tensor, "fold layer offset"]


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
