"""The scores command's report, drawn from what a run folder holds: it needs no model, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.experiments.findings import measure_finding
from nope_probe.experiments.scores import findings
from nope_probe.experiments.split_page import split_sections
from nope_probe.experiments.summary import strongest
from nope_probe.figures.head_maps import HeadMaps
from nope_probe.figures.heads import ABOUT, head_map
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.measures import pattern_measures
from nope_probe.reports import notes
from nope_probe.reports.page import Section, page, positions

PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile
HOW_TO_READ = (
    notes.SCORE,
    notes.SCORE_MAP,
    notes.PATTERN,
    notes.INTERVALS,
    notes.LAYERS_AND_HEADS,
    notes.colour_quantiles(PERCENT),
)


def scores_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    headline: Sequence[str],
    heads: HeadMaps | None = None,
) -> str:
    """Return the report of a scores run.

    Args:
        maps: `score`, its standard errors `se`, `pattern` (the positional one) and `normalised`,
            arrays [n_layers, query_pos, key_pos] in nats.
        tables: `pattern`, one row per layer, and `heads`, one per head, if heads were kept.
        manifest: what was run; the first of its conditions names the intact model, and its
            `skip_keys` how many first keys colours leave out.
        headline: the result, a sentence each.
        heads: the positional pattern of every head, if heads were kept.
    """
    title = f"The attention scores of {manifest['model']['name']} by position"
    sections = [
        *_map_sections(maps, int(manifest["skip_keys"]), tables["pattern"]),
        *head_sections(heads),
        *split_sections(tables),
        *_measure_sections(tables, str(manifest["conditions"][0])),
    ]
    return page(title, headline, sections, manifest, HOW_TO_READ)


def head_sections(heads: HeadMaps | None) -> Iterator[Section]:
    """Yield the section with the map of every head, if heads were kept."""
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


def _map_sections(
    maps: Mapping[str, Any], skip_keys: int, measures: pd.DataFrame
) -> Iterator[Section]:
    pattern, score, normalised = (
        np.asarray(maps[name]) for name in ("pattern", "score", "normalised")
    )
    drawn: dict[str, Any] = {"max_positions": positions(3, len(score)), "skip_keys": skip_keys}
    drawn["layer"] = layer = _first(measures)
    noise = [float(np.sqrt(np.nanmean(each**2))) for each in np.asarray(maps["se"])]
    yield Section(
        title=findings.pattern_finding(measures),
        figure=term_maps(
            {"positional pattern": pattern}, title="Positional pattern", noise=noise, **drawn
        ),
        caption="Mean scores less each row's mean over the keys before the query, which is all "
        "that softmax can see of them. Red keys get more attention than the row's mean, blue ones "
        f"less.{_left_out(skip_keys)}",
    )
    yield Section(
        title=findings.level_finding(score[layer], pattern[layer], layer),
        figure=score_maps(score, multiples=1, clipped=PERCENT, noise=noise, **drawn),
        caption="The mean score that each query gives each key, over sequences and heads. Softmax "
        f"ignores the level of a row, and so the sign of a score.{_left_out(skip_keys)}",
    )
    yield Section(
        title=findings.distance_finding(measures),
        figure=term_maps(
            {"less diagonal means": normalised},
            title="Mean scores less the mean of each diagonal",
            noise=noise,
            **drawn,
        ),
        caption="The mean of each diagonal is subtracted, so that what depends on distance alone "
        "is gone and the rest depends on the positions of query and key. Softmax ignores all but "
        f"differences within a row. Red is above the diagonal's mean, blue below."
        f"{_left_out(skip_keys)}",
    )


def _first(pattern: pd.DataFrame) -> int:
    """Return the layer that is shown first: the one with the strongest pattern."""
    best = strongest(pattern)
    return 0 if best is None else int(best["layer"])


def _left_out(skip_keys: int) -> str:
    """Return which keys the colours do not span, as the end of a caption."""
    if not skip_keys:
        return ""
    first = "first key" if skip_keys == 1 else f"first {skip_keys} keys"
    return f" Colours leave out the {first}, whose values may be far from all others."


def _measure_sections(tables: Mapping[str, pd.DataFrame], intact: str) -> Iterator[Section]:
    yield Section(
        title=measure_finding(tables["pattern"]),
        figure=pattern_measures(tables["pattern"], intact),
        caption=notes.MEASURES,
        table=tables["pattern"],
    )
    if "heads" in tables:
        drawn = [name for name in ABOUT if name in tables["heads"]]
        for index, measure in enumerate(drawn):
            yield Section(
                title=findings.head_finding(tables["heads"], measure),
                figure=head_map(tables["heads"], measure),
                caption=ABOUT[measure].caption,
                table=None if index else tables["heads"],
                folded=True,
            )
