"""The maps and heads on the page of `ablate`: what no view of a table draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.intervals import bound_columns, excludes_zero, interval_of, interval_text
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import TABLE, row_name
from nope_probe.figures.panels import Pooled, RowMaps, pool, pool_with_leads
from nope_probe.figures.values import head_bands, head_values
from nope_probe.figures.words import QUESTIONS, reader_of
from nope_probe.removal import INTACT, SOURCES, Condition, parts_of
from nope_probe.reports.page import MOST_ROWS, Section, positions
from nope_probe.run.folder import Run
from nope_probe.studies.tidy import shown_layer

PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile


def intact_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the intact model."""
    return table[table["removed"] == INTACT.name]


class Maps:
    """The maps of a run as its page draws them: pooled, the shown layer first.

    Args:
        run: the run.
        n_drawn: how many maps of a layer the page shows.
    """

    def __init__(self, run: Run, n_drawn: int) -> None:
        rows, sizes = intact_rows(run.tables["pattern"]), run.manifest.fold_sizes
        shown = shown_layer(rows, sizes)
        self.run, self.n_drawn, self.layers = run, n_drawn, rows["layer"].tolist()
        self.of_figure: dict[str, Any] = {
            "layer": self.layers[0] if shown is None else shown,
            "layers": self.layers,
        }

    def rows(self, name: str, first: bool = True) -> RowMaps:
        """Return a map; `first` says whether its first key is one."""
        skip_keys = self.run.manifest.skip_keys if first else 0
        values, queries = np.asarray(self.run.maps[name]), self.run.query_positions
        return RowMaps(values=values, queries=queries, skip_keys=skip_keys)

    def pooled(self, name: str) -> Pooled:
        """Return a map with as many positions as the page has room for."""
        pooling = pool if name.startswith("score") else pool_with_leads
        return pooling(self.rows(name), positions(self.n_drawn, len(self.layers)))


def term_section(run: Run) -> Section:
    """Return the section with the maps of the exact sum: the intact pattern and its terms."""
    named, pattern = run.arrays.get("maps", {}), run.tables["pattern"]
    terms = sorted((name for name in named if name.startswith("term/")), key=_order)
    maps, has_lead = Maps(run, len(terms) + 2), bool(pattern["lead"].notna().any())
    return Section(
        title="The pattern, and what each source makes",
        figure=lambda: term_maps(
            {
                "intact": maps.pooled("pattern/intact"),
                **{name.removeprefix("term/"): maps.pooled(name) for name in terms},
            },
            title="The positional pattern and what each source makes",
            flat=flat_layers(run.tables),
            **maps.of_figure,
        ),
        caption="The intact map is the sum of the others: what each source makes alone, what they "
        "make only together, and what is left without sources."
        + " The column on the left is the first key's lead."
        * has_lead,
        table=run.tables["terms"],
    )


def score_section(run: Run) -> Section:
    """Return the section with the mean scores of the intact model."""
    n_terms = sum(name.startswith("term/") for name in run.arrays.get("maps", {}))
    maps = Maps(run, n_terms + 2)
    return Section(
        title="Scores of the intact model",
        figure=lambda: score_maps(maps.pooled("score/intact"), **maps.of_figure),
        caption="The mean score that each query gives each key, over sequences and heads. "
        "Brighter keys of a row are attended to more.",
        folded=True,
    )


def _order(name: str) -> tuple[int, list[int], str]:
    """Return a sort key of a term's map: the order of the words, interactions last."""
    _, parts = parts_of(name.split("/")[1])
    places = {part: place for place, part in enumerate(TABLE)}
    return len(parts), [places.get(part, len(TABLE)) for part in parts], name


def flat_layers(tables: Mapping[str, pd.DataFrame]) -> dict[str, list[int]]:
    """Return by map the layers in which neither its pattern nor its lead exceeds the noise."""
    intact, parts = intact_rows(tables["pattern"]), [tables["terms"]]
    for of, name in (("pattern", "amplitude"), ("lead", "lead")):
        ends = dict(zip(bound_columns(name), bound_columns("size"), strict=True))
        part = intact[["layer", *ends]].rename(columns=ends)
        parts.append(part.assign(of=of, term=INTACT.name))
    sizes = pd.concat(parts)
    is_clear = excludes_zero(sizes, "size").groupby([sizes["term"], sizes["layer"]]).any()
    flat = is_clear[~is_clear].index
    return {term: [layer for of, layer in flat if of == term] for term in sizes["term"].unique()}


