"""The page of `ablate`: its verdict and values, its sections, maps and heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.analyses.verdicts import (
    THIRD,
    Answer,
    Maker,
    above_noise,
    answers,
    is_carrier,
    strongest_row,
)
from nope_probe.figures.attention import head_values
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import brief, map_name, row_name, short, words
from nope_probe.figures.panels import ACROSS, RowMaps, pool
from nope_probe.figures.style import GUIDE
from nope_probe.figures.words import (
    HALF_WIDTH,
    MEASURES,
    NUMBERS,
    WITHIN,
    column_text,
    columns,
    excludes_zero,
    heading,
)
from nope_probe.removal import INTACT, NO_REPLACEMENT, UNION, Condition
from nope_probe.reports.page import MOST_ROWS, Headline, Section, captions, positions, row_maps
from nope_probe.run.folder import Run

SAID = captions("ablate")
COLUMNS = {**MEASURES, **columns("ablate")}
SHOWN = ("lead", "amplitude", "locality")
ROW = ["removed", "replacement"]
PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile
PER_HEAD = "score_per_head/intact"


def intact_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the intact model."""
    return table[table["removed"] == INTACT.name]


def headline(run: Run) -> Headline:
    """Return what makes and carries each number, and its values in every condition.

    Where nothing is removed, return the layers with the largest patterns, and which keys they
    prefer.
    """
    if run.manifest.results.get("positional_sources"):
        found = answers_of(run)
        values = Headline(table=value_table(run), caption=SAID["values"])
        sentence = "" if found["order"].n_layers else SAID["nothing"]
        table = verdict_table(run, found)
        return Headline(sentence=sentence, table=table, caption=SAID["rule"], then=values)
    pattern = run.tables["pattern"]
    above = pattern[above_noise(pattern, run.manifest.fold_sizes)]
    if above.empty:
        return Headline(sentence=SAID["nothing"])
    shown = above.nlargest(MOST_ROWS, "amplitude").sort_values("layer")
    return Headline(table=brief(shown, "layer", SHOWN, MEASURES), caption=SAID["intact"])


def answers_of(run: Run) -> dict[str, Answer]:
    """Return what makes and carries each number."""
    results = run.manifest.results
    return answers(run.tables["pattern"], results["conditions"], results["positional_sources"])


def verdict_table(run: Run, found: Mapping[str, Answer]) -> pd.DataFrame:
    """Return what makes each number, also in the layer of its values, and what carries it.

    Args:
        run: of `ablate`.
        found: its answers; see `Run.answer`.
    """
    layers, rows = run.tables["pattern"]["layer"].unique(), []
    for number, answer in found.items():
        trails = number == "lead" and answer.n_below_zero >= THIRD * answer.n_layers > 0
        layer, main = shown_layer(run, number), answer.main
        shown = dict(zip(layers, answer.layers, strict=True)).get(layer)
        main |= {maker: k for maker, k in answer.makers.items() if maker == shown}
        at = {shown: f": L{layer}"} if len(main) > 1 else {}
        said = partial(SAID["made"].format, answer=answer)
        made = [said(maker=maker_text(x, number), k=k, at=at.get(x, "")) for x, k in main.items()]
        carriers = ", ".join(map(carrier_text, answer.carriers)) or "none"
        name = NUMBERS[number] + SAID["trails"].format(answer=answer) * trails
        rows.append((name, "\n".join(made) or WITHIN, carriers if made else ""))
    table = pd.DataFrame(rows, columns=["", "made by", "carried by"])
    asked = any(is_carrier(Condition.parse(name)) for name in run.manifest.removed or ())
    return table if asked else table.drop(columns="carried by")


def maker_text(maker: Maker, number: str) -> str:
    """Return what makes a number, in words.

    Example:
        >>> maker_text(Maker(way="each needed", sources=("mask", "rope")), "not_by_distance")
        'mask + RoPE, each needed'
        >>> maker_text(Maker(way="no source"), "lead"), maker_text(Maker(way="no source"), "order")
        ('the first token itself', 'no source')
    """
    way = "first token" if number == "lead" and maker.way == "no source" else maker.way
    return SAID[way].format(sources=short(UNION.join(maker.sources)))


