"""`circuit`: one block stage by stage, from its input to the next block's scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.figures.intervals import ValueAndBounds, interval_of
from nope_probe.figures.names import phrase
from nope_probe.figures.words import MEASURES, Column, View, listed
from nope_probe.models.info import ModelInfo
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Report, Section
from nope_probe.run.flags import COUNT, LAYERS, SEQ_LEN, Bounds, Mistakes
from nope_probe.stages import SCORE_STAGES
from nope_probe.studies.removing import RemovingSettings
from nope_probe.studies.tidy import preferred_keys, sections

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects as go

    from nope_probe.figures.style import Layout
    from nope_probe.run.folder import Run

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
SHOWN = ("locality", "monotonicity")
COLUMNS = {
    **MEASURES,
    "model": Column("model", "`intact`, or `ablated` without what is removed.", names_rows=True),
    "stage": Column("stage", "The letter of the stage.", names_rows=True),
}
VIEWS = (
    View(
        table="stages",
        title="Which keys each stage prefers",
        y=SHOWN,
        x="stage",
        by=("model",),
        caption="Above 0 (of monotonicity, above 1/2) near keys have larger values at this stage; "
        "below, far keys. Where this line is crossed, the positional pattern is inverted.",
    ),
)
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
class Settings(RemovingSettings):
    """Follow one block from its input to the next block's scores (the paper's Figure 3).

    Writes the mean Gram or score map of each stage, (a) to (i), with standard errors, into a
    folder with manifest.json, stages.csv and report.html.

    Attributes:
        layer: Which block, from 0; the last one has (a) to (g).
    """

    command = "circuit"
    function = "run_circuit"
    examples = (
        "--model nope-tiny",
        "--model rope-tiny --layer 1 --remove mask w_q",
    )

    model: str = "nope-tiny"
    layer: Annotated[int, Bounds(0, LAYERS.high - 1)] = 0
    n_seqs: Annotated[int, COUNT] = 1000
    seq_len: Annotated[int, SEQ_LEN] = 50
    layers: Annotated[int | Literal["all"], tyro.conf.Suppress] = "all"

    unrecorded = (*RemovingSettings.unrecorded, "layers")
    in_one_process = True

    def mistakes_of(self, info: ModelInfo) -> Mistakes:
        """Yield whether the block does not exist, or does not attend."""
        yield (
            self.layer >= info.depth,
            f"{info.name} has {info.depth} layers, L0 to L{info.depth - 1}; there is no --layer "
            f"{self.layer}",
        )
        named = ", ".join(f"L{layer}" for layer in info.attending)
        yield (
            self.layer in info.not_attending,
            f"--layer {self.layer} of {info.name} does not attend; {named} do",
        )

    @property
    def removes(self) -> bool:
        """Whether the run removes components."""
        return bool(self.remove)


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: maps `gram/<letter>`, `normalised/<letter>` and, for an ablation,
            `reference/<letter>`, [pos, pos]; the table `stages`; the block's `layer`, its
            `components`, and by letter why a stage is `absent`.
    """
    return Report(
        title=f"L{run.manifest.results['layer']} of {run.manifest.model_name}, stage by stage",
        headline=headline(run),
        sections=[*_maps(run), *sections(VIEWS, run.tables, COLUMNS)],
        how_to_read=[*notes.how_to_read("circuit"), *map(notes.measure_note, SHOWN)],
    )


def _maps(run: Run) -> Iterator[Section]:
    yield Section(
        title="The block, stage by stage",
        figure=partial(circuit_figure, run),
        caption="Each map is at the point of the data flow at which it is read. The switch "
        "shows the maps, their cosines, or the maps less diagonal means. What is removed is struck "
        "through.",
    )
    if stages_of(run, "reference"):
        yield Section(
            title="Stage by stage: intact, ablated, difference",
            figure=partial(side_by_side, run),
            caption="Each stage of the intact model, and of the ablated one on the same colours. "
            "Then the ablated less the intact: red is above zero, blue below.",
        )


def stages_of(run: Run, kind: str) -> dict[str, np.ndarray]:
    """Return the maps of a kind, such as `gram`, by the letter of the stage."""
    import numpy as np

    named = [name.partition("/") for name in run.maps]
    return {letter: np.asarray(run.maps[f"{of}/{letter}"]) for of, _, letter in named if of == kind}


