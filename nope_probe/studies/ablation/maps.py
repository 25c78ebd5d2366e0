"""The maps of a run of `ablate`, and its folds, written to files a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.contrasts import Contrast, contrast_map, source_terms
from nope_probe.maps.folds import pooled
from nope_probe.maps.layers import Pattern
from nope_probe.maps.maps import Layers
from nope_probe.removal import INTACT, Condition
from nope_probe.run.checkpoint import tensor_writer
from nope_probe.studies.ablation.plan import AblationPlan, Measured

MAPS_BYTES = 1 << 26
QUERIES = "query_positions"  # exact in float32: below 2**24
MeanRows = Float[Tensor, "row key_pos"]


class RunMaps:
    """The maps of an attribution by name, nats.

    `score/<removed>` per condition (of a replacement of weights `score_<replacement>/<removed>`)
    and `mean_covariance/<term>` are score maps; `pattern/intact`, `pattern/mean_term`,
    `pattern/covariance_term`, `term/<term>` and `term/without_sources` are patterns, whose first
    column holds the lead of the first key. The terms add up to the pattern. Where maps do not have
    the rows of all queries, `query_positions` are the queries of their rows.

    Args:
        plan: the conditions.
        measured: their score maps.
    """

    def __init__(self, plan: AblationPlan, measured: Measured) -> None:
        self.intact, self.of_sources = measured.intact, plan.of_sources
        self.maps, self.scores = measured.maps, named_scores(measured)
        terms = source_terms(plan.sources) | {"without_sources": {Condition(plan.sources): 1.0}}
        self.contrasts: dict[str, Contrast] = {"pattern/intact": {INTACT: 1.0}}
        self.contrasts |= {f"term/{name}": term for name, term in terms.items()}
        self.first = next(iter(measured.intact.values()))
        self.has_mean_term = self.first.mean_term is not None

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shape [layer, row, key_pos] of each map."""
        names = [*self.scores, *self.contrasts]
        if self.has_mean_term:
            for term in ("mean", "covariance"):
                names += [f"mean_covariance/{term}", f"pattern/{term}_term"]
        shape = (len(self.intact), len(self.first.queries), self.first.n)
        return dict.fromkeys(names, shape)

    def blocks(self, n_bytes: int = MAPS_BYTES) -> Iterator[tuple[str, int, int, MeanRows]]:
        """Yield all maps by blocks of rows: name, the layer's place, first row, and rows.

        Args:
            n_bytes: the size of a row block of all conditions.
        """
        for place, (layer, intact) in enumerate(self.intact.items()):
            pattern, row = intact.pattern, 0  # the intact model sees the fewest keys
            for start, stop in intact.folds.where.blocks(len(self.scores) + 1, n_bytes):
                for name, rows in self._rows(layer, start, stop, row, pattern):
                    yield name, place, row, rows
                row += stop - start

    def _rows(
        self, layer: int, start: int, stop: int, row: int, pattern: Pattern
    ) -> Iterator[tuple[str, MeanRows]]:
        """Yield some queries of one layer of each map."""
        rows_of_block = slice(row, row + stop - start)
        for name, maps in self.scores.items():
            yield name, maps[layer].mean(rows_of_block)
        patterns = {
            condition: pattern.with_lead(self.maps[condition][layer].mean(rows_of_block), start)
            for condition in self.of_sources
        }
        for name, contrast in self.contrasts.items():
            yield name, contrast_map(contrast, patterns)
        intact = self.intact[layer]
        if intact.mean_term is not None:
            score = intact.mean(rows_of_block)
            mean = torch.full_like(score, torch.nan)
            mean[:, :stop] = pooled(intact.mean_term.folds.rows(start, stop), intact.counts)
            for term, rows in (("mean", mean), ("covariance", score - mean)):
                yield f"mean_covariance/{term}", rows
                yield f"pattern/{term}_term", pattern.with_lead(rows, start)


def named_scores(measured: Measured) -> dict[str, Layers]:
    """Return the score maps of all conditions by their names in a run."""
    named = {f"score/{condition.name}": maps for condition, maps in measured.maps.items()}
    for replacement, replaced in measured.replaced.items():
        for condition, maps in replaced.items():
            named[f"score_{replacement}/{condition.name}"] = maps
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
