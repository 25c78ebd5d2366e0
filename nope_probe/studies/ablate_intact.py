"""What `ablate --remove none` reads and writes: the intact model's maps, bands and heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, starmap
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit, split_attention
from nope_probe.analyses.head_measures import attended
from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure_heads
from nope_probe.analyses.splits import Band, BandChoice, make_bands, split_bands
from nope_probe.errors import UserError
from nope_probe.figures.explorer import head_maps
from nope_probe.figures.panels import RowMaps
from nope_probe.figures.words import HEAD_MEASURES
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs, numbered_layers
from nope_probe.hooks.reading.accumulators import Cut
from nope_probe.hooks.reading.attention import AttentionAccumulator, attention_maps
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.centred import diagonal_normalised, row_centred
from nope_probe.maps.folds import State, pooled
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.maps import Layers
from nope_probe.maps.rows import choose_rows
from nope_probe.studies.ablate_plan import INTACT_ROW, QUERIES, named
from nope_probe.studies.engine import Engine
from nope_probe.studies.head_scores import HeadSums, head_columns, head_sums, means_of
from nope_probe.studies.tables import WEIGHTS, attention_table, columns_of, interval_columns

ADDS_UP = 1e-3  # relative error, for scores in half precision


class Reading(NamedTuple):
    """What the pass of an intact model reads: score maps and, of each layer, sums over its heads.

    Attributes:
        maps: the score maps of each layer.
        heads: the measures of its heads' attention, where heads are kept.
        attention: the attention weights of its heads.
    """

    maps: Layers
    heads: list[HeadSums]
    attention: list[AttentionAccumulator]


def read_intact(
    engine: Engine, key: str, ablation: Ablation | None, *, layers: Sequence[int], per_head: bool
) -> Reading:
    """Return the maps of the intact model and its heads' attention, from one pass."""
    cut = Cut(
        counts=engine.fold_of.bincount(),
        queries=choose_rows(engine.inputs.shape[1], engine.query_rows),
        skip_keys=engine.skip_keys or 0,
    )
    heads = head_sums(engine.model, layers, engine.n_folds, attended) if per_head else []
    attention = [AttentionAccumulator(of.layer, cut, keeps_scores=False) for of in heads]
    also = [*heads, *attention]
    maps = engine.scores(key, ablation, layers=layers, per_head=per_head, also=also)
    return Reading(maps, heads, attention)


def capture_band_folds(
    engine: Engine, stream: StreamCheckpoint | None, *, bands: Sequence[Sequence[Band]]
) -> State:
    """Return the fold maps of bands of RoPE, `folds` [fold, layer, band, row, key_pos], nats."""
    groups = [[band.coordinates for band in of_layer] for of_layer in bands]
    return {"folds": engine.by_fold(capture_bands, stream, groups=groups)}


def bands_of_layers(
    model: HookedModel, inputs: Inputs, layers: Sequence[int], choice: BandChoice
) -> list[list[Band]]:
    """Return the bands of the first layers that attend, from their rotations.

    Raises:
        UserError: if no layer has RoPE, if scores are soft-capped, or for too many bands.
    """
    blocks = numbered_layers(model, layers)
    capped = [f"L{layer.index}" for layer in blocks if layer.soft_cap is not None]
    if capped:
        raise UserError(f"--bands: the scores of {capped[0]} are soft-capped, so they are no sum")
    try:
        rotations = read_rotations(model, inputs[:1], len(blocks))
        return make_bands(rotations, blocks[0].d_head, choice, layers)
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"--bands: {error}") from error


def bands_table(
    layers: Layers,
    band_maps: Float[Tensor, "fold layer band row key_pos"],
    bands: Sequence[Sequence[Band]],
) -> pd.DataFrame:
    """Return each band as a term of its layer's pattern, with its pairs and wavelengths (tokens).

    `size` is its amplitude, nats, and `share` its share of the pattern. `first_pair` and
    `last_pair` count from 0. The unrotated rest has no pairs and no wavelengths.

    Raises:
        UserError: naming the first layer whose scores are not q.k, the sum of its bands.
    """
    for (number, layer), of_layer in zip(layers.items(), band_maps.unbind(1), strict=True):
        scores, added = layer.folds.maps, of_layer.sum(1)
        visible = ~scores[0].isnan()
        if not relative_error(added[:, visible], scores[:, visible]) < ADDS_UP:
            raise UserError(f"--bands: the scores of L{number} are not q.k, so they have no bands")
    patterns = (maps.pattern for maps in layers.values())
    parts = starmap(split_bands, zip(patterns, band_maps.unbind(1), bands, strict=True))
    rows = [
        {
            **{"layer": part.band.layer, "of": "pattern", "term": part.band.name},
            **interval_columns(size=part.amplitude, share=part.share),
            "n_pairs": len(part.band.pairs),
            "first_pair": min(part.band.pairs, default=None),
            "last_pair": max(part.band.pairs, default=None),
            "shortest_wavelength": min(part.band.wavelengths, default=None),
            "longest_wavelength": max(part.band.wavelengths, default=None),
        }
        for part in chain.from_iterable(parts)
    ]
    return pd.DataFrame(rows).astype({"first_pair": "Int64", "last_pair": "Int64"})


def heads_table(
    reading: Reading, induction: State, fold_of: Tensor, fold_of_copies: Tensor
) -> pd.DataFrame:
    """Return each head's lead and three measures of its pattern, and its attention's measures.

    Args:
        reading: of the intact model.
        induction: fold means of induction attention.
        fold_of: the fold of each sequence.
        fold_of_copies: the fold of each sequence of repeated tokens.
    """
    rows = pd.DataFrame(
        {"layer": layer, "head": head, **named(INTACT_ROW), **columns_of(measures, HEAD_MEASURES)}
        for (layer, head), measures in measure_heads(reading.maps).items()
    )
    means = means_of(reading.heads, fold_of)
    attended = head_columns((means, fold_of), (induction, fold_of_copies))
    splits: dict[tuple[int, int], AttentionSplit] = {}
    for sums in reading.attention:  # a layer at a time: the fold means are in memory once
        splits |= split_attention(attention_maps([sums]))
    split = attention_table(splits, WEIGHTS).drop(columns=["layer", "head"])
    return pd.concat([rows, attended, split], axis=1)


def intact_maps(
    layers: Layers,
    bands: Sequence[Sequence[Band]],
    band_maps: Float[Tensor, "fold layer band row key_pos"] | None,
) -> dict[str, np.ndarray]:
    """Return the maps of a run that removes nothing, float32, in nats, NaN where masked.

    `score/intact`, `se/intact` (its standard error, from folds), `pattern/intact` (whose first
    column holds the lead) and `normalised/intact` (less each diagonal's mean, the paper's Figure 5)
    are [layer, row, key_pos]; so is `band/<band>` of each band. `score_per_head/intact` is [layer,
    head, row, key_pos]. If some queries have no rows, `query_positions` are the queries of the
    rows.
    """
    first, of_layers = next(iter(layers.values())), layers.values()
    where, means = first.folds.where, [layer.mean() for layer in of_layers]
    arrays = {
        "score/intact": torch.stack([mean.float() for mean in means]),
        "se/intact": torch.stack([standard_errors(layer) for layer in of_layers]),
        "pattern/intact": torch.stack([layer.pattern.mean_with_lead() for layer in of_layers]),
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