def circuit_figure(run: Run) -> go.Figure:
    """Draw the circuit figure of a run from its maps and manifest."""
    from nope_probe.figures.stages import circuit

    return circuit(
        stages_of(run, "gram"),
        reference=stages_of(run, "reference"),
        normalised=stages_of(run, "normalised"),
        removed=run.manifest.removed or (),
        query_positions=run.query_positions,
        skip_keys=run.manifest.skip_keys,
        **run.manifest.results,
    )


def side_by_side(run: Run) -> go.Figure:
    """Draw each stage of the intact model, of the ablated one, and their difference."""
    from nope_probe.figures.panels import Panel, panel_groups
    from nope_probe.figures.stages import limits

    reference, shown, groups = stages_of(run, "reference"), stages_of(run, "gram"), []
    for letter in sorted(shown):
        models = {"intact": reference[letter], "ablated": shown[letter]}
        change = {"difference": shown[letter] - reference[letter]}
        unit, group = "nats" if letter in SCORE_STAGES else "inner product", []
        for alike in (models, change):
            is_change = alike is change
            low, high = limits([*alike.values()], is_change, run.manifest.skip_keys)
            scale: Layout = {"low": low, "high": high, "unit": unit, "diverging": is_change}
            group += [
                Panel(
                    name=f"({letter}) {name}",
                    values=values,
                    query_positions=run.query_positions,
                    **scale,
                )
                for name, values in alike.items()
            ]
        groups.append(group)
    without = " and ".join(map(phrase, run.manifest.removed or ()))
    title = f"The stages of the intact model, and without {without}"
    return panel_groups(groups, title=title, max_positions=SIDE_BY_SIDE)


def headline(run: Run) -> Headline:
    """Return how the MLP changes the pattern, and the keys that each stage prefers.

    Args:
        run: its table `stages`.
    """
    import pandas as pd

    removed, absent = run.manifest.removed or (), run.manifest.results["absent"]
    models = {
        str(name): {row["stage"]: interval_of(row, "locality") for row in rows.to_dict("records")}
        for name, rows in run.tables["stages"].groupby("model", sort=False)
    }
    where = f"L{run.manifest.results['layer']} of {run.manifest.model_name}"
    if removed:
        many = f"{len(removed)} components" if len(removed) > MOST_NAMED else ""
        where += f" without {many or listed([*map(phrase, removed)])}"
    shown = models["ablated" if removed else "intact"]
    letters = [letter for letter in STAGES if letter in shown and letter != LEFT_OUT]
    cells = {"": [STAGES[letter] for letter in letters]}
    for name, stages in models.items():
        heading = f"{name}: prefers" if len(models) > 1 else "prefers"
        cells[heading] = [_preference(stages.get(letter)) for letter in letters]
    missing = f" {absent['h']}, so (h) and (i) do not exist." if "h" in absent else ""
    what = "residual sum" if "mlp" in removed else "MLP"
    return Headline(
        sentence=INVERSIONS[inversion(shown)].format(where=where, what=what),
        table=pd.DataFrame(cells),
        caption="The number is the rank correlation of a value with its key's position: above 0, "
        f"near keys have larger values; below 0, far keys.{missing}",
    )


def _preference(locality: ValueAndBounds | None) -> str:
    """Return the keys that have larger values at a stage, with the number that shows it."""
    if locality is None or isnan(locality[0]):
        return ""
    return f"{preferred_keys(locality)}, {locality[0]:+.2f}"


def inversion(stages: Mapping[str, ValueAndBounds]) -> str:
    """Return how the pattern changes from (f) over (g) to (h), which the paper cannot explain.

    Args:
        stages: per letter the rank correlation of a value with its key's position.
    """
    if not {"f", "g"} <= {*stages}:
        return "undefined"
    if any(isnan(stages[letter][0]) for letter in "fgh" if letter in stages):
        return "no order"
    prefer = {letter: preferred_keys(stages[letter]) for letter in "fgh" if letter in stages}
    if {prefer["f"], prefer["g"]} != {"near", "far"}:
        return "kept"
    return "restored" if prefer.get("h") == prefer["f"] else "inverted"
