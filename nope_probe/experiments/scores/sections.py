"""The report of a run of `scores`: maps, heads, splits and measures, with a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.experiments.sections import (
    NO_PATTERN,
    NOISE,
    Report,
    closing_of,
    fold_sizes_of,
    hidden_heads,
    largest,
    lengths_of,
    measure_finding,
    nats,
    percents,
    preferred_keys,
    split_sections,
    strongest,
    with_intervals,
)
from nope_probe.experiments.verdicts import EIGHT_FOLDS
from nope_probe.figures.intervals import ROUNDING, excludes_zero
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.measures import ABOUT, head_map, pattern_measures
from nope_probe.figures.panels import RowMaps
from nope_probe.figures.words import MEASURES, reader_of
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile
HOW_TO_READ = (
    notes.SCORE,
    notes.SCORE_MAP,
    notes.PATTERN,
    notes.INTERVALS,
    notes.LAYERS_AND_HEADS,
    notes.colour_quantiles(PERCENT),
)
SHOWN = ("amplitude", "locality", "relative_r2", "edge_contrast", "edge_contrast_visible")


def report(run: Run, heads: str = "") -> Report:
    """Return the report of a run.

    Args:
        run: maps `score`, `se` (standard errors) and `normalised`, [n_layers, query_pos, key_pos]
            in nats; tables `pattern`, `heads` where heads were kept, and the splits.
        heads: the positional patterns of all heads, if the page shows them.
    """
    tables, name = run.tables, run.manifest["model"]["name"]
    styles = {key: "z.3f" if MEASURES[key].unit == "nats" else "z.2f" for key in SHOWN}
    columns = {MEASURES[key].title: (key, style) for key, style in styles.items()}
    layers = {"layer": [f"L{layer}" for layer in tables["pattern"]["layer"]]}
    measures = with_intervals(layers, tables["pattern"], columns)
    return Report(
        title=f"The attention scores of {name} by position",
        headline=headline(tables, fold_sizes_of(run.manifest)),
        sections=[
            *_map_sections(run),
            *_head_map_sections(heads, run.tables),
            *split_sections(tables, lengths_of(run)),
            *_measure_sections(tables, str(run.manifest["conditions"][0])),
        ],
        how_to_read=HOW_TO_READ,
        terminal={f"{name}: the positional pattern in the mean scores": measures},
        closing=closing_of(run.manifest),
    )


def headline(
    tables: Mapping[str, pd.DataFrame], fold_sizes: Sequence[int] = EIGHT_FOLDS
) -> list[str]:
    """Return sentences on the strongest pattern, its preferred keys and the strongest heads."""
    findings = [pattern_finding(tables["pattern"], fold_sizes)]
    if "heads" in tables:
        if findings != [NO_PATTERN]:
            findings.append(head_finding(tables["heads"], "amplitude"))
        findings += hidden_heads(tables["pattern"], tables["heads"], fold_sizes)
    return [f"{finding}." for finding in findings]


def _map_sections(run: Run) -> Iterator[Section]:
    table, skip_keys = run.tables["pattern"], int(run.manifest["skip_keys"])
    folds = fold_sizes_of(run.manifest)
    score, normalised = (
        RowMaps(values=run.maps[name], queries=run.query_positions)
        for name in ("score", "normalised")
    )
    best = strongest(table, folds)
    layers = table["layer"].tolist()
    layer = layers[0] if best is None else int(best["layer"])
    drawn: dict[str, Any] = {
        "max_positions": positions(3, len(score.values)),
        "skip_keys": skip_keys,
        "layer": layer,
        "layers": layers,
        "noise": [float(np.sqrt(np.nanmean(errors**2))) for errors in run.maps["se"]],
    }
    left_out = ""
    if skip_keys:
        first = "first key" if skip_keys == 1 else f"first {skip_keys} keys"
        left_out = f" Colours leave out the {first}, whose values may be far from all others."
    yield Section(
        title=pattern_finding(table, folds),
        figure=partial(_pattern_maps, score, **drawn),
        caption="Mean scores less each row's mean over the keys before the query: softmax sees "
        "nothing else of the scores. Red keys get more attention than the row's mean, blue keys "
        f"less.{left_out}",
    )
    of_layer = replace(score, values=score.values[layers.index(layer)])
    yield Section(
        title=level_finding(of_layer, skip_keys, layer),
        figure=partial(score_maps, score, multiples=1, clipped=PERCENT, **drawn),
        caption="The mean score that each query gives each key, over sequences and heads. Softmax "
        f"ignores the level of a row, and so the sign of a score.{left_out}",
    )
    yield Section(
        title=distance_finding(table, folds),
        figure=partial(
            term_maps,
            {"less diagonal means": normalised},
            title="Mean scores less the mean of each diagonal",
            **drawn,
        ),
        caption="The mean of each diagonal is subtracted. This removes the part that depends on "
        "distance alone; the rest depends on the positions of query and key. Softmax ignores all "
        f"but differences within a row. Red is above the diagonal's mean, blue below.{left_out}",
    )


def _pattern_maps(score: RowMaps, skip_keys: int, **drawn: Any) -> go.Figure:
    import torch  # a finished run is shown without it; only pages and images draw maps

    from nope_probe.maps.centred import row_centred

    queries = None if score.queries is None else torch.from_numpy(score.queries)
    pattern = row_centred(torch.from_numpy(score.values).double(), skip_keys, queries)
    maps = replace(score, values=pattern.float().numpy())
    title = "Positional pattern"
    return term_maps({title.lower(): maps}, title=title, skip_keys=skip_keys, **drawn)


def _head_map_sections(heads: str, tables: Mapping[str, pd.DataFrame]) -> Iterator[Section]:
    if not heads:
        return
    is_clear = tables["heads"]["amplitude_low"] > 0
    yield Section(
        title=f"{is_clear.sum()} of {len(is_clear)} heads have a positional pattern above the "
        "noise",
        html=heads,
        caption="The positional pattern of each head, in nats: red is above the row's mean, blue "
        "below. Below each: its RMS. A click or Enter enlarges a map, arrow keys go to the next "
        "head, Esc closes.",
    )


def _measure_sections(tables: Mapping[str, pd.DataFrame], intact: str) -> Iterator[Section]:
    yield Section(
        title=measure_finding(tables["pattern"]),
        figure=partial(pattern_measures, tables["pattern"], intact),
        caption=notes.MEASURES,
        table=tables["pattern"],
    )
    if "heads" in tables:
        measures = [name for name in ABOUT if name in tables["heads"]]
        for index, measure in enumerate(measures):
            yield Section(
                title=head_finding(tables["heads"], measure),
                figure=partial(head_map, tables["heads"], measure),
                caption=ABOUT[measure].caption,
                table=None if index else tables["heads"],
                folded=True,
            )


def pattern_finding(pattern: pd.DataFrame, fold_sizes: Sequence[int] = EIGHT_FOLDS) -> str:
    """Return a sentence on the strongest positional pattern, and the keys that it prefers.

    Args:
        pattern: `pattern.csv`, a row per layer.
        fold_sizes: sequences per fold.
    """
    best = strongest(pattern, fold_sizes)
    if best is None:
        return NO_PATTERN
    where = f"L{best['layer']:.0f}, {nats(best, 'amplitude')} nats RMS"
    keys = preferred_keys(best) or "neither near nor far"
    among = f"Of {len(pattern)} layers, the" if len(pattern) > 1 else "The"
    return f"{among} positional pattern is strongest in {where}, and prefers {keys} keys there"


def level_finding(maps: RowMaps, skip_keys: int, layer: int) -> str:
    """Return a sentence on the share of row means in the variance of a layer's mean scores.

    Args:
        maps: the layer's mean scores, nats.
        skip_keys: how many first keys to leave out.
        layer: its number.
    """
    scores = maps.values
    queries = np.arange(len(scores)) if maps.queries is None else maps.queries
    before = np.arange(scores.shape[1]) < queries[:, None]
    kept = np.where(before, scores, np.nan)[queries > skip_keys, skip_keys:].astype(float)
    variance = np.nanvar(kept)
    if not variance > 0:
        return f"Mean scores of L{layer} do not differ"
    within = np.nanmean((kept - np.nanmean(kept, axis=1, keepdims=True)) ** 2)
    share = percents(1 - within / variance)
    return f"Mean scores: {share} of L{layer}'s variance is row means, which softmax ignores"


def distance_finding(pattern: pd.DataFrame, fold_sizes: Sequence[int] = EIGHT_FOLDS) -> str:
    """Return a sentence on the share of the strongest pattern that depends on distance alone.

    Args:
        pattern: `pattern.csv`, a row per layer.
        fold_sizes: sequences per fold.
    """
    topic, best = "Diagonal-normalised scores", strongest(pattern, fold_sizes)
    if best is None or np.isnan(best["relative_r2"]):
        return f"{topic}: the part that is no function of distance is {NOISE}"
    share = percents(best["relative_r2"])
    return f"{topic}: distance alone explains {share} of L{best['layer']:.0f}'s positional pattern"


def head_finding(heads: pd.DataFrame, measure: str) -> str:
    """Return a sentence on the head in which a measure is clearest.

    Args:
        heads: `heads.csv`, a row per layer and head.
        measure: a column of it that is a key of `figures.measures.ABOUT`.
    """
    about = ABOUT[measure]
    if heads[measure].abs().max() <= ROUNDING:
        return f"Heads: {about.label} is 0 in every head"
    clear = heads[excludes_zero(heads, measure)]
    if clear.empty:
        return f"Heads: {about.label} is {NOISE}"
    top = largest(clear, measure)
    most, style = ("farthest from 0", "+.2g") if about.signed else ("largest", ".2g")
    unit = " nats" if about.unit == "nats" else ""
    return f"Heads: {about.label} is {most} in {reader_of(top)}, {top[measure]:{style}}{unit}"
