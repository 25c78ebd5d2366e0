"""What a run of `scores` shows: maps, heads, splits and measures, with a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import isnan
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.sections import Report, closing_of, split_sections, with_intervals
from nope_probe.experiments.wording import (
    NO_PATTERN,
    NOISE,
    measure_finding,
    nats,
    no_pattern,
    percents,
    preference,
    preferred_keys,
    strongest,
)
from nope_probe.figures.head_maps import HeadMaps
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.measures import ABOUT, head_map, pattern_measures
from nope_probe.figures.words import MEASURES
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

Map = Float[np.ndarray, "query_pos key_pos"]
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


def report(run: Run, heads: HeadMaps | None = None) -> Report:
    """Return what a run shows.

    Args:
        run: maps `score`, `se` (standard errors) and `normalised`, [n_layers, query_pos, key_pos]
            in nats; tables `pattern`, `heads` where heads were kept, and the splits.
        heads: the positional pattern of every head, if the page shows them.
    """
    pattern, name = run.tables["pattern"], run.manifest["model"]["name"]
    layers = [f"L{layer}" for layer in pattern["layer"]]
    columns = {MEASURES[key].title: (key, _style(key)) for key in SHOWN}
    return Report(
        title=f"The attention scores of {name} by position",
        headline=headline(run.manifest, run.tables),
        sections=[
            *_map_sections(run),
            *_head_map_sections(heads),
            *split_sections(run.tables),
            *_measure_sections(run.tables, str(run.manifest["conditions"][0])),
        ],
        how_to_read=HOW_TO_READ,
        terminal={
            f"{name}: the positional pattern in the mean scores": with_intervals(
                {"layer": layers}, pattern, columns
            )
        },
        closing=closing_of(run.manifest),
    )


def headline(manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return where the pattern is strongest, which keys it prefers and, per head, the strongest."""
    name = manifest["model"]["name"]
    best = strongest(tables["pattern"])
    if best is None:
        return [no_pattern(name)]
    sentences = [
        f"The positional pattern in the attention scores of {name} is strongest in "
        f"L{best['layer']:.0f}, {nats(best, 'amplitude')} nats RMS, and {preference(best)}."
    ]
    if "heads" in tables:
        head = tables["heads"].sort_values("amplitude").iloc[-1]
        locality = "" if isnan(head["locality"]) else f" (locality {head['locality']:+.2f})"
        sentences.append(
            f"Of all heads, L{head['layer']:.0f}H{head['head']:.0f} has the strongest positional "
            f"pattern, {nats(head, 'amplitude')} nats{locality}."
        )
    return sentences


def _style(measure: str) -> str:
    return "z.3f" if MEASURES[measure].unit == "nats" else "z.2f"


def _map_sections(run: Run) -> Iterator[Section]:
    measures, skip_keys = run.tables["pattern"], int(run.manifest["skip_keys"])
    score, normalised = run.maps["score"], run.maps["normalised"]
    pattern, best = _row_centred(score, skip_keys), strongest(measures)
    layer = 0 if best is None else int(best["layer"])
    drawn: dict[str, Any] = {
        "max_positions": positions(3, len(score)),
        "skip_keys": skip_keys,
        "layer": layer,
        "noise": [float(np.sqrt(np.nanmean(errors**2))) for errors in run.maps["se"]],
    }
    yield Section(
        title=pattern_finding(measures),
        figure=partial(
            term_maps, {"positional pattern": pattern}, title="Positional pattern", **drawn
        ),
        caption="Mean scores less each row's mean over the keys before the query, which is all "
        "that softmax can see of them. Red keys get more attention than the row's mean, blue ones "
        f"less.{_left_out(skip_keys)}",
    )
    yield Section(
        title=level_finding(score[layer], pattern[layer], layer),
        figure=partial(score_maps, score, multiples=1, clipped=PERCENT, **drawn),
        caption="The mean score that each query gives each key, over sequences and heads. Softmax "
        f"ignores the level of a row, and so the sign of a score.{_left_out(skip_keys)}",
    )
    yield Section(
        title=distance_finding(measures),
        figure=partial(
            term_maps,
            {"less diagonal means": normalised},
            title="Mean scores less the mean of each diagonal",
            **drawn,
        ),
        caption="The mean of each diagonal is subtracted, so that what depends on distance alone "
        "is gone and the rest depends on the positions of query and key. Softmax ignores all but "
        f"differences within a row. Red is above the diagonal's mean, blue below."
        f"{_left_out(skip_keys)}",
    )