def carrier_text(carrier: str) -> str:
    """Return what carries a number, in words.

    Example:
        >>> carrier_text("w_k alone")
        'W_K alone'
    """
    name = carrier.removesuffix(" alone")
    return carrier.replace(name, words(name))


def value_table(run: Run) -> pd.DataFrame:
    """Return the three numbers in every condition, each where it is largest, nats, and the cost."""
    means = run.tables["over_layers"]
    cells = {"nats ±95%": [row_name(*of) for of in means[ROW].itertuples(index=False)]}
    for number, title in NUMBERS.items():
        layer, rows, place = shown_layer(run, number), means, "mean"
        if layer is not None:
            pattern, place = run.tables["pattern"], f"L{layer}"
            rows = means[ROW].merge(pattern[pattern["layer"] == layer], on=ROW)
        if number in rows and rows[number].notna().any():
            values = [
                column_text(of, number, COLUMNS[number], HALF_WIDTH)
                for of in rows.to_dict("records")
            ]
            cells[heading(f"{title} ({place})")] = values
    if "cost" in means:
        intact, *others = means.to_dict("records")
        costs = [column_text(row, "cost", COLUMNS["cost"], HALF_WIDTH) for row in others]
        cells["cost"] = [f"0 of {intact['loss']:.2f}", *costs]
    return pd.DataFrame(cells)


def shown_layer(run: Run, number: str) -> int | None:
    """Return the layer in which a number is largest, of those in which it exceeds its noise.

    Returns:
        None if no layer has the number, or for a run of `--layers all`, which shows means.
    """
    intact = intact_rows(run.tables["pattern"])
    rows = intact[excludes_zero(intact, number)]
    rows = (intact if rows.empty else rows).dropna(subset=[number])
    if rows.empty or (run.manifest.settings.get("layers") == "all" and len(intact) > 1):
        return None
    return int(rows["layer"].iloc[rows[number].abs().argmax()])


def maker_section(run: Run) -> Section:
    """Return the section of what makes each number in each layer."""
    table = pd.DataFrame({"layer": [f"L{x}" for x in run.tables["pattern"]["layer"].unique()]})
    for number, answer in answers_of(run).items():
        table[NUMBERS[number]] = [maker_text(maker, number) for maker in answer.layers]
    title = "What makes each number in each layer"
    return Section(title=title, caption=SAID["makers"], table=table)


def of_figure(run: Run) -> dict[str, Any]:
    """Return what figures of maps have in common: layers, the maps' noise, and their size."""
    rows = intact_rows(run.tables["pattern"])
    layers, shown = rows["layer"].tolist(), strongest_row(rows, run.manifest.fold_sizes)
    return {
        "layer": layers[0] if shown is None else int(shown["layer"]),
        "layers": layers,
        "noise": [float(np.sqrt(np.nanmean(of**2))) for of in run.maps.get("se/intact", ())],
        "max_positions": positions_of(run),
    }


def positions_of(run: Run) -> int:
    """Return how many positions the page has room for, in each of its maps."""
    maps = run.maps
    n_heads = maps[PER_HEAD].shape[1] if PER_HEAD in maps else 0
    n_maps = 2 + n_heads + sum(name.startswith(("term/", "score")) for name in maps)
    return positions(n_maps, len(maps["pattern/intact"]))


def pattern_section(run: Run) -> Section:
    """Return the section with the maps of the intact pattern and, of an exact sum, its terms."""
    maps, terms = {INTACT.name: run.maps["pattern/intact"]}, run.tables.get("terms")
    if terms is None:
        return maps_section(run, "The positional pattern", SAID["pattern"], maps)
    maps |= {name: run.maps[f"term/{name}"] for name in terms["term"].unique()}
    title, flat = "The pattern, and what each source makes", flat_layers(run.tables)
    section = maps_section(run, title, SAID["sum"], maps, flat=flat)
    return replace(section, table=terms, columns=COLUMNS)


