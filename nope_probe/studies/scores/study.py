"""The `scores` command's study: its passes, and the run of their maps and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit, split_attention
from nope_probe.analyses.jackknife import jackknife, standard_error
from nope_probe.analyses.offsets import bin_means, offset_bins
from nope_probe.analyses.pattern import edge_contrast, measure, measure_heads, query_stride
from nope_probe.analyses.pattern_rows import pattern_distance_sums, score_distance_sums
from nope_probe.analyses.splits import Band, BandChoice, make_bands, split_bands
from nope_probe.errors import UserError
from nope_probe.figures.explorer import head_maps
from nope_probe.figures.measures import HEAD_MEASURES
from nope_probe.figures.panels import RowMaps
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given, Inputs, numbered_layers
from nope_probe.hooks.reading.accumulators import Cut
from nope_probe.hooks.reading.attention import AttentionAccumulator, attention_maps
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.centred import diagonal_normalised, row_centred
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.folds import State, pooled
from nope_probe.maps.layers import LayerMaps, windows_of
from nope_probe.maps.maps import Layers
from nope_probe.maps.rows import choose_rows
from nope_probe.removal import INTACT
from nope_probe.reports.notes import WITHOUT_SHARES
from nope_probe.run.checkpoint import ITEM, write_folds
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.processes import print_line
from nope_probe.run.session import Session
from nope_probe.studies.engine import Engine, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes
from nope_probe.studies.page import with_page
from nope_probe.studies.scores.heads import (
    HeadMeans,
    HeadScores,
    head_columns,
    head_sums,
    layers_without_shares,
)
from nope_probe.studies.scores.page import report
from nope_probe.studies.scores.settings import Settings
from nope_probe.studies.study import Pass, Results, Study, captured, run_study
from nope_probe.studies.tables import (
    WEIGHTS,
    attention_table,
    bands_table,
    columns_of,
    interval_columns,
    interval_names,
    measures_table,
    offsets_table,
    queries_table,
)

MAX_FOLD_BYTES = 2**30
ADDS_UP = 1e-3  # relative error, for scores in half precision


class MapScores(Study[Settings]):
    """The mean scores of every layer, whole or per head, and in bands of RoPE."""

    command = "scores"
    function = "run_scores"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, engine, model = self.settings, Engine.of(session), session.loaded.model
        layers = settings.layers_with_maps(session.loaded.info)
        self.engine, self.layers = engine, layers
        bands, inputs = settings.bands, engine.inputs
        self.bands = [] if bands is None else bands_of_layers(model, inputs, layers, bands)
        self.heads: list[HeadScores] = []
        self.attention: list[AttentionAccumulator] = []
        if settings.per_head:
            if layers_without_shares(model, layers):
                print_line(WITHOUT_SHARES)
            self.heads = head_sums(model, layers, session.sequences(), engine.n_folds)
            cut = Cut(
                counts=engine.fold_of.bincount(),
                queries=choose_rows(inputs.shape[1], engine.query_rows),
                skip_keys=settings.skip_keys_of(session.sequences().kind),
            )
            blocks = numbered_layers(model, layers)
            self.attention = [AttentionAccumulator(x, cut, keeps_scores=False) for x in blocks]

    def passes(self) -> Iterator[Pass]:
        """Yield the pass that maps the scores, and the one that splits them into bands."""
        if "scores" not in self.session.checkpoint:
            validate_first_sequence(self.engine.model, self.engine.inputs, self.layers)
        yield Pass(key="scores", engine=self.engine, read=self._read_scores)
        if self.bands:
            yield Pass(key="bands", engine=self.engine, read=partial(captured, self._capture_bands))

    def _read_scores(self, engine: Engine, key: str, ablation: Ablation | None) -> Layers:
        return engine.scores(
            key,
            ablation,
            layers=self.layers,
            per_head=self.settings.per_head,
            also=[*self.heads, *self.attention],
        )

    def _capture_bands(self, engine: Engine, stream: StreamCheckpoint | None) -> State:
        groups = [[band.coordinates for band in of_layer] for of_layer in self.bands]
        return {"folds": engine.by_fold(capture_bands, stream, groups=groups)}

    def analyse(self, results: Results) -> Run:
        """Measure the maps, and return the run.

        Raises:
            UserError: for scores that cannot be split into bands.
        """
        session, layers, inputs = self.session, results["scores"], self.session.sequences()
        first, patterns = next(iter(layers.values())), [maps.pattern for maps in layers.values()]
        bins = offset_bins(first.n_offsets, self.settings.offset_bins)
        sums = {"score": score_distance_sums, "pattern": pattern_distance_sums}
        offsets = {name: bin_means(patterns, of, bins) for name, of in sums.items()}
        tables = {
            "pattern": pattern_table(layers),
            "offsets": offsets_table(offsets, layers, bins),
            "queries": queries_table(layers),
        }
        maps, of_heads, without_shares = map_arrays(layers), "", list[int]()
        if self.bands:
            band_maps = results["bands"]["folds"]
            validate_bands(layers, band_maps)
            pairs = zip(patterns, band_maps.unbind(1), self.bands, strict=True)
            tables["bands"] = bands_table([*chain.from_iterable(starmap(split_bands, pairs))])
            of_bands = zip(self.bands[0], pooled(band_maps, first.counts).unbind(1), strict=True)
            maps |= {f"band/{band.name}": of_band.float().numpy() for band, of_band in of_bands}
        if first.heads:
            tables |= self._head_tables(layers, bins)
            of_heads = head_patterns(layers, tables["heads"])
            without_shares = layers_without_shares(session.loaded.model, [*layers])
        manifest = replace(
            session.manifest_of(inputs),
            query_stride=query_stride(len(first.queries)),
            layers=tuple(layers),
            windows=windows_of(layers),
            without_shares=tuple(without_shares),
            lengths=session.lengths,
            conditions=(INTACT.name,),
        )
        run = Run(
            manifest=manifest,
            arrays={"tokens": input_arrays(inputs), "maps": maps},
            tables=tables,
            files=self._folds(layers),
        )
        return with_page(session, run, partial(report, heads=of_heads))

    def _head_tables(self, layers: Layers, bins: Int[Tensor, " bin"]) -> dict[str, pd.DataFrame]:
        """Return the tables of heads, of their offset profiles and of attention sinks.

        A row of `heads` has its lead, three measures of its pattern, measures of its attention, and
        the position and content in its attention weights.
        """
        rows = [
            {"layer": layer, "head": head, **columns_of(measures, HEAD_MEASURES)}
            for (layer, head), measures in measure_heads(layers).items()
        ]
        heads = pd.DataFrame(rows, columns=["layer", "head", *interval_names(*HEAD_MEASURES)])
        loaded, fold_of = self.session.loaded, self.engine.fold_of
        attended, sinks = head_columns(
            loaded.model,
            self.session.sequences(),
            loaded.tokenizer,
            [*layers],
            self.settings.folds,
            HeadMeans.of(self.heads, fold_of),
        )
        splits: dict[tuple[int, int], AttentionSplit] = {}
        for sums in self.attention:  # a layer at a time: the fold means are in memory once
            splits |= split_attention(attention_maps([sums]))
        split = attention_table(splits, WEIGHTS).drop(columns=["layer", "head"])
        offsets = {
            head: bin_means([maps.pattern for maps in of_layers], score_distance_sums, bins)
            for head, of_layers in enumerate(zip(*(x.heads for x in layers.values()), strict=True))
        }
        return {
            "heads": pd.concat([heads, attended, split], axis=1),
            "head_offsets": offsets_table(offsets, layers, bins, label="head"),
            "sinks": sinks,
        }

    def _folds(self, layers: Layers) -> dict[str, Path]:
        """Write the fold means, with which `compare` pairs runs, unless they are too large.

        Fold means beyond MAX_FOLD_BYTES would take more space than the maps.
        """
        queries, n_folds = next(iter(layers.values())).queries, self.engine.n_folds
        if ITEM * n_folds * len(layers) * int((queries + 1).sum()) > MAX_FOLD_BYTES:
            return {}
        write_folds(path := self.session.checkpoint.scratch("folds"), {"score": layers})
        return {"folds.safetensors": path}


run = partial(run_study, MapScores)


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


def pattern_table(layers: Layers) -> pd.DataFrame:
    """Return the measures of each layer's pattern, and the contrast of the paper's Figure 5."""
    contrasts = pd.DataFrame(
        interval_columns(
            edge_contrast=jackknife(Estimates.of_means(edge_contrast(x.pattern), x.weights))
        )
        for x in layers.values()
    )
    return measures_table([({"removed": INTACT.name}, measure(layers))], [*layers]).join(contrasts)


def head_patterns(layers: Layers, heads: pd.DataFrame) -> str:
    """Return the positional pattern of every head, for the page."""
    first = next(iter(layers.values()))
    patterns = row_centred(head_means(layers), first.skip_keys, first.queries)
    return head_maps(RowMaps(values=patterns.float().numpy(), queries=first.queries.numpy()), heads)


def map_arrays(layers: Layers) -> dict[str, np.ndarray]:
    """Return the maps that a run keeps, float32, in nats, NaN where the model masks.

    `score`, `se` (its standard error, from folds) and `normalised` (less each diagonal's mean, the
    paper's Figure 5) are [n_layers, row, key_pos]; `score_per_head`, if heads were kept, is
    [n_layers, head, row, key_pos]. If some queries have no rows, `query_positions` are the queries
    of the rows.
    """
    first = next(iter(layers.values()))
    where, means = first.folds.where, [layer.mean() for layer in layers.values()]
    arrays = {
        "score": torch.stack([mean.float() for mean in means]),
        "se": torch.stack([_standard_errors(layer) for layer in layers.values()]),
        "normalised": torch.stack([diagonal_normalised(mean, where).float() for mean in means]),
    }
    if first.heads:
        arrays["score_per_head"] = head_means(layers)
    if len(where.queries) < where.n:
        arrays["query_positions"] = where.queries  # exact in float32: below 2**24
    return {name: array.float().numpy() for name, array in arrays.items()}


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


@takes(MapScores)
def run_scores(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Any
) -> Run:
    """Map a model's mean scores, whole or per head, as the `scores` command does.

    Inside `ablated`, the ablated model is measured.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_scores
        >>> run = run_scores("rope-tiny", layers=2, n_seqs=64, per_head=True)
        >>> run.maps["score_per_head"].shape
        (2, 4, 64, 64)
    """
    return run_of(MapScores, model, inputs, out, options)
