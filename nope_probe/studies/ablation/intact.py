"""What `ablate --remove none` reads of the intact model: its maps, its heads, and bands of RoPE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, starmap

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit, split_attention
from nope_probe.analyses.jackknife import jackknife, standard_error
from nope_probe.analyses.offsets import OffsetBins, bin_means, offset_bins
from nope_probe.analyses.pattern import edge_contrast, measure_heads
from nope_probe.analyses.pattern_rows import score_distance_sums
from nope_probe.analyses.splits import Band, BandChoice, make_bands, split_bands
from nope_probe.errors import UserError
from nope_probe.figures.measures import HEAD_MEASURES
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs, numbered_layers
from nope_probe.hooks.reading.accumulators import Cut
from nope_probe.hooks.reading.attention import AttentionAccumulator, attention_maps
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.centred import diagonal_normalised
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.folds import State, pooled
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.maps import Layers
from nope_probe.maps.rows import choose_rows
from nope_probe.run.session import Session
from nope_probe.studies.ablation.heads import (
    captured_induction,
    head_columns,
    head_sums,
    means_of,
    random_copies,
    sinks_table,
)
from nope_probe.studies.ablation.settings import Settings
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import Pass, Results, captured
from nope_probe.studies.tables import (
    WEIGHTS,
    attention_table,
    bands_table,
    columns_of,
    interval_columns,
    interval_names,
    offsets_table,
)

ADDS_UP = 1e-3  # relative error, for scores in half precision
QUERIES = "query_positions"  # exact in float32: below 2**24


class IntactModel:
    """The heads' attention and the bands of RoPE of a model from which nothing is removed.

    Args:
        session: the run in progress.
        engine: the model on the run's sequences.
        layers: the numbers of the layers that have maps.

    Attributes:
        also: what the pass of the maps adds to: each head's measures, and its attention weights.

    Raises:
        UserError: for bands of a model that has none.
    """

    def __init__(self, session: Session[Settings], engine: Engine, layers: Sequence[int]) -> None:
        settings, data = session.settings, session.sequences()
        self.engine, self.layers = engine, layers
        bands = settings.bands or None
        self.bands = bands_of_layers(engine.model, engine.inputs, layers, bands) if bands else []
        self.heads = head_sums(engine, layers) if settings.per_head else []
        self.copies, self.n_repeated = random_copies(
            engine, data, session.loaded.tokenizer, session.processes.count
        )
        cut = Cut(
            counts=engine.fold_of.bincount(),
            queries=choose_rows(engine.inputs.shape[1], engine.query_rows),
            skip_keys=settings.skip_keys_of(data.kind),
        )
        blocks = numbered_layers(engine.model, layers) if settings.per_head else []
        self.attention = [AttentionAccumulator(block, cut, keeps_scores=False) for block in blocks]
        self.also = [*self.heads, *self.attention]

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that measure induction, and that split scores into bands."""
        if self.heads:
            induction = partial(captured_induction, layers=self.layers, n_tokens=self.n_repeated)
            yield Pass(key="induction", engine=self.copies, read=partial(captured, induction))
        if self.bands:
            yield Pass(key="bands", engine=self.engine, read=partial(captured, self._capture_bands))

    def _capture_bands(self, engine: Engine, stream: StreamCheckpoint | None) -> State:
        groups = [[band.coordinates for band in of_layer] for of_layer in self.bands]
        return {"folds": engine.by_fold(capture_bands, stream, groups=groups)}

    def tables(
        self, layers: Layers, results: Results, offsets: OffsetBins
    ) -> dict[str, pd.DataFrame]:
        """Return the tables of bands and of heads, their offset profiles and attention sinks.

        A row of `heads` has its lead, three measures of its pattern, measures of its attention, and
        the position and content in its attention weights.

        Raises:
            UserError: for scores that cannot be split into bands.
        """
        tables = {}
        if self.bands:
            band_maps = results["bands"]["folds"]
            validate_bands(layers, band_maps)
            patterns = (maps.pattern for maps in layers.values())
            pairs = zip(patterns, band_maps.unbind(1), self.bands, strict=True)
            tables["bands"] = bands_table([*chain.from_iterable(starmap(split_bands, pairs))])
        if not self.heads:
            return tables
        rows = [
            {"layer": layer, "head": head, **columns_of(measures, HEAD_MEASURES)}
            for (layer, head), measures in measure_heads(layers).items()
        ]
        heads = pd.DataFrame(rows, columns=["layer", "head", *interval_names(*HEAD_MEASURES)])
        fold_of, bins = self.engine.fold_of, offset_bins(_first(layers).n_offsets, offsets)
        means = means_of(self.heads, fold_of)
        attended = head_columns((means, fold_of), (results["induction"], self.copies.fold_of))
        splits: dict[tuple[int, int], AttentionSplit] = {}
        for sums in self.attention:  # a layer at a time: the fold means are in memory once
            splits |= split_attention(attention_maps([sums]))
        split = attention_table(splits, WEIGHTS).drop(columns=["layer", "head"])
        profiles = {
            head: bin_means([maps.pattern for maps in of_layers], score_distance_sums, bins)
            for head, of_layers in enumerate(zip(*(x.heads for x in layers.values()), strict=True))
        }
        return tables | {
            "heads": pd.concat([heads, attended, split], axis=1),
            "head_offsets": offsets_table(profiles, layers, bins, label="head"),
            "sinks": sinks_table(means["first_key"], fold_of, [*layers]),
        }

    def maps(self, layers: Layers, results: Results) -> dict[str, np.ndarray]:
        """Return the maps that the run keeps, float32, in nats, NaN where the model masks.

        `score/intact`, `se/intact` (its standard error, from folds) and `normalised/intact` (less
        each diagonal's mean, the paper's Figure 5) are [layer, row, key_pos]; so is
        `band/<band>` of each band. `score_per_head/intact` is [layer, head, row, key_pos]. If some
        queries have no rows, `query_positions` are the queries of the rows.
        """
        first = _first(layers)
        where, means = first.folds.where, [layer.mean() for layer in layers.values()]
        arrays = {
            "score/intact": torch.stack([mean.float() for mean in means]),
            "se/intact": torch.stack([_standard_errors(layer) for layer in layers.values()]),
            "normalised/intact": torch.stack(
                [diagonal_normalised(mean, where).float() for mean in means]
            ),
        }
        if first.heads:
            arrays["score_per_head/intact"] = head_means(layers)
        if len(where.queries) < where.n:
            arrays[QUERIES] = where.queries
        if self.bands:
            of_bands = pooled(results["bands"]["folds"], first.counts).unbind(1)
            names = [f"band/{band.name}" for band in self.bands[0]]
            arrays |= dict(zip(names, of_bands, strict=True))
        return {name: array.float().numpy() for name, array in arrays.items()}