def _row_centred(
    scores: Float[np.ndarray, "layer query_pos key_pos"], skip_keys: int
) -> Float[np.ndarray, "layer query_pos key_pos"]:
    """Return score maps less each row's mean over the keys before the query, NaN elsewhere."""
    n = scores.shape[-1]
    before = np.tri(n, k=-1, dtype=bool) & (np.arange(n) >= skip_keys)
    kept = np.where(before, scores, np.nan).astype(np.float64)
    n_keys = np.maximum(before.sum(1), 1)[:, None]
    return (kept - np.nansum(kept, 2, keepdims=True) / n_keys).astype(np.float32)


def _left_out(skip_keys: int) -> str:
    """Return which keys the colours do not span, as the end of a caption."""
    if not skip_keys:
        return ""
    first = "first key" if skip_keys == 1 else f"first {skip_keys} keys"
    return f" Colours leave out the {first}, whose values may be far from all others."


def _head_map_sections(heads: HeadMaps | None) -> Iterator[Section]:
    if heads is None:
        return
    block = heads.pooled.block
    cells = f" A cell is a mean over {block} × {block} positions." if block > 1 else ""
    n_clear = len(heads.noise) - sum(heads.noise)
    yield Section(
        title=f"{n_clear} of {len(heads.noise)} heads have a positional pattern above the noise",
        html=heads.html(),
        caption="The positional pattern of each head, in nats: red is above the row's mean, blue "
        "below. Below each: its RMS. A click or Enter enlarges a map, arrow keys go to the next "
        f"head, Esc closes.{cells}",
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


def pattern_finding(pattern: pd.DataFrame) -> str:
    """Return where the positional pattern is strongest, and which keys it prefers there.

    Args:
        pattern: `pattern.csv`, a row per layer.
    """
    best = strongest(pattern)
    if best is None:
        return NO_PATTERN
    where = f"L{best['layer']:.0f}, {best['amplitude']:.2g} nats"
    keys = preferred_keys(best)
    prefers = f"prefers {keys} keys" if keys else "prefers neither near nor far keys"
    return f"The positional pattern is strongest in {where}, and {prefers} there"


def level_finding(scores: Map, pattern: Map, layer: int) -> str:
    """Return how much of the variance of a layer's mean scores is that of its row means.

    Args:
        scores: the layer's mean scores.
        pattern: the positional pattern, NaN where it is not defined; those cells do not count.
        layer: its number.
    """
    cells = np.isfinite(pattern) & np.isfinite(scores)
    variance = float(np.var(scores[cells])) if cells.any() else 0.0
    if not variance > 0:
        return f"Mean scores: those of L{layer} do not differ"
    level = 1 - float(np.mean(pattern[cells] ** 2)) / variance
    share = percents(min(1.0, max(0.0, level)))
    return f"Mean scores: {share} of L{layer}'s variance is row means, which softmax ignores"


def distance_finding(pattern: pd.DataFrame) -> str:
    """Return how much of the strongest layer's positional pattern is a function of the distance.

    Args:
        pattern: `pattern.csv`, a row per layer.
    """
    topic, best = "Diagonal-normalised scores", strongest(pattern)
    if best is None or np.isnan(best["relative_r2"]):
        return f"{topic}: what is no function of the distance is {NOISE}"
    share = percents(best["relative_r2"])
    return f"{topic}: distance alone explains {share} of L{best['layer']:.0f}'s positional pattern"


def head_finding(heads: pd.DataFrame, measure: str) -> str:
    """Return in which head a measure is clearest.

    Args:
        heads: `heads.csv`, a row per layer and head.
        measure: one of its columns, of `figures.heads.ABOUT`.
    """
    about = ABOUT[measure]
    low, high = heads[f"{measure}_low"], heads[f"{measure}_high"]
    clear = heads[(low > 0) | (high < 0)]
    if clear.empty:
        return f"Heads: {about.label} is {NOISE}"
    top = clear.iloc[int(clear[measure].abs().to_numpy(float).argmax())]
    most, style = ("farthest from 0", "+.2g") if about.signed else ("largest", ".2g")
    name = f"L{top['layer']:.0f}H{top['head']:.0f}"
    unit = " nats" if about.unit == "nats" else ""
    return f"Heads: {about.label} is {most} in {name}, {top[measure]:{style}}{unit}"
