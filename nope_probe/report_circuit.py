"""The circuit command's answer and report, from what a run folder holds; no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figure_circuit import circuit
from nope_probe.figure_style import words
from nope_probe.figure_views import Circuit
from nope_probe.figures_stages import stage_measures
from nope_probe.report import Section, page

Row = tuple[float, float, float]
Rows = dict[str, Row]
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
        manifest: what was run, with the `answer`.
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
    title = f"Layer {manifest['layer']} of {manifest['model']['name']}, stage by stage"
    return page(title, manifest["answer"], sections, manifest, HOW_TO_READ)


def circuit_figure(maps: Mapping[str, Any], manifest: Mapping[str, Any]) -> go.Figure:
    """Draw the circuit figure of a run from its maps and manifest."""
    return circuit(
        Circuit(
            layer=manifest["layer"],
            maps=_group(maps, "gram"),
            absent=manifest["absent"],
            components=manifest["components"],
            removed=manifest["removed"],
            reference=_group(maps, "reference"),
        )
    )


def _group(maps: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    prefix = f"{name}/"
    return {
        key.removeprefix(prefix): np.asarray(each)
        for key, each in maps.items()
        if key.startswith(prefix)
    }


def circuit_answer(manifest: Mapping[str, Any], table: pd.DataFrame) -> list[str]:
    """Say which stages prefer near keys, and whether the pattern turns over at (g) and (h)."""
    layer, name, removed = manifest["layer"], manifest["model"]["name"], manifest["removed"]
    of = f"layer {layer} of {name}" + (
        f" without {' and '.join(map(words, removed))}" if removed else ""
    )
    intact, ablated = _rows(table, "intact"), _rows(table, "ablated")
    shown = ablated if removed else intact
    sentences = [_leanings(of, shown), _turns(shown, "mlp" in removed)]
    if ablated:
        sentences.append(_against_intact(ablated, intact))
    if "h" in manifest["absent"]:
        sentences.append(
            f"Layer {layer} is the last, so there is no next layer: (h) and (i) do not exist."
        )
    return sentences


def _rows(table: pd.DataFrame, model: str) -> Rows:
    """Give per stage its rank correlation of value with nearness, and its interval."""
    if not len(table):
        return {}
    rows = table[table["model"] == model]
    columns = (rows[name].astype(float) for name in ("locality", "locality_low", "locality_high"))
    return dict(zip(rows["stage"].astype(str), zip(*columns, strict=True), strict=True))


def _leanings(of: str, rows: Rows) -> str:
    near = [stage for stage, (_, low, _) in rows.items() if low > 0]
    far = [stage for stage, (_, _, high) in rows.items() if high < 0]
    level = [stage for stage in rows if stage not in (*near, *far)]
    kinds = {"nearer keys have more": near, "farther keys have more": far, "neither is sure": level}
    parts = [f"{kind} at {_list(stages)}" for kind, stages in kinds.items() if stages]
    return f"In {of}, {'; '.join(parts) or 'no stage shows all keys'}."


def _turns(rows: Rows, no_ffn: bool) -> str:
    """Say what happens from (f) over (g) to (h), which the paper leaves unexplained."""
    seen = ", ".join(f"{rows[stage][0]:+.2f} at ({stage})" for stage in "fgh" if stage in rows)
    if "f" not in rows or "g" not in rows:
        return "This block has no (f) to compare (g) with, so no turn behind an FFN can be seen."
    lead = f"The rank correlation of a value with its key's nearness is {seen}: "
    if not _opposite(rows["f"], rows["g"]):
        return lead + "the pattern does not surely turn over at (g)."
    turned = f"the pattern turns over at (g), behind {'the residual' if no_ffn else 'the FFN'}"
    if "h" not in rows:
        return f"{lead}{turned}."
    back = "back" if _opposite(rows["g"], rows["h"]) else "not surely back"
    return f"{lead}{turned}, and {back} at (h), the next norm."


def _opposite(one: Row, other: Row) -> bool:
    """Tell whether two stages surely lean in opposite ways."""
    return bool((one[1] > 0 and other[2] < 0) or (one[2] < 0 and other[1] > 0))


def _against_intact(rows: Rows, intact: Rows) -> str:
    both = [stage for stage in rows if stage in intact]
    most = sorted(both, key=lambda stage: -abs(rows[stage][0] - intact[stage][0]))[:2]
    parts = [f"from {intact[s][0]:+.2f} to {rows[s][0]:+.2f} at ({s})" for s in most]
    return f"Against the intact model it changes most {' and '.join(parts)}."


def _list(stages: Sequence[str]) -> str:
    return " ".join(f"({stage})" for stage in stages)
