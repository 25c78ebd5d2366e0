"""The maps of a run of `ablate`, as its file and its page have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attribution import conditions_of
from nope_probe.analyses.contrasts import contrast_map, source_terms
from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.splits import Band
from nope_probe.figures.explorer import head_maps
from nope_probe.figures.panels import RowMaps
from nope_probe.maps.centred import diagonal_normalised, row_centred
from nope_probe.maps.folds import pooled
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.maps import Layers
from nope_probe.removal import INTACT, NO_REPLACEMENT, Condition
from nope_probe.run.checkpoint import tensor_writer
from nope_probe.studies.ablate_plan import INTACT_ROW, Maps, Plan, Row

MAPS_BYTES = 1 << 26
QUERIES = "query_positions"  # exact in float32: below 2**24


def name_of(row: Row) -> str:
    """Return the name of a row's score maps in a run: `score/mask`, `score_mean/w_q`."""
    condition, replacement = row
    by = "" if replacement == NO_REPLACEMENT else f"_{replacement}"
    return f"score{by}/{condition.name}"


def write_maps(path: Path, plan: Plan, maps: Maps, n_bytes: int = MAPS_BYTES) -> None:
    """Write the maps of a run that removes components, in float32, nats, by blocks of rows.

    Those of `name_of` are score maps. `pattern/intact`, `term/<term>` and `term/without_sources`
    are patterns, whose first column holds the lead of the first key; the terms add up to the
    pattern. Where maps do not have the rows of all queries, `query_positions` are the queries of
    their rows.

    Args:
        path: of the file.
        plan: the sources.
        maps: the score maps of every row.
        n_bytes: the size of a block of rows of all maps.

    Raises:
        StorageError: if it cannot be written.
    """
    intact, of_sources = maps[INTACT_ROW], conditions_of(plan.sources)
    first, terms = next(iter(intact.values())), source_terms(plan.sources)
    contrasts = {"pattern/intact": {INTACT: 1.0}, **{f"term/{x}": of for x, of in terms.items()}}
    contrasts["term/without_sources"] = {Condition(plan.sources): 1.0}
    size = (len(intact), len(first.queries), first.n)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys([*map(name_of, maps), *contrasts], size)
    if len(first.queries) < first.n:
        shapes[QUERIES] = (len(first.queries),)
    with tensor_writer(path, shapes) as write:
        for place, (layer, of_layer) in enumerate(intact.items()):
            pattern, row = of_layer.pattern, 0  # the intact model sees the fewest keys
            for start, stop in of_layer.folds.where.blocks(len(maps) + 1, n_bytes):
                rows = slice(row, row + stop - start)
                means = {name: of_row[layer].mean(rows) for name, of_row in maps.items()}
                patterns = {
                    condition: pattern.with_lead(means[condition, NO_REPLACEMENT], start)
                    for condition in of_sources
                }
                blocks = {name_of(name): mean for name, mean in means.items()}
                blocks |= {x: contrast_map(of, patterns) for x, of in contrasts.items()}
                for name, block in blocks.items():
                    write(name, (place, row), block.float().numpy())
                row = rows.stop
        if QUERIES in shapes:
            write(QUERIES, (0,), first.queries.float().numpy())


def intact_maps(
    layers: Layers,
    bands: Sequence[Sequence[Band]],
    band_maps: Float[Tensor, "fold layer band row key_pos"] | None,
) -> dict[str, np.ndarray]:
    """Return the maps of a run that removes nothing, float32, in nats, NaN where masked.

    `score/intact`, `se/intact` (its standard error, from folds) and `normalised/intact` (less each
    diagonal's mean, the paper's Figure 5) are [layer, row, key_pos]; so is `band/<band>` of each
    band. `score_per_head/intact` is [layer, head, row, key_pos]. If some queries have no rows,
    `query_positions` are the queries of the rows.
    """
    first, of_layers = next(iter(layers.values())), layers.values()
    where, means = first.folds.where, [layer.mean() for layer in of_layers]
    arrays = {
        "score/intact": torch.stack([mean.float() for mean in means]),
        "se/intact": torch.stack([standard_errors(layer) for layer in of_layers]),
        "normalised/intact": torch.stack(
            [diagonal_normalised(mean, where).float() for mean in means]
        ),
    }
    if first.heads:
        arrays["score_per_head/intact"] = head_means(layers)
    if len(where.queries) < where.n:
        arrays[QUERIES] = where.queries
    if band_maps is not None:
        of_bands = pooled(band_maps, first.counts).unbind(1)
        names = [f"band/{band.name}" for band in bands[0]]
        arrays |= dict(zip(names, of_bands, strict=True))
    return {name: array.float().numpy() for name, array in arrays.items()}


def standard_errors(layer: LayerMaps) -> Float[Tensor, "row key_pos"]:
    """Return the standard error of a layer's mean map in float32, nats, NaN for j > i."""
    errors, row = torch.full((len(layer.queries), layer.n), torch.nan), 0
    for start, stop in layer.folds.where.blocks(layer.folds.n_folds):
        rows = slice(row, row + stop - start)
        errors[rows, :stop] = standard_error(layer.folds.rows(start, stop), layer.weights).float()
        row = rows.stop
    return errors


def head_means(layers: Layers) -> Float[Tensor, "layer head row key_pos"]:
    """Return the mean scores of every head over all sequences, nats."""
    return torch.stack([torch.stack([x.mean() for x in maps.heads]) for maps in layers.values()])


def head_patterns(layers: Layers, heads: pd.DataFrame) -> str:
    """Return the positional pattern of every head, for the page."""
    first = next(iter(layers.values()))
    patterns = row_centred(head_means(layers), first.skip_keys, first.queries)
    return head_maps(RowMaps(values=patterns.float().numpy(), queries=first.queries.numpy()), heads)
