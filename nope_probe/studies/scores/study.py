"""The `scores` command's study: its passes, and the run of their maps and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit, split_attention
from nope_probe.analyses.jackknife import jackknife, mean_intervals, standard_error
from nope_probe.analyses.offsets import OffsetBins, bin_means, offset_bins
from nope_probe.analyses.pattern import edge_contrast, measure, measure_heads, query_stride
from nope_probe.analyses.pattern_rows import pattern_distance_sums, score_distance_sums
from nope_probe.analyses.splits import Band, BandChoice, make_bands, split_bands
from nope_probe.errors import UserError
from nope_probe.figures.explorer import head_maps
from nope_probe.figures.measures import HEAD_MEASURES
from nope_probe.figures.panels import RowMaps
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given, Inputs, numbered_layers, skip_keys_of
from nope_probe.hooks.reading.accumulators import Cut
from nope_probe.hooks.reading.attention import AttentionAccumulator, attention_maps
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.centred import diagonal_normalised, row_centred
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.folds import State, folds_of, pooled
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
from nope_probe.run.settings import RunSettings
from nope_probe.studies.engine import Engine, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, run_of, takes
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
    profiles_table,
    queries_table,
)

MAX_FOLD_BYTES = 2**30
ADDS_UP = 1e-3  # relative error, for scores in half precision


@dataclass(frozen=True, kw_only=True)
class MeasuredScores:
    """The score maps of the intact model.

    Attributes:
        layers: the maps of each layer, with those of its heads if these are kept.
        heads: the measures of heads that the same passes gave, if heads are kept.
        attention: the sums of each layer's attention weights from the same passes, if heads are
            kept.
        bands: the RoPE bands of each layer; empty unless the maps were split by them.
        band_maps: the map of each band, nats.
    """

    layers: Layers
    heads: HeadMeans | None = None
    attention: Sequence[AttentionAccumulator] = ()
    bands: list[list[Band]]
    band_maps: Float[Tensor, "fold layer band row key_pos"] | None = None

    @property
    def first(self) -> LayerMaps:
        """The maps of the first layer, which have the folds and rows of all."""
        return next(iter(self.layers.values()))


class MapScores(Study[Settings, Run]):
    """The mean scores of every layer, whole or per head, and in bands of RoPE."""

    command = "scores"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, engine, model = self.settings, Engine.of(session), session.loaded.model
        layers = settings.layers_with_maps(session.loaded.info)
        self.engine, self.layers = engine, layers
        bands, inputs = settings.bands, engine.inputs
        self.bands = [] if bands is None else bands_of_layers(model, inputs, layers, bands)
        self.sums: list[HeadScores] = []
        self.attention: list[AttentionAccumulator] = []
        self.fold_of = folds_of(len(inputs), engine.n_folds, engine.documents)
        if settings.per_head:
            if layers_without_shares(model, layers):
                print_line(WITHOUT_SHARES)
            self.sums = head_sums(model, layers, session.sequences(), engine.n_folds)
            self.attention = attention_sums(engine, layers, self.fold_of)

    def passes(self) -> Iterator[Pass]:
        """Yield the pass that maps the scores, and the one that splits them into bands."""
        if "scores" not in self.session.checkpoint:
            validate_first_sequence(self.engine.model, self.engine.inputs, self.layers)
        yield Pass(key="scores", engine=self.engine, read=self._read_scores)
        if self.bands:
            yield Pass(key="bands", engine=self.engine, read=partial(captured, self._capture_bands))

    def _read_scores(self, engine: Engine, key: str, ablation: Ablation | None) -> Layers:
        return engine.stored_scores(
            key,
            ablation,
            name="the intact model",
            layers=self.layers,
            per_head=self.settings.per_head,
            also=[*self.sums, *self.attention],
        )

    def _capture_bands(self, engine: Engine, stream: StreamCheckpoint | None) -> State:
        groups = [[band.coordinates for band in of_layer] for of_layer in self.bands]
        return {"folds": engine.by_fold(capture_bands, stream, groups=groups)}

    def analyse(self, results: Results) -> Run:
        """Measure the maps, and return the run.

        Raises:
            UserError: for scores that cannot be split into bands.
        """
        layers, band_maps = results["scores"], results.get("bands", {}).get("folds")
        if band_maps is not None:
            validate_bands(layers, band_maps)
        measured = MeasuredScores(
            layers=layers,
            heads=HeadMeans.of(self.sums, self.fold_of) if self.sums else None,
            attention=self.attention,
            bands=self.bands,
            band_maps=band_maps,
        )
        return analyse(self.session, measured, self.settings.offset_bins)


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


def attention_sums(
    engine: Engine, layers: Sequence[int], fold_of: Int[Tensor, " seq"]
) -> list[AttentionAccumulator]:
    """Return the sums that the passes add the attention weights of each layer to."""
    cut = Cut(
        counts=fold_of.bincount(),
        queries=choose_rows(engine.inputs.shape[1], engine.query_rows),
        skip_keys=skip_keys_of(engine.inputs) if engine.skip_keys is None else engine.skip_keys,
    )
    blocks = numbered_layers(engine.model, layers)
    return [AttentionAccumulator(layer, cut, keeps_scores=False) for layer in blocks]


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


def analyse(
    session: Session[RunSettings], measured: MeasuredScores, choice: OffsetBins = "auto"
) -> Run:
    """Measure the maps, and return the run.

    Args:
        session: the run.
        measured: its maps.
        choice: the distances that share a row of the offset profiles; see `offset_bins`.
    """
    inputs, layers, first = session.sequences(), measured.layers, measured.first
    tables = {
        "pattern": _pattern_table(layers),
        "offsets": _offsets_table(layers, choice),
        "queries": queries_table(layers),
    }
    if measured.band_maps is not None:
        of_layers = (layer.pattern for layer in layers.values())
        pairs = zip(of_layers, measured.band_maps.unbind(1), measured.bands, strict=True)
        split = [split_bands(pattern, maps, bands) for pattern, maps, bands in pairs]
        tables["bands"] = bands_table([*chain.from_iterable(split)])
    patterns = ""
    if first.heads:
        tables |= _head_tables(session, measured, choice)
        patterns = head_patterns(layers, tables["heads"])
    manifest = replace(
        session.manifest_of(inputs, first.skip_keys, first.counts),
        query_stride=query_stride(len(first.queries)),
        layers=tuple(layers),
        windows=windows_of(layers),
        without_shares=_without_shares(session, layers),
        lengths=session.lengths,
        conditions=(INTACT.name,),
    )
    arrays = {"tokens": input_arrays(inputs), "maps": map_arrays(measured)}
    files = _folds(session, measured)
    run = Run(manifest=manifest, arrays=arrays, tables=tables, files=files)
    return with_page(session, run, partial(report, heads=patterns))


def _without_shares(session: Session[RunSettings], layers: Layers) -> tuple[int, ...]:
    """Return the layers whose heads have no positional and symbolic shares."""
    has_heads = bool(next(iter(layers.values())).heads)
    return tuple(layers_without_shares(session.loaded.model, [*layers])) if has_heads else ()


def _pattern_table(layers: Layers) -> pd.DataFrame:
    """Return the measures of each layer's pattern, and the contrast of the paper's Figure 5."""
    contrasts = pd.DataFrame(
        interval_columns(
            edge_contrast=jackknife(Estimates.of_means(edge_contrast(x.pattern), x.weights))
        )
        for x in layers.values()
    )
    return measures_table([({"removed": INTACT.name}, measure(layers))], [*layers]).join(contrasts)


def _offsets_table(layers: Layers, choice: OffsetBins) -> pd.DataFrame:
    """Return the table of the offset profiles of the scores and of their pattern."""
    patterns = [maps.pattern for maps in layers.values()]
    first = patterns[0].maps
    n_offsets = first.n - 1 - first.skip_keys
    bins = offset_bins(n_offsets, choice)
    sums = {"score": score_distance_sums, "pattern": pattern_distance_sums}
    profiles = {
        name: mean_intervals(bin_means(patterns, of, bins), first.weights)
        for name, of in sums.items()
    }
    return profiles_table(profiles, [*layers], bins, n_offsets)


def _head_tables(
    session: Session[RunSettings], measured: MeasuredScores, choice: OffsetBins
) -> dict[str, pd.DataFrame]:
    """Return the tables of heads, of their offset profiles and of attention sinks.

    A row of `heads` has its lead, three measures of its pattern, measures of its attention, and the
    position and content in its attention weights.
    """
    layers = measured.layers
    rows = [
        {"layer": layer, "head": head, **columns_of(measures, HEAD_MEASURES)}
        for (layer, head), measures in measure_heads(layers).items()
    ]
    heads = pd.DataFrame(rows, columns=["layer", "head", *interval_names(*HEAD_MEASURES)])
    loaded, folds = session.loaded, session.settings.folds
    attended, sinks = head_columns(
        loaded.model, session.sequences(), loaded.tokenizer, [*layers], folds, measured.heads
    )
    splits: dict[tuple[int, int], AttentionSplit] = {}
    for sums in measured.attention:  # a layer at a time: the fold means are in memory once
        splits |= split_attention(attention_maps([sums]))
    split = attention_table(splits, WEIGHTS).drop(columns=["layer", "head"])
    n_heads = len(next(iter(layers.values())).heads)
    of_head = {head: {n: maps.heads[head] for n, maps in layers.items()} for head in range(n_heads)}
    return {
        "heads": pd.concat([heads, attended, split], axis=1),
        "head_offsets": offsets_table(of_head, choice, label="head"),
        "sinks": sinks,
    }


def head_patterns(layers: Layers, heads: pd.DataFrame) -> str:
    """Return the positional pattern of every head, for the page."""
    queries = next(iter(layers.values())).queries
    patterns = row_centred(head_means(layers), next(iter(layers.values())).skip_keys, queries)
    return head_maps(RowMaps(values=patterns.float().numpy(), queries=queries.numpy()), heads)


def map_arrays(measured: MeasuredScores) -> dict[str, np.ndarray]:
    """Return the maps that a run keeps, float32, in nats, NaN where the model masks.

    `score`, `se` (its standard error, from folds), `normalised` (less each diagonal's mean, the
    paper's Figure 5) and `band/<name>` are [n_layers, row, key_pos]; `score_per_head`, if heads
    were kept, is [n_layers, head, row, key_pos]. If some queries have no rows, `query_positions`
    are the queries of the rows.
    """
    layers, where = measured.layers.values(), measured.first.folds.where
    means = [layer.mean() for layer in layers]
    arrays = {
        "score": torch.stack([mean.float() for mean in means]),
        "se": torch.stack([_standard_errors(layer) for layer in layers]),
        "normalised": torch.stack([diagonal_normalised(mean, where).float() for mean in means]),
    }
    if measured.first.heads:
        arrays["score_per_head"] = head_means(measured.layers)
    if measured.band_maps is not None:
        of_bands = pooled(measured.band_maps, measured.first.counts)
        for index, band in enumerate(measured.bands[0]):
            arrays[f"band/{band.name}"] = of_bands[:, index]
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


def _folds(session: Session[RunSettings], measured: MeasuredScores) -> dict[str, Path]:
    """Write the fold means, with which `compare` pairs runs, unless they are too large.

    Fold means beyond MAX_FOLD_BYTES would take more space than the maps.
    """
    n_maps = measured.first.folds.n_folds * len(measured.layers)
    if ITEM * n_maps * int((measured.first.queries + 1).sum()) > MAX_FOLD_BYTES:
        return {}
    write_folds(path := session.checkpoint.scratch("folds"), {"score": measured.layers})
    return {"folds.safetensors": path}


@takes(MapScores)
def run_scores(
    model: ModelOrName,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Any,
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