def lengths_of(run: Run) -> dict[str, int]:
    """Return the lengths that queries reach of those the model states: its context, its windows."""
    results = run.manifest.results
    windows = sorted({*results.get("windows", {}).values()})
    lengths = {**results.get("lengths", {}), **{f"window {size}": size for size in windows}}
    return {name: n for name, n in lengths.items() if n <= run.manifest.seq_len - 1}


def head_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of each head's values, if heads were measured."""
    table = run.tables.get("head_pattern")
    if table is None:
        return
    yield Section(
        title="Heads without each source",
        figure=partial(head_values, table),
        caption="Each point is a head; touch it for numbers and intervals. On the diagonal nothing "
        "is lost without the source, on the zero line all is.",
        table=largest_heads(table),
    )
    if any(not {*Condition.parse(name)} <= {*SOURCES} for name in table["removed"].unique()):
        yield Section(
            title="Heads without each band of RoPE",
            figure=partial(head_bands, table, run.manifest.results.get("wavelengths")),
            caption="Each row is a head: its lead, and how much of its pattern is there, without "
            "the band.",
        )


def largest_heads(table: pd.DataFrame) -> pd.DataFrame:
    """Return the heads with the largest leads and patterns, and their values without each source.

    Args:
        table: `head_pattern.csv`.
    """
    places, parts, removed = ["layer", "head"], [], table["removed"].unique()
    for name, title in QUESTIONS.items():
        sizes = intact_rows(table).set_index(places)[name].abs()
        largest = sizes.nlargest(MOST_ROWS).index
        cells: dict[str, list[str]] = {
            "head": [reader_of({"layer": layer, "head": head}) for layer, head in largest],
            "of": [title] * len(largest),
        }
        for condition in removed:
            left = table[table["removed"] == condition].set_index(places).loc[largest]
            cells[f"{row_name(condition, among=removed)}, nats"] = [
                interval_text(interval_of(row, name), "z.2f") for row in left.to_dict("records")
            ]
        parts.append(pd.DataFrame(cells))
    return pd.concat(parts, ignore_index=True)


def intact_map_sections(run: Run, heads: str) -> Iterator[Section]:
    """Yield the sections with maps of a run that removes nothing.

    Args:
        run: maps `score/intact`, `se/intact` (standard errors) and `normalised/intact`.
        heads: the positional patterns of all heads, if the page shows them.
    """
    maps, skip_keys = Maps(run, 3), run.manifest.skip_keys
    drawn = maps.of_figure | {
        "max_positions": positions(3, len(maps.layers)),
        "noise": [float(np.sqrt(np.nanmean(errors**2))) for errors in run.maps["se/intact"]],
    }
    has_lead = " The column on the left is the first key's lead over the others." * bool(skip_keys)
    left_out = " Colours leave out the first key." if skip_keys else ""
    yield Section(
        title="The positional pattern",
        figure=partial(_pattern_maps, maps.rows("score/intact"), **drawn),
        caption="Mean scores less each row's mean over the keys before the query: softmax sees "
        f"nothing else. Red keys get more attention than the row's mean.{has_lead}",
    )
    yield Section(
        title="Mean scores",
        figure=partial(
            score_maps, maps.rows("score/intact"), multiples=1, clipped=PERCENT, **drawn
        ),
        caption="The mean score that each query gives each key, over sequences and heads. Softmax "
        f"ignores the level of a row. Colours run between the 1% and the 99% quantile.{left_out}",
    )
    title = "Mean scores less the mean of each diagonal"
    normalised = {"less diagonal means": maps.rows("normalised/intact", first=False)}
    yield Section(
        title=title,
        figure=partial(term_maps, normalised, title=title, **drawn),
        caption="What depends on distance alone is taken away; the rest depends on the positions "
        f"of query and key. Red is above the diagonal's mean, blue below.{left_out}",
    )
    if heads:
        yield Section(
            title="The positional pattern of each head",
            html=heads,
            caption="In nats: red is above the row's mean, blue below. Below each map: its RMS. A "
            "click or Enter enlarges a map, arrow keys go to the next head, Esc closes.",
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
