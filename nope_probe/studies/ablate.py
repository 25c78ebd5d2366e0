"""The `ablate` command: its flags, its numbers, and how a run is shown.

The verdict counts layers, each number stands at the layer where it is largest; figures and tables
are of all layers. A run of `--remove none` shows the intact model: its maps and its heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from nope_probe.figures.words import (
    ATTENTION,
    HEAD_MEASURES,
    INFORMATION,
    MEASURES,
    NUMBERS,
    View,
    columns,
)
from nope_probe.hooks.removing.settings import REPLACEMENTS, Replacement
from nope_probe.removal import INTACT, WRITTEN, Condition
from nope_probe.reports.page import Report, Section, captions, how_to_read, sections
from nope_probe.studies.conditions import NAMES, RemovingSettings, parse_removed

if TYPE_CHECKING:
    from nope_probe.run.folder import Run

SAID = captions("ablate")
MOST_LINES = 5  # of a figure, before its button is used
WORDS = ("none", "sources")  # of --remove, that name no condition
# Position that blocks write; constant queries, keys, both, and output.
DEFAULT_REMOVED = ("written", "w_q", "w_k", "w_q+w_k", "w_o")
SHUFFLED = {"intact": "shuffled", "mask": "mask+shuffled"}  # conditions run on shuffled tokens too


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights. Per layer it reports, in
    nats, the first key's lead without each, and how much of the order of the other keys is there.
    With the default settings, the shipped model takes about 10 seconds on two cores.

    Attributes:
        replacement: What a removed weight is replaced by; several are shown side by side.
        per_head: Also measure each head without each source; with --remove none keep each head's
            map, and measure its attention.
    """

    command = "ablate"
    function = "run_ablations"
    examples = (
        "--model rope-tiny",
        "--model llama-3.1-8b --layers 4 --seq-len 256 --data fineweb-edu",
    )

    remove: Annotated[
        tuple[str, ...] | None,
        tyro.conf.arg(
            help=f"What to remove besides the sources, one at a time: {NAMES}; `sources` for the "
            "sources alone; `none` to map the intact model alone. By default "
            f"{' '.join(DEFAULT_REMOVED)}."
        ),
    ] = None
    replacement: tuple[Replacement, ...] = ("mean",)  # type: ignore[assignment]
    per_head: bool = False

    @property
    def named(self) -> Sequence[Condition]:
        """What is removed by name besides the sources, one condition at a time."""
        return [parse_removed(name) for name in self.remove or () if name not in WORDS]


COLUMNS = {**MEASURES, **ATTENTION, **INFORMATION, **columns("ablate")}
THREE_NUMBERS = View(
    table="pattern",
    title="The three numbers in every layer",
    y=tuple(NUMBERS),
    by=("removed", "replacement"),
    kind="lines",
    across=1,
    button="weights",
    caption=SAID["numbers"],
)
SHAPE = View(
    table="pattern",
    title="Measures of the pattern's shape",
    y=(*MEASURES, "mask_adds"),
    caption=SAID["shape"],
)
BY_DISTANCE = View(
    table="offsets",
    title="Scores by distance",
    y=("mean",),
    x="offset",
    by=("term",),
    panels="layer",
    across=4,
    kind="curves",
    names={"score": "scores", "pattern": "positional pattern"},
    caption=SAID["by_distance"],
)
HEADS = tuple(
    View(
        table="head_pattern",
        title=f"Heads: {COLUMNS[name].label}",
        y=(name,),
        x="head",
        by=("layer",),
        kind="cells",
        folded=True,
        caption=COLUMNS[name].meaning,
    )
    for name in (*HEAD_MEASURES, *ATTENTION)
)


def report(run: Run) -> Report:
    """Return a run's report.

    Args:
        run: its tables, and maps [n_layers, query_pos, key_pos] in nats; tables that a run lacks
            may be missing or empty.
    """
    from nope_probe.studies.ablate_page import headline

    manifest, reading = run.manifest, how_to_read("scores")
    for by in manifest.results.get("replacements", ()):
        reading.append(SAID["replaced"].format(by=by, meaning=REPLACEMENTS[by]))
    removes = bool(manifest.results.get("positional_sources"))
    return Report(
        title=SAID["sources" if removes else "attention"].format(model=manifest.model_name),
        headline=headline(run),
        sections=[*(removal_sections if removes else intact_sections)(run)],
        how_to_read=reading,
    )


def intact_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of a run that removes nothing."""
    from nope_probe.studies import ablate_page as page

    yield page.pattern_section(run)
    yield page.score_section(run)
    if page.PER_HEAD in run.maps:
        yield page.head_map_section(run)
    yield from sections([BY_DISTANCE, SHAPE, *HEADS], run.tables, COLUMNS)


def removal_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of a run that removes components; the first two are open."""
    from nope_probe.studies import ablate_page as page

    tables, results = run.tables, run.manifest.results
    sources, conditions = results["positional_sources"], results["conditions"]
    controls = [name for name in tables["pattern"]["removed"].unique() if name not in conditions]
    of_sources = [*dict.fromkeys([INTACT.name, *sources, Condition(sources).name])]
    first = [*of_sources, WRITTEN.name][:MOST_LINES]
    views = [
        replace(THREE_NUMBERS, rows=f"removed in {conditions}", later=f"removed not in {first}"),
        replace(SHAPE, rows=f"removed in {of_sources}"),
    ]
    if controls:
        rows = f"removed in {[*SHUFFLED, WRITTEN.name, *controls]}"
        title = "Controls: shuffled tokens, null of written position"
        views.append(replace(SHAPE, title=title, caption=SAID["controls"], rows=rows))
    three_numbers, *others = sections([*views, BY_DISTANCE], tables, COLUMNS)
    yield page.pattern_section(run)
    yield page.with_marked_layer(three_numbers, run)
    heads = [page.head_section] if "head_pattern" in tables else []
    parts = [of(run) for of in (page.condition_section, page.maker_section, *heads)]
    for section in (*parts, *others, page.score_section(run)):
        yield replace(section, folded=True)
