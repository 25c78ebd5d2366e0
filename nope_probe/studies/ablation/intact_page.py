"""The report of `ablate --remove none`: maps of the intact model, its heads, splits, measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.intervals import estimate_text, interval_of
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.measures import ABOUT, head_map
from nope_probe.figures.panels import RowMaps
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section, positions
from nope_probe.run.folder import Run
from nope_probe.studies.page import (
    MOST_ROWS,
    Report,
    above_noise,
    lengths_of,
    measures_section,
    nats,
    no_pattern,
    preferred_keys,
    split_sections,
    strongest_row,
)

PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile
KEYS = {"near": "near keys", "far": "far keys", "neither": "neither near nor far keys"}


def report(run: Run, heads: str = "") -> Report:
    """Return the report of a run.

    Args:
        run: maps `score/intact`, `se/intact` (standard errors) and `normalised/intact`, [n_layers,
            query_pos, key_pos] in nats; tables `pattern`, `heads` where heads were kept, and the
            splits.
        heads: the positional patterns of all heads, if the page shows them.
    """
    tables, name = run.tables, run.manifest.model_name
    return Report(
        title=f"The attention scores of {name} by position",
        headline=headline(run),
        sections=[
            *_map_sections(run),
            *_head_map_sections(heads),
            *split_sections(tables, lengths_of(run)),
            *_measure_sections(tables),
        ],
        how_to_read=notes.how_to_read("scores"),
    )


def headline(run: Run) -> Headline:
    """Return the layer with the strongest pattern, and the strongest layers with their keys."""
    pattern, heads, folds = (
        run.tables["pattern"],
        run.tables.get("heads"),
        run.manifest.fold_sizes,
    )
    best, name = strongest_row(pattern, folds), run.manifest.model_name
    if best is None:
        return no_pattern(name, pattern, heads, folds)
    above = pattern[above_noise(pattern, folds)].nlargest(MOST_ROWS, "amplitude")
    rows = above.sort_values("layer").to_dict("records")
    table = {
        "": [f"L{row['layer']}" for row in rows],
        "first key, nats": [estimate_text(row, "lead", "z.2f") for row in rows],
        "pattern, nats": [nats(row, "amplitude") for row in rows],
        "prefers": [preferred_keys(interval_of(row, "locality")) for row in rows],
        "by distance": [estimate_text(row, "relative_r2", "z.0f") for row in rows],
    }
    if heads is not None:
        top = heads[above_noise(heads, folds)].sort_values("amplitude").groupby("layer").tail(1)
        table["top head"] = [_head(top, row["layer"]) for row in rows]
    return Headline(
        sentence=f"In {name} ({notes.layers_of_run(run.manifest)}), L{best['layer']:.0f} is "
        f"strongest: {_first(best)} pattern is {best['amplitude']:.2g} nats, for "
        f"{KEYS[preferred_keys(interval_of(best, 'locality'))]}.",
        table=pd.DataFrame(table),
        caption="Pattern: RMS among the other keys. By "
        "distance: the share of it that depends on the distance of query and key alone.",
    )


def _first(row: pd.Series) -> str:
    """Return the first key's lead in words, where a layer has one."""
    lead = row["lead"]
    if lead != lead:
        return "its"
    return f"the first key {'leads' if lead > 0 else 'trails'} by {abs(lead):.2g}, the others'"


def _head(heads: pd.DataFrame, layer: int) -> str:
    """Return the strongest head of a layer with its amplitude; empty if none exceeds the noise."""
    rows = heads[heads["layer"] == layer].to_dict("records")
    return "".join(f"H{row['head']:.0f}, {row['amplitude']:.2g} nats" for row in rows)


def _map_sections(run: Run) -> Iterator[Section]:
    table, skip_keys = run.tables["pattern"], run.manifest.skip_keys
    normalised = RowMaps(values=run.maps["normalised/intact"], queries=run.query_positions)
    score = replace(normalised, values=run.maps["score/intact"], skip_keys=skip_keys)
    best, layers = strongest_row(table, run.manifest.fold_sizes), table["layer"].tolist()
    drawn: dict[str, Any] = {
        "max_positions": positions(3, len(score.values)),
        "layer": layers[0] if best is None else int(best["layer"]),
        "layers": layers,
        "noise": [float(np.sqrt(np.nanmean(errors**2))) for errors in run.maps["se/intact"]],
    }
    has_lead = " The column on the left is the first key's lead over the others." * bool(skip_keys)
    left_out = " Colours leave out the first key." if skip_keys else ""
    yield Section(
        title="The positional pattern",
        figure=partial(_pattern_maps, score, **drawn),
        caption="Mean scores less each row's mean over the keys before the query: softmax sees "
        f"nothing else. Red keys get more attention than the row's mean.{has_lead}",
    )
    yield Section(
        title="Mean scores",
        figure=partial(score_maps, score, multiples=1, clipped=PERCENT, **drawn),
        caption="The mean score that each query gives each key, over sequences and heads. Softmax "
        f"ignores the level of a row. Colours run between the 1% and the 99% quantile.{left_out}",
    )
    yield Section(
        title="Mean scores less the mean of each diagonal",
        figure=partial(
            term_maps,
            {"less diagonal means": normalised},
            title="Mean scores less the mean of each diagonal",
            **drawn,
        ),
        caption="What depends on distance alone is taken away; the rest depends on the positions "
        f"of query and key. Red is above the diagonal's mean, blue below.{left_out}",
    )


def _pattern_maps(score: RowMaps, **drawn: Any) -> go.Figure:
    import torch  # a finished run is shown without it; only pages and images draw maps

    from nope_probe.maps.layers import LayerMaps

    queries = None if score.queries is None else torch.from_numpy(score.queries)
    layers = [
        LayerMaps.of(layer[None], None, queries, score.skip_keys)
        for layer in torch.from_numpy(score.values).double()
    ]
    patterns = torch.stack([layer.pattern.mean_with_lead() for layer in layers])
    maps = replace(score, values=patterns.float().numpy())
    title = "Positional pattern"
    return term_maps({title.lower(): maps}, title=title, **drawn)


def _head_map_sections(heads: str) -> Iterator[Section]:
    if heads:
        yield Section(
            title="The positional pattern of each head",
            html=heads,
            caption="In nats: red is above the row's mean, blue below. Below each map: its RMS. A "
            "click or Enter enlarges a map, arrow keys go to the next head, Esc closes.",
        )


def _measure_sections(tables: Mapping[str, pd.DataFrame]) -> Iterator[Section]:
    yield measures_section(tables["pattern"])
    if "heads" in tables:
        heads = tables["heads"].dropna(axis=1, how="all")
        measures = [name for name in ABOUT if name in heads]
        for index, measure in enumerate(measures):
            yield Section(
                title=f"Heads: {ABOUT[measure].label}",
                figure=partial(head_map, tables["heads"], measure),
                caption=ABOUT[measure].meaning,
                table=None if index else tables["heads"],
                folded=True,
            )
