"""The report of a run of `circuit`: a block stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isnan

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.circuit import circuit, limits
from nope_probe.figures.intervals import ValueAndBounds, interval_of
from nope_probe.figures.measures import STAGE_MEASURES, stage_measures
from nope_probe.figures.names import phrase
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.words import listed
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section
from nope_probe.run.folder import Run
from nope_probe.stages import SCORE_STAGES
from nope_probe.studies.page import Report, preferred_keys

IntervalByName = dict[str, ValueAndBounds]
STAGES = {  # in words, in the order of the data flow
    "a": "block's input, normed",
    "b": "attention scores",
    "c": "values, mixed by attention",
    "d": "attention's output",
    "e": "stream after attention",
    "f": "MLP's input, normed",
    "g": "stream after the MLP",
    "h": "next block's input, normed",
    "i": "next block's scores",
}
MOST_NAMED = 3  # components in a sentence
LEFT_OUT = "c"  # of the lead's table
INVERSIONS = {  # what becomes of the pattern from (f) over (g) to (h)
    "undefined": "{where} has no stage between attention and MLP, so no inversion is defined.",
    "no order": "{where} has no order of keys to compare before and after its MLP.",
    "kept": "{where} does not invert the positional pattern at its {what}.",
    "inverted": "{where} inverts the positional pattern at its {what}.",
    "restored": "{where} inverts the positional pattern at its {what}, and the next norm restores "
    "it.",
}
SIDE_BY_SIDE = 64  # positions of a map in the figure of all stages


@dataclass(frozen=True, kw_only=True)
class StudiedBlock:
    """The block of a run.

    Attributes:
        layer: its number, from 0.
        components: what can be removed from the model.
        absent: by letter, why a stage does not exist.
    """

    layer: int = 0
    components: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: maps `gram/<letter>`, `normalised/<letter>` and, for an ablation,
            `reference/<letter>`, [pos, pos]; the table `stages`.
    """
    layer = run.manifest.results_as(StudiedBlock).layer
    return Report(
        title=f"L{layer} of {run.manifest.model_name}, stage by stage",
        headline=headline(run),
        sections=list(_sections(run)),
        how_to_read=[*notes.how_to_read("circuit"), *map(notes.measure_note, STAGE_MEASURES)],
    )


def _sections(run: Run) -> Iterator[Section]:
    table = run.tables["stages"]
    yield Section(
        title="The block, stage by stage",
        figure=partial(circuit_figure, run),
        caption="Each map is at the point of the data flow at which it is read. The first switch "
        "shows the maps, their cosines, or the maps less diagonal means. What is removed is struck "
        "through.",
    )
    yield from _side_by_side(run)
    if len(table):
        yield Section(
            title="Which keys each stage prefers",
            figure=partial(stage_measures, table, run.manifest.removed or ()),
            caption="Above the dotted line, near keys have larger values at this stage; below it, "
            "far keys. Where the line is crossed, the positional pattern is inverted.",
            table=table,
        )


def _side_by_side(run: Run) -> Iterator[Section]:
    """Yield the section of all stages, intact and ablated, if there is an ablation."""
    intact, ablated = _group(run.maps, "reference"), _group(run.maps, "gram")
    if not intact:
        return
    skip_keys, without = run.manifest.skip_keys, map(phrase, run.manifest.removed or ())
    groups = []
    for letter in sorted(ablated):
        kept, change = [intact[letter], ablated[letter]], ablated[letter] - intact[letter]
        both, of_change = limits(kept, False, skip_keys), limits([change], True, skip_keys)
        drawn = (("intact", kept[0], both), ("ablated", kept[1], both))
        group = [
            Panel(
                name=f"({letter}) {name}",
                values=values,
                low=low,
                high=high,
                unit="nats" if letter in SCORE_STAGES else "inner product",
                diverging=name == "difference",
                query_positions=run.query_positions,
            )
            for name, values, (low, high) in (*drawn, ("difference", change, of_change))
        ]
        groups.append(group)
    yield Section(
        title="Stage by stage: intact, ablated, difference",
        figure=partial(
            panel_groups,
            groups,
            title=f"The stages of the intact model, and without {' and '.join(without)}",
            max_positions=SIDE_BY_SIDE,
        ),
        caption="Each stage of the intact model, and of the ablated one on the same colours. Then "
        "the ablated less the intact: red is above zero, blue below.",
    )