def with_marked_layer(section: Section, run: Run) -> Section:
    """Return a section of numbers by layer with a line at the layer whose maps are shown."""

    def draw() -> go.Figure:
        shown, figure = of_figure(run), section.drawn() or go.Figure()
        figure.update_layout(meta={"marked": shown["layers"]})
        return figure.add_vline(x=shown["layer"], line=GUIDE, name="layer")

    return replace(section, figure=draw)


def maps_section(
    run: Run,
    title: str,
    caption: str,
    maps: Mapping[str, Float[np.ndarray, "layer row key_pos"]],
    pattern: Callable[[Run, np.ndarray], RowMaps] = row_maps,
    **options: Any,
) -> Section:
    """Return a section with patterns by their names.

    Args:
        run: of `ablate`.
        title: of the section.
        caption: of the section.
        maps: by name, nats.
        pattern: makes the pattern of a map that is none, when it is drawn.
        options: of `term_maps`.
    """

    def draw() -> go.Figure:
        patterns = {name: pattern(run, values) for name, values in maps.items()}
        return term_maps(patterns, title=title, **options, **of_figure(run))

    return Section(title=title, figure=draw, caption=caption)


def condition_section(run: Run) -> Section:
    """Return the section with the pattern in every condition, weights by the first replacement."""
    results, maps = run.manifest.results, dict[str, np.ndarray]()
    first = next(iter(results["replacements"]), NO_REPLACEMENT)
    for name in results["conditions"]:
        by = NO_REPLACEMENT if f"score/{name}" in run.maps else first
        maps[row_name(name, by)] = run.maps[map_name(name, by)]
    title = "The pattern without each part"
    return maps_section(run, title, SAID["without"], maps, pattern_of)


def pattern_of(run: Run, scores: Float[np.ndarray, "layer row key_pos"]) -> RowMaps:
    """Return the pattern of score maps in the intact pattern's cells, pooled as the page is."""
    cells = np.isfinite(run.maps["pattern/intact"])
    others = cells.copy()
    others[..., : run.manifest.skip_keys] = False
    means = scores.sum(-1, where=others) / others.sum(-1).clip(1)
    pattern = np.where(cells, scores - means[..., None], nan)
    return pool(row_maps(run, pattern), positions_of(run), with_leads=True)


def head_map_section(run: Run) -> Section:
    """Return the section with the positional pattern of each head of a run that removes nothing."""
    heads = np.moveaxis(run.maps[PER_HEAD], 1, 0)
    maps = {f"H{head}": scores for head, scores in enumerate(heads)}
    title, rows = "The positional pattern of each head", -(-len(heads) // ACROSS)
    return maps_section(run, title, SAID["per_head"], maps, pattern_of, rows=rows)


def score_section(run: Run) -> Section:
    """Return the section with the mean scores of the intact model."""

    def draw() -> go.Figure:
        scores = row_maps(run, run.maps["score/intact"])
        return score_maps(scores, multiples=1, clipped=PERCENT, **of_figure(run))

    return Section(title="Mean scores", figure=draw, caption=SAID["scores"])


def flat_layers(tables: Mapping[str, pd.DataFrame]) -> dict[str, list[int]]:
    """Return by map the layers in which neither its pattern nor its lead exceeds the noise."""
    intact, terms = intact_rows(tables["pattern"]), tables["terms"]
    clear = terms.assign(clear=excludes_zero(terms, "size"))
    clear = clear.pivot_table(index="layer", columns="term", values="clear", aggfunc="any")
    is_clear = excludes_zero(intact, "amplitude") | excludes_zero(intact, "lead")
    clear[INTACT.name] = is_clear.to_numpy()
    return {str(term): clear.index[~clear[term]].tolist() for term in clear}


def head_section(run: Run) -> Section:
    """Return the section of each head's values without each source."""
    table = run.tables["head_pattern"]
    return Section(
        title="Heads without each source",
        figure=partial(head_values, table),
        caption=SAID["heads"],
        table=table,
        columns=COLUMNS,
    )
