"""The intact model's score maps, their RoPE bands, and the run made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure, measure_heads, query_stride
from nope_probe.analyses.recover import recover_rotation
from nope_probe.analyses.splits import Band, BandChoice, OffsetBins, make_bands, split_bands
from nope_probe.errors import UserError
from nope_probe.experiments.engine import Engine, validate_finite, validate_first_sequence
from nope_probe.experiments.scores.heads import head_columns
from nope_probe.experiments.scores.sections import report
from nope_probe.experiments.tables import (
    bands_table,
    columns_of,
    interval_names,
    measures_table,
    offsets_table,
    queries_table,
)
from nope_probe.figures.explorer import head_maps
from nope_probe.figures.measures import HEAD_MEASURES
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs, numbered_layers
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.maps.centred import diagonal_normalised, row_centred
from nope_probe.maps.folds import pooled
from nope_probe.maps.layers import LayerMaps, windows_of
from nope_probe.maps.maps import Layers, ScoreMaps
from nope_probe.maps.rows import pack_rows
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

INTACT = "intact"
MAX_FOLD_BYTES = 2**30
ADDS_UP = 1e-3  # relative error, for scores in half precision


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The score maps of the intact model.

    Attributes:
        maps: the maps, with the maps of heads if these are kept.
        bands: the RoPE bands of each layer; empty unless the maps were split by them.
        band_maps: the map of each band, nats.
    """

    maps: ScoreMaps
    bands: list[list[Band]]
    band_maps: Float[Tensor, "fold layer band row key_pos"] | None = None


def capture(
    session: Session[RunSettings], *, per_head: bool = False, choice: BandChoice | None = None
) -> Measured:
    """Return the model's score maps, from the checkpoint or captured and saved.

    Args:
        session: the run.
        per_head: whether to keep each head's map too.
        choice: the bands of RoPE to split the maps by, if any.

    Raises:
        UserError: for a non-finite score, or for scores that cannot be split into bands.
    """
    inputs, model = session.sequences().inputs, session.loaded.model
    layers = session.settings.layers_of(session.loaded.info)
    bands = [] if choice is None else bands_of(model, inputs, layers, choice)
    if "scores" not in session.checkpoint:
        validate_first_sequence(model, inputs, layers)
    engine, keys = Engine.of(session), ["scores", "bands"] if bands else ["scores"]
    session.announce(1, keys, n_seqs=len(inputs))
    with session.checkpoint.progress(keys, session.n_own_seqs):
        maps = engine.scores("scores", layers=layers, per_head=per_head)
        validate_finite(maps, "the intact model")
        if not bands:
            return Measured(maps=maps, bands=bands)
        coordinates = [[band.coordinates for band in of_layer] for of_layer in bands]
        band_maps = engine.once(
            "bands",
            lambda stream: {"folds": engine.by_fold(capture_bands, stream, groups=coordinates)},
        )["folds"]
    for place, layer in enumerate(layers):
        visible = maps.visible[place]
        added = band_maps[:, place].sum(1)[..., visible]
        if not relative_error(added, maps.folds[:, place][..., visible]) < ADDS_UP:
            raise UserError(f"--bands: the scores of L{layer} are not q.k, so they have no bands")
    return Measured(maps=maps, bands=bands, band_maps=band_maps)


def bands_of(
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
    rotations = list(map(recover_rotation, read_rotations(model, inputs[:1], len(blocks))))
    try:
        return make_bands(rotations, blocks[0].d_head, choice, layers)
    except ValueError as error:
        raise UserError(f"--bands: {error}") from error


def analyse(session: Session[RunSettings], measured: Measured, choice: OffsetBins = "auto") -> Run:
    """Measure the maps, and return the run.

    Args:
        session: the run.
        measured: its maps.
        choice: the distances that share a row of the offset profiles; see `offset_bins`.
    """
    inputs, maps = session.sequences(), measured.maps
    skip_keys = session.settings.n_skipped(inputs)
    layers = maps.by_layer
    terms = {"score": layers, "all": pattern_layers(layers)}
    tables = {
        "pattern": measures_table([({"kept": INTACT}, measure(maps))], maps.layers),
        "offsets": offsets_table(terms, choice),
        "queries": queries_table(layers),
    }
    if measured.band_maps is not None:
        of_layers = (layer.others for layer in layers.values())
        pairs = zip(of_layers, measured.band_maps.unbind(1), measured.bands, strict=True)
        split = [split_bands(pattern, maps, bands) for pattern, maps, bands in pairs]
        tables["bands"] = bands_table([*chain.from_iterable(split)])
    patterns = ""
    if maps.per_head is not None:
        tables |= _head_tables(session, maps, choice)
        patterns = head_patterns(maps, tables["heads"])
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys, maps.counts),
        "query_stride": query_stride(len(maps.query_positions)),
        "layers": list(maps.layers),
        "windows": windows_of(layers),
        "lengths": session.settings.stated_lengths(),
        "conditions": [INTACT],
    }
    arrays = {"tokens": input_arrays(inputs), "maps": map_arrays(measured), **_folds(maps)}
    run = Run(manifest=manifest, arrays=arrays, tables=tables)
    return replace(run, page=report(run, patterns).html(manifest))