def circuit_figure(run: Run) -> go.Figure:
    """Draw the circuit figure of a run from its maps and manifest."""
    maps, block = run.maps, run.manifest.results_as(StudiedBlock)
    return circuit(
        _group(maps, "gram"),
        layer=block.layer,
        removed=run.manifest.removed or (),
        reference=_group(maps, "reference"),
        normalised=_group(maps, "normalised"),
        components=block.components,
        absent=block.absent,
        query_positions=run.query_positions,
        skip_keys=run.manifest.skip_keys,
    )


def _group(maps: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    named = [key for key in maps if key.startswith(f"{name}/")]
    return {key.removeprefix(f"{name}/"): np.asarray(maps[key]) for key in named}


def headline(run: Run) -> Headline:
    """Return how the MLP changes the pattern, and the keys that each stage prefers.

    Args:
        run: its table `stages`.
    """
    removed, table = run.manifest.removed or (), run.tables["stages"]
    block = run.manifest.results_as(StudiedBlock)
    models = {name: rows for name in ("intact", "ablated") if (rows := localities(table, name))}
    where = f"L{block.layer} of {run.manifest.name}"
    if removed:
        many = len(removed) > MOST_NAMED
        where += (
            f" without {f'{len(removed)} components' if many else listed([*map(phrase, removed)])}"
        )
    shown = models.get("ablated" if removed else "intact", {})
    what = "residual sum" if "mlp" in removed else "MLP"
    letters = [letter for letter in STAGES if letter in shown and letter != LEFT_OUT]
    cells = {"": [STAGES[letter] for letter in letters]}
    for name, rows in models.items():
        heading = f"{name}: prefers" if len(models) > 1 else "prefers"
        cells[heading] = [_preference(rows.get(letter)) for letter in letters]
    missing = f" {block.absent['h']}, so (h) and (i) do not exist." if "h" in block.absent else ""
    return Headline(
        sentence=INVERSIONS[inversion(shown)].format(where=where, what=what),
        table=pd.DataFrame(cells) if letters else pd.DataFrame(),
        caption="The number is the rank correlation of a value with its key's position: above 0, "
        f"near keys have larger values; below 0, far keys.{missing}",
    )


def inversion(rows: IntervalByName) -> str:
    """Return how the pattern changes from (f) over (g) to (h), which the paper cannot explain.

    Args:
        rows: per stage the rank correlation of a value with its key's position.
    """
    if "f" not in rows or "g" not in rows:
        return "undefined"
    if any(isnan(rows[stage][0]) for stage in "fgh" if stage in rows):
        return "no order"
    if not have_opposite_signs(rows["f"], rows["g"]):
        return "kept"
    return "restored" if "h" in rows and have_opposite_signs(rows["g"], rows["h"]) else "inverted"


def _preference(locality: ValueAndBounds | None) -> str:
    """Return the keys that have larger values at a stage, with the number that shows it."""
    if locality is None or isnan(locality[0]):
        return ""
    return f"{preferred_keys(locality)}, {locality[0]:+.2f}"


def localities(table: pd.DataFrame, model: str) -> IntervalByName:
    """Return per stage the rank correlation of a value with its key's position.

    Args:
        table: `stages.csv`.
        model: intact or ablated.
    """
    if not len(table):
        return {}
    rows = table[table["model"] == model]
    return {str(row["stage"]): interval_of(row, "locality") for _, row in rows.iterrows()}


def have_opposite_signs(one: ValueAndBounds, other: ValueAndBounds) -> bool:
    """Return whether two stages' correlations significantly differ in sign."""
    return bool((one[1] > 0 and other[2] < 0) or (one[2] < 0 and other[1] > 0))
