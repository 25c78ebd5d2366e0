"""`circuit`: one block stage by stage, from its input to the next block's scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from annotated_types import Interval

from nope_probe.figures.words import MEASURES, View, column_text, columns, interval_of
from nope_probe.models.info import ModelInfo
from nope_probe.reports.page import Headline, Report, Section, captions, how_to_read, sections
from nope_probe.run.flags import COUNT, SEQ_LEN, Mistakes
from nope_probe.stages import STAGE_WORDS, Letter
from nope_probe.studies.conditions import RemovingSettings

if TYPE_CHECKING:
    import numpy as np

    from nope_probe.figures.stages import MapKind
    from nope_probe.run.folder import Run

SAID = captions("circuit")
SHOWN = ("locality", "monotonicity")
COLUMNS = {**MEASURES, **columns("circuit")}
VIEWS = (
    View(
        table="stages",
        title="Which keys each stage prefers",
        y=SHOWN,
        x="stage",
        by=("model",),
        caption=SAID["prefers"],
    ),
)
KINDS: dict[MapKind, str] = {  # of the maps: the section
    "raw": "The block, stage by stage",
    "cosines": "Stage by stage, as cosines",
    "less diagonal means": "Stage by stage, less the diagonals' means",
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
    layer: Annotated[int, Interval(ge=0, le=999)] = 0
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
        yield from super().mistakes_of(info)

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
        how_to_read=[*how_to_read("circuit"), *(MEASURES[name].note for name in SHOWN)],
    )


def _maps(run: Run) -> Iterator[Section]:
    """Yield the stages' maps, as each kind of map shows them."""
    from nope_probe.figures.stages import circuit

    maps: dict[str, dict[str, np.ndarray]] = {}
    for name, cells in run.maps.items():
        of, _, letter = name.partition("/")
        maps.setdefault(of, {})[letter] = cells
    results, queries = run.manifest.results, run.query_positions
    for kind, title in KINDS.items():
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
            yield Section(title=title, caption=SAID[kind], figure=figure, folded=kind != "raw")


def headline(run: Run) -> Headline:
    """Return the keys that the stages before and after the MLP prefer, and those of all stages.

    Args:
        run: its table `stages`.
    """
    results, stages = run.manifest.results, run.tables["stages"]
    texts = stages.assign(prefers=[preference(row) for row in stages.to_dict("records")])
    table = texts.pivot(index="stage", columns="model", values="prefers")
    table = table.reindex([*STAGE_WORDS], columns=stages["model"].unique())
    *_, model = table  # the ablated one, if there is one
    for letter, why in results["absent"].items():
        table.loc[letter, model] = f"none: {why}"
    first: Letter = "b" if "f" in results["absent"] else "f"
    before, after = table[model][first], table[model]["g"]
    of = {"layer": results["layer"], "first": f"{STAGE_WORDS[first].name} ({first})"}
    sentence = SAID["first"].format(before=before, after=after, **of)
    names = [f"({x}) {words.name}, {words.formula}" for x, words in STAGE_WORDS.items()]
    table = table.fillna("").rename(columns="{} prefers".format)
    table.insert(0, "stage", names)
    return Headline(sentence=sentence, table=table, caption=SAID["stages"])


def preference(row: Mapping[Any, Any]) -> str:
    """Return the keys that have larger values at a stage, with the number that shows it."""
    text = column_text(row, "locality", COLUMNS["locality"], "±+.2f")
    _, low, high = interval_of(row, "locality")
    keys = "near" if low > 0 else "far" if high < 0 else "neither"
    return f"{keys} ({text})" if text else "no order"
