"""The page of `ablate`: its verdict and values, its sections, maps and heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from textwrap import wrap
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
    maker_of,
    strongest_row,
    values_by_layer,
)
from nope_probe.figures.attention import head_values
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import brief, row_name, short, words
from nope_probe.figures.panels import ACROSS, RowMaps, pool
from nope_probe.figures.style import GUIDE
from nope_probe.figures.words import (
    MEASURES,
    NUMBERS,
    WITHIN,
    column_text,
    columns,
    excludes_zero,
)
from nope_probe.removal import INTACT, NO_REPLACEMENT, UNION, Condition
from nope_probe.reports.notes import captions
from nope_probe.reports.page import MOST_ROWS, Headline, Section, positions, row_maps
from nope_probe.run.folder import Run

SAID = captions("ablate")
COLUMNS = {**MEASURES, **columns("ablate")}
SHOWN = ("lead", "amplitude", "locality")
ROW = ["removed", "replacement"]
HALF = "±z.2f"
FIRST_TOKEN = "the first token itself"
PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile
PER_HEAD = "score_per_head/intact"


def intact_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the intact model."""
    return table[table["removed"] == INTACT.name]


def headline(run: Run) -> Headline:
    """Return what makes and carries each number, and its values in every condition."""
    results = run.manifest.results
    found = answers(run.tables["pattern"], results["conditions"], results["positional_sources"])
    values = Headline(sentence="", table=value_table(run), caption=SAID["values"])
    return Headline(
        sentence="" if found["order"].n_layers else SAID["nothing"],
        table=verdict_table(run, found),
        caption=SAID["rule"],
        then=values,
    )


def verdict_table(run: Run, found: Mapping[str, Answer]) -> pd.DataFrame:
    """Return what makes each number, also in the layer of its values, and what carries it.

    Args:
        run: of `ablate`.
        found: its answers; see `Run.answer`.
    """
    asked = [of for of in map(Condition.parse, run.manifest.removed or ()) if is_carrier(of)]
    rows = []
    for number, answer in found.items():
        n, below = answer.n_layers, answer.n_below_zero
        trails = number == "lead" and below >= THIRD * n > 0
        layer = shown_layer(run, number)
        main, shown = answer.main, None if layer is None else makers_of(run, number)[layer]
        main |= {x: k for x, k in answer.makers.items() if x == shown}
        at = {shown: f": L{layer}"} if len(main) > 1 else {}
        makers = [f"{maker_text(x, number)} ({k} of {n}{at.get(x, '')})" for x, k in main.items()]
        carriers = ", ".join(map(carrier_text, answer.carriers)) or "none"
        rows.append(
            {
                "": NUMBERS[number] + f"\n(trails in {below} of {n})" * trails,
                "made by": "\n".join(makers) or WITHIN,
                "carried by": carriers if makers else "",
            }
        )
    table = pd.DataFrame(rows)
    return table if asked else table.drop(columns="carried by")


def maker_text(maker: Maker, number: str) -> str:
    """Return what makes a number, in words.

    Example:
        >>> maker_text(Maker(way="each needed", sources=("mask", "rope")), "not_by_distance")
        'mask + RoPE, each needed'
        >>> maker_text(Maker(way="no source"), "lead")
        'the first token itself'
    """
    if not maker.sources:
        return FIRST_TOKEN if number == "lead" and maker.way != WITHIN else maker.way
    joined = short(UNION.join(maker.sources))
    return joined if maker.way == "alone" else f"{joined}, {maker.way}"


def carrier_text(carrier: str) -> str:
    """Return what carries a number, in words.

    Example:
        >>> carrier_text("w_k alone")
        'W_K alone'
    """
    name, *alone = carrier.split(" ")
    return " ".join([words(name), *alone])


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
                column_text(of, number, COLUMNS[number], HALF) for of in rows.to_dict("records")
            ]
            cells["\n".join(wrap(f"{title} ({place})", 13))] = values
    if "cost" in means:
        intact, *others = means.to_dict("records")
        costs = [column_text(row, "cost", COLUMNS["cost"], HALF) for row in others]
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


def makers_of(run: Run, number: str) -> dict[int, Maker]:
    """Return what makes a number in each layer."""
    results = run.manifest.results
    of_layers = values_by_layer(run.tables["pattern"], number, results["conditions"])
    sources = results["positional_sources"]
    return {layer: maker_of(values, sources) for layer, values in of_layers.items()}


def maker_section(run: Run) -> Section:
    """Return the section of what makes each number in each layer."""
    made = {
        title: {f"L{layer}": maker_text(x, number) for layer, x in makers_of(run, number).items()}
        for number, title in NUMBERS.items()
        if number != "lead" or run.manifest.skip_keys
    }
    return Section(
        title="What makes each number in each layer",
        caption=SAID["makers"],
        table=pd.DataFrame(made).rename_axis("layer").reset_index(),
    )


def headline_of_intact(run: Run) -> Headline:
    """Return the layers with the largest patterns, and which keys they prefer."""
    pattern = run.tables["pattern"]
    above = pattern[above_noise(pattern, run.manifest.fold_sizes)]
    if above.empty:
        return Headline(sentence=SAID["nothing"])
    shown = above.nlargest(MOST_ROWS, "amplitude").sort_values("layer")
    table = brief(shown, "layer", SHOWN, MEASURES)
    return Headline(sentence="", table=table, caption=SAID["intact"])