def _first(layers: Layers) -> LayerMaps:
    return next(iter(layers.values()))


def contrasts(layers: Layers) -> pd.DataFrame:
    """Return the edge contrast of each layer's scores, the paper's of Figure 5, nats."""
    return pd.DataFrame(
        interval_columns(
            edge_contrast=jackknife(Estimates.of_means(edge_contrast(x.pattern), x.weights))
        )
        for x in layers.values()
    )


def validate_bands(layers: Layers, band_maps: Float[Tensor, "fold layer band row key_pos"]) -> None:
    """Check that the maps of bands add up to the scores.

    Raises:
        UserError: naming the first layer whose scores are not q.k.
    """
    for place, (number, layer) in enumerate(layers.items()):
        scores, added = layer.folds.maps, band_maps[:, place].sum(1)
        visible = ~scores[0].isnan()
        if not relative_error(added[:, visible], scores[:, visible]) < ADDS_UP:
            raise UserError(f"--bands: the scores of L{number} are not q.k, so they have no bands")


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


def head_means(layers: Layers) -> Float[Tensor, "layer head row key_pos"]:
    """Return the mean scores of every head over all sequences, nats."""
    return torch.stack([torch.stack([x.mean() for x in maps.heads]) for maps in layers.values()])


def _standard_errors(layer: LayerMaps) -> Float[Tensor, "row key_pos"]:
    """Return the standard error of a layer's mean map in float32, nats, NaN for j > i."""
    errors, row = torch.full((len(layer.queries), layer.n), torch.nan), 0
    for start, stop in layer.folds.where.blocks(layer.folds.n_folds):
        rows = slice(row, row + stop - start)
        errors[rows, :stop] = standard_error(layer.folds.rows(start, stop), layer.weights).float()
        row = rows.stop
    return errors
