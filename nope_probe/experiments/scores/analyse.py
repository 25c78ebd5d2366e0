"""From captured score maps to what a run holds: maps, errors, tables, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.bands import Band
from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure
from nope_probe.analyses.trends import query_stride
from nope_probe.experiments.scores.heads import head_columns
from nope_probe.experiments.scores.sections import report
from nope_probe.experiments.scores.splits import BandMaps, band_arrays, split_tables
from nope_probe.experiments.tables import columns_of, interval_names, measures_table
from nope_probe.figures.head_maps import HeadMaps, head_maps
from nope_probe.figures.measures import HEAD_MEASURES
from nope_probe.maps.centred import diagonal_normalised, row_centred
from nope_probe.maps.folds import pack_triangle, pooled
from nope_probe.maps.maps import ScoreMaps
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

INTACT = "intact"
MAX_FOLD_BYTES = 2**30


def analyse(
    session: Session[RunSettings],
    measured: ScoreMaps,
    bands: list[list[Band]] | None = None,
    band_maps: BandMaps | None = None,
) -> Run:
    """Measure the maps, and return the run.

    Args:
        session: the run.
        measured: the score maps.
        bands: the RoPE bands of each layer, if the maps were split by them,
        band_maps: and the maps of each band.
    """
    inputs, skip_keys = session.sequences(), session.settings.n_skipped(session.sequences())
    tables = {"pattern": measures_table([({"kept": INTACT}, measure(measured, skip_keys))])}
    tables |= _head_tables(session, measured, skip_keys)
    tables |= split_tables(measured, skip_keys, bands, band_maps)
    maps = score_arrays(measured)
    if bands is not None and band_maps is not None:
        maps |= band_arrays(bands, band_maps, measured.counts)
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys, measured.counts),
        "query_stride": query_stride(measured.folds.shape[-1]),
        "conditions": [INTACT],
    }
    run = Run(
        manifest=manifest,
        arrays={"tokens": input_arrays(inputs), "maps": maps, **_folds(measured)},
        tables=tables,
    )
    shown = report(run, head_patterns(measured, tables, skip_keys))
    return replace(run, page=shown.html(manifest))


def _head_tables(
    session: Session[RunSettings], measured: ScoreMaps, skip_keys: int
) -> dict[str, pd.DataFrame]:
    """Return the tables of heads and of attention sinks, if heads were kept."""
    if measured.per_head is None:
        return {}
    heads = heads_table(measured.per_head, measured.counts, skip_keys)
    more, sinks = head_columns(
        session.loaded.model,
        session.sequences(),
        session.loaded.tokenizer,
        measured.per_head.shape[1],
        session.settings.folds,
    )
    return {"sinks": sinks, "heads": pd.concat([heads, more], axis=1)}


def head_patterns(
    measured: ScoreMaps, tables: Mapping[str, pd.DataFrame], skip_keys: int
) -> HeadMaps | None:
    """Return the positional pattern of every head for the page, if heads were kept."""
    if measured.per_head is None:
        return None
    patterns = row_centred(pooled(measured.per_head, measured.counts), skip_keys)
    return head_maps(patterns.float().numpy(), tables["heads"])


def _folds(measured: ScoreMaps) -> dict[str, dict[str, np.ndarray]]:
    """Return the fold means as lower triangles, from which `compare` pairs runs, unless too large.

    Beyond MAX_FOLD_BYTES they would take more space than the maps.
    """
    n_folds, n_layers, n, _ = measured.folds.shape
    if 4 * n_folds * n_layers * n * (n + 1) / 2 > MAX_FOLD_BYTES:
        return {}
    return {"folds": {"score": pack_triangle(measured.folds).float().numpy()}}


def score_arrays(measured: ScoreMaps) -> dict[str, np.ndarray]:
    """Return the maps that a run keeps, float32, in nats, NaN where the model masks.

    `score`, `se` (its standard error, from folds) and `normalised` (less each diagonal's mean, the
    paper's Figure 5) are [n_layers, query_pos, key_pos]; `score_per_head`, where heads were kept,
    is [n_layers, head, query_pos, key_pos].
    """
    maps = {
        "score": measured.mean,
        "se": standard_error(measured.folds, measured.counts),
        "normalised": diagonal_normalised(measured.mean),
    }
    if measured.per_head is not None:
        maps["score_per_head"] = pooled(measured.per_head, measured.counts)
    return {name: each.float().numpy() for name, each in maps.items()}


def heads_table(
    per_head: Float[Tensor, "fold layer head query_pos key_pos"],
    counts: Int[Tensor, " fold"],
    skip_keys: int,
) -> pd.DataFrame:
    """Return the table of heads: layer, head, four measures of its pattern with 95% intervals."""
    rows = [
        {"layer": layer, "head": head, **columns_of(measures, HEAD_MEASURES)}
        for layer in range(per_head.shape[1])
        for head, measures in enumerate(measure(per_head[:, layer], skip_keys, counts=counts))
    ]
    return pd.DataFrame(rows, columns=["layer", "head", *interval_names(*HEAD_MEASURES)])
