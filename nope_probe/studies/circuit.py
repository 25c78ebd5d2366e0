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
from nope_probe.stages import STAGE_WORDS
from nope_probe.studies.removing import RemovingSettings
from nope_probe.studies.tidy import KEYS, preferred_keys, sections

if TYPE_CHECKING:
    import numpy as np

    from nope_probe.figures.stages import MapKind
    from nope_probe.run.folder import Run

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
KINDS: dict[MapKind, tuple[str, str]] = {  # of the maps: the section, and how to read it
    "raw": (
        "The block, stage by stage",
        "Arrows name what leads to a stage; what is removed is struck through. A map of the "
        "intact model has the ablated one next to it, on the same colours, and their difference.",
    ),
    "cosines": (
        "Stage by stage, as cosines",
        "Inner products over the lengths of both vectors: large norms at single positions do not "
        "look like structure.",
    ),
    "less diagonal means": (
        "Stage by stage, less the diagonals' means",
        "What is left is no function of the distance between two positions alone.",
    ),
}
INVERSIONS = {  # what becomes of the order from (f) over (g) to (h)
    "undefined": "It has no stage (f) between attention and MLP, so no inversion is defined.",
    "no order": "Its stages (f), (g) or (h) have no order of positions to compare.",
    "kept": "Its {what} does not invert the order, from LN(O) (f) to the block's output (g).",
    "inverted": "Its {what} inverts the order, from LN(O) (f) to the block's output (g).",
    "restored": "Its {what} inverts the order, from LN(O) (f) to the block's output (g), and the "
    "next LN (h) restores it.",
}


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
        """Yield whether the block or a head does not exist, or the block does not attend."""
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
        yield from self.wrong_heads(info)

    @property
    def depth(self) -> int:
        """How many first layers to load: up to the one after the block under study."""
        return self.layer + 2


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
    """Yield the stages' maps, as each kind of map shows them."""
    from nope_probe.figures.stages import circuit

    maps: dict[str, dict[str, np.ndarray]] = {}
    for name, cells in run.maps.items():
        of, _, letter = name.partition("/")
        maps.setdefault(of, {})[letter] = cells
    results, queries = run.manifest.results, run.query_positions
    for kind, (title, caption) in KINDS.items():
        is_normalised = kind == "less diagonal means"
        figure = partial(
            circuit,
            maps["normalised" if is_normalised else "gram"],
            layer=results["layer"],
            removed=run.manifest.removed or (),
            reference=None if is_normalised else maps.get("reference"),
            kind=kind,
            components=results["components"],
            query_positions=queries,
            skip_keys=run.manifest.skip_keys,
        )
        if kind != "cosines" or queries is None:
            yield Section(title=title, caption=caption, figure=figure, folded=kind != "raw")


def headline(run: Run) -> Headline:
    """Return the keys that the scores and each stage prefer, and whether the MLP inverts it.

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
    cells = {"stage": [f"({x}) {STAGE_WORDS[x].name}, {STAGE_WORDS[x].formula}" for x in shown]}
    for name, stages in models.items():
        heading = f"{name}: prefers" if len(models) > 1 else "prefers"
        cells[heading] = [_preference(stages.get(letter)) for letter in shown]
    reasons = dict.fromkeys(absent.values())
    missing = "".join(
        f" No {listed([f'({x})' for x in absent if absent[x] == why])}: {why}." for why in reasons
    )
    of_scores = f"In {where} the scores (b) prefer {KEYS[preferred_keys(shown['b'])]}."
    if "i" in shown:
        of_scores += f" The next block's (i) prefer {KEYS[preferred_keys(shown['i'])]}."
    what = "residual sum" if "mlp" in removed else "MLP"
    return Headline(
        sentence=f"{of_scores} {INVERSIONS[inversion(shown)].format(what=what)}",
        table=pd.DataFrame(cells),
        caption="The number is the rank correlation of a score, or of the inner product of two "
        "positions' vectors, with its key's position. Above 0, near keys have larger values; below "
        f"0, far keys.{missing}",
    )


def _preference(locality: ValueAndBounds | None) -> str:
    """Return the keys that have larger values at a stage, with the number that shows it."""
    if locality is None or isnan(locality[0]):
        return ""
    return f"{preferred_keys(locality)} ({locality[0]:+.2f})"


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
