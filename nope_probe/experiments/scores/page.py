"""The scores command's report, from what a run folder holds: no model and no torch is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.figures import heads, measures
from nope_probe.figures.maps import score_maps
from nope_probe.reports.page import Section, page, positions

PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile
HOW_TO_READ = (
    "A score is what attention feeds to softmax, in nats: one nat more makes a key e = 2.7 times "
    "as likely to be attended to.",
    "Each map has a row per query, downward, and a column per key, to the right; both count from "
    "0. Cells above the diagonal are blank: a causal model does not look ahead.",
    "A pattern is a score map less each row's mean over the keys before the query, since softmax "
    "ignores a constant per row.",
    "Bars are 95% intervals. “No pattern” marks what cannot be told from noise.",
    "Layers and heads count from 0. Colours run from the 1% to the 99% quantile of each map; hover "
    "or tap a cell for its own value.",
)


def scores_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    headline: Sequence[str],
) -> str:
    """Write the report of a scores run.

    Args:
        maps: `score` and `normalised`, arrays [n_layers, query_pos, key_pos] in nats.
        tables: `pattern`, one row per layer, and `heads`, one per head, if heads were kept.
        manifest: what was run; the first of its conditions names the intact model.
        headline: the result, a sentence each.
    """
    title = f"The attention scores of {manifest['model']['name']} by position"
    sections = [*_map_sections(maps), *_measure_sections(tables, str(manifest["conditions"][0]))]
    return page(title, headline, sections, manifest, HOW_TO_READ)


def _map_sections(maps: Mapping[str, Any]) -> Iterator[Section]:
    score, normalised = (np.asarray(maps[name]) for name in ("score", "normalised"))
    size = positions(2, len(score))
    drawn: dict[str, Any] = {"max_positions": size, "multiples": 1, "clipped": PERCENT}
    yield Section(
        title="Mean scores",
        figure=score_maps(score, **drawn),
        caption="The mean score that each query gives each key, over sequences and heads.",
    )
    yield Section(
        title="Diagonal-normalised scores",
        figure=score_maps(normalised, title="Mean scores less the mean of each diagonal", **drawn),
        caption="Each diagonal's mean is taken off: what depends on distance alone is gone, and "
        "what is left depends on where query and key stand. Softmax sees only differences "
        "within a row of it.",
    )


def _measure_sections(tables: Mapping[str, pd.DataFrame], intact: str) -> Iterator[Section]:
    yield Section(
        title="What the pattern is like",
        figure=measures.pattern_measures(tables["pattern"], intact),
        caption="Locality above 0 and monotonicity above 1/2 prefer near keys. A relative "
        "pattern depends on distance alone. Edge contrast: first keys against the rest.",
        table=tables["pattern"],
    )
    if "heads" in tables:
        for index, measure in enumerate(heads.MEASURES):
            yield Section(
                title=f"Each head: {heads.MEASURES[measure]}",
                figure=heads.head_map(tables["heads"], measure),
                caption=heads.CAPTIONS[measure],
                table=None if index else tables["heads"],
            )
