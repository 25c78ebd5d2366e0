"""The circuit command's report, drawn from what a run folder holds: it needs no model, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.experiments.circuit import findings
from nope_probe.figures.circuit_figure import circuit
from nope_probe.figures.circuit_views import limits
from nope_probe.figures.downsample import pool
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.export import export
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.stages import STAGE_MEASURES, stage_measures
from nope_probe.figures.words import phrase
from nope_probe.hooks.names import SCORE_STAGES
from nope_probe.reports import notes
from nope_probe.reports.explorer import explorer_section
from nope_probe.reports.page import Section, page
from nope_probe.runtime.folder import Run

SIDE_BY_SIDE = 64  # positions of a map in the figure of all stages
HOW_TO_READ = (
    f"{notes.MAP_AXES} Gram maps hold the mean inner product of the vectors at two positions; (b) "
    "and (i) hold attention scores, in nats, blank where the causal mask hides the key.",
    "Colours run over the middle 90% of the cells off the diagonal: the diagonal, a vector's own "
    f"squared length, and attention sinks would dominate them; {notes.HOVER}.",
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


def circuit_page(
    maps: Mapping[str, Any],
    table: pd.DataFrame,
    manifest: Mapping[str, Any],
    explorer: Explorer | None = None,
) -> str:
    """Return the report of a circuit run.

    Args:
        maps: `gram/<letter>`, `normalised/<letter>` and, for an ablation, `reference/<letter>`,
            arrays [pos, pos].
        table: `stages.csv`.
        manifest: what was run, with the `headline`.
        explorer: the block in all combinations of removed components.
    """
    removed = tuple(manifest["removed"])
    compared = ": of the ablated model, of the intact one, and their difference" if removed else ""
    sections = [
        *explorer_section(explorer),
        Section(
            title=findings.flow_finding(table, removed),
            figure=circuit_figure(maps, manifest),
            caption="Each map is at the point of the data flow at which it is read. The first "
            f"switch shows the maps, their cosines, or the maps less the mean of each diagonal"
            f"{compared}. What is removed is struck through.",
        ),
        *_side_by_side(maps, removed, table),
    ]
    if len(table):
        measures = Section(
            title=findings.inversion_finding(table, removed),
            figure=stage_measures(table, removed),
            caption="Above the dotted line, near keys have larger values at this stage; below it, "
            "far keys. Where the line is crossed, the positional pattern is inverted.",
            table=table,
        )
        sections.append(measures)
    title = f"L{manifest['layer']} of {manifest['model']['name']}, stage by stage"
    return page(title, manifest["headline"], sections, manifest, HOW_TO_READ)


def _side_by_side(
    maps: Mapping[str, Any], removed: Sequence[str], table: pd.DataFrame
) -> Iterator[Section]:
    """Yield the section of all stages of the intact and the ablated model, if there are both."""
    intact, ablated = _group(maps, "reference"), _group(maps, "gram")
    if not intact:
        return
    without = f"without {' and '.join(map(phrase, removed))}"
    groups = [_triple(letter, intact[letter], ablated[letter]) for letter in sorted(ablated)]
    yield Section(
        title=findings.change_finding(table),
        figure=panel_groups(groups, title=f"The stages of the intact model, and {without}"),
        caption="Each stage of the intact model, of the ablated one on the same colours, and the "
        "ablated less the intact, red above zero and blue below.",
    )


def _triple(letter: str, intact: np.ndarray, ablated: np.ndarray) -> list[Panel]:
    """Return a stage's maps of both models, on one scale, and their difference."""
    unit = "nats" if letter in SCORE_STAGES else "inner product"
    both, change = limits([intact, ablated], False), limits([ablated - intact], True)
    drawn = (
        ("intact", intact, both),
        ("ablated", ablated, both),
        ("difference", ablated - intact, change),
    )
    return [
        Panel(
            name=f"({letter}) {name}",
            values=pool(values[None], SIDE_BY_SIDE).values[0],
            low=low,
            high=high,
            unit=unit,
            diverging=name == "difference",
            positions=len(values),
        )
        for name, values, (low, high) in drawn
    ]


def circuit_figure(maps: Mapping[str, Any], manifest: Mapping[str, Any]) -> go.Figure:
    """Draw the circuit figure of a run from its maps and manifest."""
    return circuit(
        _group(maps, "gram"),
        layer=manifest["layer"],
        removed=manifest["removed"],
        reference=_group(maps, "reference"),
        normalised=_group(maps, "normalised"),
        components=manifest["components"],
        absent=manifest["absent"],
    )


def export_image(run: Run, path: Path) -> None:
    """Draw the circuit figure of a run into an image file.

    Raises:
        UserError: if it cannot be drawn or written.
    """
    export(circuit_figure(run.arrays["maps"], run.manifest), path)


def _group(maps: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    prefix = f"{name}/"
    return {
        key.removeprefix(prefix): np.asarray(each)
        for key, each in maps.items()
        if key.startswith(prefix)
    }
