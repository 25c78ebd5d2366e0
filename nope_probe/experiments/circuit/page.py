"""The circuit command's report page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.circuit_figure import circuit
from nope_probe.figures.export import export
from nope_probe.figures.stages import stage_measures
from nope_probe.reports.page import Section, page
from nope_probe.runtime.folder import Run

HOW_TO_READ = (
    "Each map has a row per query position, downward, and a column per key position, to the right; "
    "both count from 0. Gram maps hold the mean inner product of the vectors at two positions; (b) "
    "and (i) hold attention scores, in nats, blank where the causal mask hides the key.",
    "Colours run over the middle 90% of the cells off the diagonal: the diagonal, a vector's own "
    "squared length, and attention sinks would hide the rest. Hover or tap a cell for its value.",
    "Less diagonal means: what is left when each diagonal's mean is taken off, so that a pattern "
    "that depends on distance alone leaves nothing. Red is above, blue below.",
    "Shared colours: one scale for all inner products, one for both score maps.",
    "Rank correlation: per query, between a key's position and its value; +1 means that nearer "
    "keys always have more, -1 that farther keys do. Intervals are 95%.",
)


def circuit_page(maps: Mapping[str, Any], table: pd.DataFrame, manifest: Mapping[str, Any]) -> str:
    """Write the report of a circuit run.

    Args:
        maps: `gram/<letter>` and, for an ablation, `reference/<letter>`, [pos, pos].
        table: `stages.csv`.
        manifest: what was run, with the `headline`.
    """
    removed = tuple(manifest["removed"])
    compared = "; the third choice shows the change against the intact model" if removed else ""
    sections = [
        Section(
            title="The block as the data flows through it",
            figure=circuit_figure(maps, manifest),
            caption="Each map stands where it is read. The switches show the maps as they are or "
            f"less the mean of each diagonal{compared}. What is removed is struck through.",
        )
    ]
    if len(table):
        lean = Section(
            title="Which way each stage's pattern leans",
            figure=stage_measures(table, removed),
            caption="Above the dotted line, nearer keys have more at this stage; below it, farther "
            "keys do. Where the line is crossed, the pattern turns over.",
            table=table,
        )
        sections.append(lean)
    title = f"L{manifest['layer']} of {manifest['model']['name']}, stage by stage"
    return page(title, manifest["headline"], sections, manifest, HOW_TO_READ)


def circuit_figure(maps: Mapping[str, Any], manifest: Mapping[str, Any]) -> go.Figure:
    """Draw the circuit figure of a run from its maps and manifest."""
    return circuit(
        _group(maps, "gram"),
        layer=manifest["layer"],
        removed=manifest["removed"],
        reference=_group(maps, "reference"),
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