def pooled(
    run: Run, values: Float[np.ndarray, "layer row key_pos"], with_leads: bool = True
) -> RowMaps:
    """Return maps with as many positions as the page has room for, of all its maps alike."""
    n_maps = sum(name.startswith(("term/", "score")) for name in run.maps)
    n_heads = run.maps[PER_HEAD].shape[1] if PER_HEAD in run.maps else 0
    n_positions = positions(2 + n_maps + n_heads, len(values))
    return pool(row_maps(run, values), n_positions, with_leads)


def of_figure(run: Run) -> dict[str, Any]:
    """Return what figures of maps have in common: the shown layer, all layers, the maps' noise."""
    rows = intact_rows(run.tables["pattern"])
    layers, shown = rows["layer"].tolist(), strongest_row(rows, run.manifest.fold_sizes)
    first = layers[0] if shown is None else int(shown["layer"])
    drawn: dict[str, Any] = {"layer": first, "layers": layers}
    if (errors := run.arrays.get("maps", {}).get("se/intact")) is not None:
        drawn["noise"] = [float(np.sqrt(np.nanmean(of_layer**2))) for of_layer in errors]
    return drawn


def pattern_section(run: Run) -> Section:
    """Return the section with the maps of the intact pattern and, of an exact sum, its terms."""
    terms = run.tables.get("terms")
    names = [] if terms is None else terms["term"].unique().tolist()
    title = "The pattern, and what each source makes" if names else "The positional pattern"
    maps = {"intact": "pattern/intact", **{name: f"term/{name}" for name in names}}
    section = maps_section(
        run,
        title,
        lambda: {name: pooled(run, run.maps[of]) for name, of in maps.items()},
        SAID["sum" if names else "pattern"],
        flat=flat_layers(run.tables) if names else {},
    )
    return replace(section, table=terms, columns=COLUMNS)


def with_marked_layer(section: Section, run: Run) -> Section:
    """Return a section of numbers by layer with a line at the layer whose maps are shown."""
    shown = of_figure(run)

    def draw() -> go.Figure:
        figure = section.drawn() or go.Figure()
        figure.update_layout(meta={"marked": shown["layers"]})
        return figure.add_vline(x=shown["layer"], line=GUIDE, name="layer")

    return replace(section, figure=draw)


def maps_section(
    run: Run, title: str, maps: Callable[[], dict[str, RowMaps]], caption: str, **options: Any
) -> Section:
    """Return a section with patterns by their names; see `term_maps` for its options."""
    return Section(
        title=title,
        figure=lambda: term_maps(maps(), title=title, **options, **of_figure(run)),
        caption=caption,
    )


def condition_section(run: Run) -> Section:
    """Return the section with the pattern in every condition, weights by the first replacement."""
    results, maps = run.manifest.results, dict[str, str]()
    by = next(iter(results["replacements"]), NO_REPLACEMENT)
    for name in results["conditions"]:
        is_plain = f"score/{name}" in run.maps
        title = row_name(name, NO_REPLACEMENT if is_plain else by)
        maps[title] = f"score/{name}" if is_plain else f"score_{by}/{name}"
    return maps_section(
        run,
        "The pattern without each part",
        lambda: {title: pattern_of(run, run.maps[name]) for title, name in maps.items()},
        SAID["without"],
    )


def pattern_of(run: Run, scores: Float[np.ndarray, "layer row key_pos"]) -> RowMaps:
    """Return the pattern of score maps in the intact pattern's cells, with as many as fit."""
    cells = np.isfinite(run.maps["pattern/intact"])
    others = cells.copy()
    others[..., : run.manifest.skip_keys] = False
    means = scores.sum(-1, where=others) / others.sum(-1).clip(1)
    return pooled(run, np.where(cells, scores - means[..., None], nan))


def head_map_section(run: Run) -> Section:
    """Return the section with the positional pattern of each head of a run that removes nothing."""
    heads = np.moveaxis(run.maps[PER_HEAD], 1, 0)
    return maps_section(
        run,
        "The positional pattern of each head",
        lambda: {f"H{head}": pattern_of(run, scores) for head, scores in enumerate(heads)},
        SAID["per_head"],
        rows=-(-len(heads) // ACROSS),
    )


def score_section(run: Run) -> Section:
    """Return the section with the mean scores of the intact model."""
    return Section(
        title="Mean scores",
        figure=lambda: score_maps(
            pooled(run, run.maps["score/intact"], with_leads=False),
            multiples=1,
            clipped=PERCENT,
            **of_figure(run),
        ),
        caption=SAID["scores"],
    )


def flat_layers(tables: Mapping[str, pd.DataFrame]) -> dict[str, list[int]]:
    """Return by map the layers in which neither its pattern nor its lead exceeds the noise."""
    intact, terms = intact_rows(tables["pattern"]), tables["terms"]
    is_clear = excludes_zero(intact, "amplitude") | excludes_zero(intact, "lead")
    flat = {INTACT.name: intact["layer"][~is_clear].tolist()}
    for term, rows in terms.groupby("term"):
        clear = {*rows["layer"][excludes_zero(rows, "size")]}
        flat[str(term)] = sorted({*rows["layer"]} - clear)
    return flat


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
