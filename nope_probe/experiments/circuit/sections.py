"""The report of a run of `circuit`: a block stage by stage, with a sentence for each figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isnan
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.experiments.sections import Report, capitalised, listed, with_intervals
from nope_probe.figures.circuit_figure import circuit, limits
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import ValueAndBounds, interval_of
from nope_probe.figures.measures import STAGE_MEASURES, stage_measures
from nope_probe.figures.names import phrase
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.words import MEASURES
from nope_probe.reports import notes
from nope_probe.reports.page import Section, explorer_section
from nope_probe.runtime.folder import Run
from nope_probe.stages import SCORE_STAGES

Rows = dict[str, ValueAndBounds]
SHOWN = {"amplitude": "#.2g", "locality": "z.2f", "relative_r2": "z.2f"}
SIDE_BY_SIDE = 64  # positions of a map in the figure of all stages
HOW_TO_READ = (
    f"{notes.MAP_AXES} Gram maps hold the mean inner product of the vectors at two positions; (b) "
    "and (i) hold attention scores, in nats, blank where the causal mask hides the key.",
    "Colours run over the middle 90% of the cells off the diagonal, without the first keys that "
    "the measures skip: the diagonal, a vector's own squared length, and attention sinks would "
    f"dominate them; {notes.HOVER}.",
    "Less diagonal means: the mean of each diagonal is subtracted, so that nothing remains of a "
    "pattern that depends on distance alone. Red is above, blue below.",
    "Cosines: mean inner products over the root mean square lengths of both positions' vectors, so "
    "that stages can be compared; (b) and (i) have none and stay scores. The other switch puts all "
    "stages' cosines on one scale, from -1 to 1.",
    "Vectors differ in length by an order of magnitude from stage to stage, so each stage has "
    "colours of its own; the intact and the ablated model share them.",
    *map(notes.measure_note, STAGE_MEASURES),
    "Bars are 95% intervals.",
)


def report(run: Run, explorer: Explorer | None = None) -> Report:
    """Return the report of a run.

    Args:
        run: maps `gram/<letter>`, `normalised/<letter>` and, for an ablation,
            `reference/<letter>`, [pos, pos]; the table `stages`.
        explorer: the block in all combinations of removed components, if the page shows it.
    """
    manifest, table = run.manifest, run.tables["stages"]
    name, layer = manifest["model"]["name"], manifest["layer"]
    return Report(
        title=f"L{layer} of {name}, stage by stage",
        headline=manifest["headline"],
        sections=[*explorer_section(explorer), *_sections(run)],
        how_to_read=HOW_TO_READ,
        terminal={f"{name}, L{layer}: each stage's map, as a pattern": _stages_as_text(table)},
    )


def _stages_as_text(stages: pd.DataFrame) -> pd.DataFrame:
    """Return a row per stage: the measures of its map, intact and ablated."""
    rows = stages.sort_values("stage", kind="stable")
    names = [f"({stage})" for stage in rows["stage"]]
    if stages["model"].nunique() > 1:
        names = [f"{name} {model}" for name, model in zip(names, rows["model"], strict=True)]
    columns = {MEASURES[name].label: (name, style) for name, style in SHOWN.items()}
    return with_intervals({"stage": names}, rows, columns)


def _sections(run: Run) -> Iterator[Section]:
    manifest, table = run.manifest, run.tables["stages"]
    removed = tuple(manifest["removed"])
    compared = ": of the ablated model, of the intact one, and their difference" if removed else ""
    yield Section(
        title=flow_finding(table, removed),
        figure=partial(circuit_figure, run),
        caption="Each map is at the point of the data flow at which it is read. The first "
        f"switch shows the maps, their cosines, or the maps less the mean of each diagonal"
        f"{compared}. What is removed is struck through.",
    )
    yield from _side_by_side(run)
    if len(table):
        yield Section(
            title="Which keys each stage prefers",
            figure=partial(stage_measures, table, removed),
            caption="Above the dotted line, near keys have larger values at this stage; below it, "
            "far keys. Where the line is crossed, the positional pattern is inverted.",
            table=table,
        )


def _side_by_side(run: Run) -> Iterator[Section]:
    """Yield the section of all stages, intact and ablated, if there is an ablation."""
    intact, ablated = _group(run.maps, "reference"), _group(run.maps, "gram")
    if not intact:
        return
    skip_keys, without = run.manifest["skip_keys"], map(phrase, run.manifest["removed"])
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
        caption="Each stage of the intact model, of the ablated one on the same colours, and the "
        "ablated less the intact, red above zero and blue below.",
    )


def circuit_figure(run: Run) -> go.Figure:
    """Draw the circuit figure of a run from its maps and manifest."""
    maps, manifest = run.maps, run.manifest
    return circuit(
        _group(maps, "gram"),
        layer=manifest["layer"],
        removed=manifest["removed"],
        reference=_group(maps, "reference"),
        normalised=_group(maps, "normalised"),
        components=manifest["components"],
        absent=manifest["absent"],
        query_positions=run.query_positions,
        skip_keys=manifest["skip_keys"],
    )


def _group(maps: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    named = [key for key in maps if key.startswith(f"{name}/")]
    return {key.removeprefix(f"{name}/"): np.asarray(maps[key]) for key in named}


def headline(manifest: Mapping[str, Any], table: pd.DataFrame) -> list[str]:
    """Return sentences on the keys that each stage prefers, and on the inversion at (g).

    Args:
        manifest: the run's `layer`, `model`, `removed` components and `absent` stages.
        table: `stages.csv`.
    """
    layer, name, removed = manifest["layer"], manifest["model"]["name"], manifest["removed"]
    without = f" without {' and '.join(map(phrase, removed))}" if removed else ""
    intact, ablated = localities(table, "intact"), localities(table, "ablated")
    shown = ablated if removed else intact
    sentences = [
        f"In L{layer} of {name}{without}, {preferences(shown)}.",
        _inversion(shown, "mlp" in removed),
    ]
    if ablated:
        sentences.append(_against_intact(ablated, intact))
    if "h" in manifest["absent"]:
        sentences.append(f"{manifest['absent']['h']}, so (h) and (i) do not exist.")
    return sentences


def _inversion(rows: Rows, no_ffn: bool) -> str:
    """Return a sentence on the pattern from (f) over (g) to (h), which the paper cannot explain."""
    values = ", ".join(f"{rows[stage][0]:+.2f} at ({stage})" for stage in "fgh" if stage in rows)
    if "f" not in rows or "g" not in rows:
        return "This block has no (f) to compare (g) with: an inversion by its FFN is undefined."
    if any(isnan(rows[stage][0]) for stage in "fgh" if stage in rows):
        return (
            "Some of (f), (g) and (h) have no order of keys to compare: an inversion is undefined."
        )
    lead = f"The rank correlation of a value with its key's position is {values}: "
    lead += "the positional pattern is "
    if not have_opposite_signs(rows["f"], rows["g"]):
        return lead + "not significantly inverted at (g)."
    inverted = f"inverted at (g), after {'the residual sum' if no_ffn else 'the FFN'}"
    if "h" not in rows:
        return f"{lead}{inverted}."
    restored = "" if have_opposite_signs(rows["g"], rows["h"]) else "not significantly "
    return f"{lead}{inverted}, and {restored}restored at (h), after the next norm."


def _against_intact(rows: Rows, intact: Rows) -> str:
    """Return the two stages whose correlation an ablation changes most, in a sentence."""
    changes = {s: rows[s][0] - intact[s][0] for s in rows if s in intact}
    known = [stage for stage, change in changes.items() if not isnan(change)]
    if not known:
        return "No stage has an order of keys to compare with the intact model's."
    most = sorted(known, key=lambda stage: -abs(changes[stage]))[:2]
    parts = [f"from {intact[s][0]:+.2f} to {rows[s][0]:+.2f} at ({s})" for s in most]
    return f"Compared with the intact model it changes most {' and '.join(parts)}."


def localities(table: pd.DataFrame, model: str) -> Rows:
    """Return per stage the rank correlation of a value with its key's position.

    Args:
        table: `stages.csv`.
        model: intact or ablated.
    """
    if not len(table):
        return {}
    rows = table[table["model"] == model]
    return {str(row["stage"]): interval_of(row, "locality") for _, row in rows.iterrows()}


def preferences(rows: Rows) -> str:
    """Return the stages at which near keys, or far keys, have larger values, in words."""
    near = [stage for stage, (_, low, _) in rows.items() if low > 0]
    far = [stage for stage, (_, _, high) in rows.items() if high < 0]
    kinds = {
        "near keys have larger values": near,
        "far keys have larger values": far,
        "no significant trend": [stage for stage in rows if stage not in (*near, *far)],
    }
    parts = [f"{kind} at {stage_list(stages)}" for kind, stages in kinds.items() if stages]
    return "; ".join(parts) or "a sliding window hides keys at every stage"


def have_opposite_signs(one: ValueAndBounds, other: ValueAndBounds) -> bool:
    """Return whether two stages' correlations significantly differ in sign."""
    return bool((one[1] > 0 and other[2] < 0) or (one[2] < 0 and other[1] > 0))


def flow_finding(table: pd.DataFrame, removed: Sequence[str]) -> str:
    """Return a sentence on the keys that each stage of the drawn model prefers."""
    return capitalised(preferences(localities(table, "ablated" if removed else "intact")))


def stage_list(stages: Sequence[str]) -> str:
    """Return stages by letter, with runs of three stages or more as `(a) to (g)`.

    Example:
        >>> stage_list("abcdefgi"), stage_list("fg")
        ('(a) to (g) and (i)', '(f) and (g)')
    """
    runs: list[str] = []
    for stage in sorted(stages):
        if runs and ord(stage) == ord(runs[-1][-1]) + 1:
            runs[-1] += stage
        else:
            runs.append(stage)
    words: list[str] = []
    for run in runs:
        words += [f"({run[0]}) to ({run[-1]})"] if len(run) > 2 else [f"({s})" for s in run]
    return listed(words)