def pattern_layers(layers: Layers) -> Layers:
    """Return the pattern of each layer as maps of their own, NaN outside its cells."""
    return {
        layer: LayerMaps.of(maps.others.dense(), maps.counts, maps.queries, maps.skip_keys)
        for layer, maps in layers.items()
    }


def _head_tables(
    session: Session[RunSettings], maps: ScoreMaps, choice: OffsetBins
) -> dict[str, pd.DataFrame]:
    """Return the tables of heads, of their offset profiles and of attention sinks.

    A row of `heads` has four measures of the head's pattern, and measures of its attention.
    """
    assert maps.per_head is not None
    rows = [
        {"layer": layer, "head": head, **columns_of(measures, HEAD_MEASURES)}
        for (layer, head), measures in measure_heads(maps).items()
    ]
    heads = pd.DataFrame(rows, columns=["layer", "head", *interval_names(*HEAD_MEASURES)])
    loaded, folds = session.loaded, session.settings.folds
    attended, sinks = head_columns(
        loaded.model, session.sequences(), loaded.tokenizer, maps.layers, folds
    )
    of_head = {
        head: {layer: maps.by_head[layer, head] for layer in maps.layers}
        for head in range(maps.per_head.shape[2])
    }
    return {
        "heads": pd.concat([heads, attended], axis=1),
        "head_offsets": offsets_table(of_head, choice, label="head"),
        "sinks": sinks,
    }


def head_patterns(maps: ScoreMaps, heads: pd.DataFrame) -> str:
    """Return the positional pattern of every head, for the page."""
    assert maps.per_head is not None
    queries = maps.query_positions
    means, skip_keys = pooled(maps.per_head, maps.counts), maps.skip_keys or 0
    patterns = row_centred(means, skip_keys, queries)
    return head_maps(patterns.float().numpy(), heads, query_positions=queries.numpy())


def map_arrays(measured: Measured) -> dict[str, np.ndarray]:
    """Return the maps that a run keeps, float32, in nats, NaN where the model masks.

    `score`, `se` (its standard error, from folds), `normalised` (less each diagonal's mean, the
    paper's Figure 5) and `band/<name>` are [n_layers, row, key_pos]; `score_per_head`, if heads
    were kept, is [n_layers, head, row, key_pos]. If some queries have no rows, `query_positions`
    are the queries of the rows.
    """
    maps, counts = measured.maps, measured.maps.counts
    arrays = {
        "score": maps.mean,
        "se": standard_error(maps.folds, counts),
        "normalised": diagonal_normalised(maps.mean, maps.query_positions),
    }
    if maps.per_head is not None:
        arrays["score_per_head"] = pooled(maps.per_head, counts)
    if measured.band_maps is not None:
        means = pooled(measured.band_maps, counts)
        for index, band in enumerate(measured.bands[0]):
            arrays[f"band/{band.name}"] = means[:, index]
    if not maps.has_all_rows:
        arrays["query_positions"] = maps.query_positions  # exact in float32: below 2**24
    return {name: array.float().numpy() for name, array in arrays.items()}


def _folds(maps: ScoreMaps) -> dict[str, dict[str, np.ndarray]]:
    """Return the fold means as lower triangles, with which `compare` pairs runs, unless too large.

    Fold means beyond MAX_FOLD_BYTES would take more space than the maps.
    """
    n_folds, n_layers = maps.folds.shape[:2]
    n_cells = int((maps.query_positions + 1).sum())
    if 4 * n_folds * n_layers * n_cells > MAX_FOLD_BYTES:
        return {}
    return {"folds": {"score": pack_rows(maps.folds, maps.query_positions).float().numpy()}}
