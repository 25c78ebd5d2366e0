"""`behaviour`: what a model can no longer do without its mask, position encoding or weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import tyro
from annotated_types import Interval

from nope_probe.figures.names import brief, row_name
from nope_probe.figures.words import HALF_WIDTH, View, column_text, columns, heading
from nope_probe.hooks.removing.settings import Ablation, Replacement
from nope_probe.models.names import trained_length
from nope_probe.removal import (
    COMPONENTS,
    INTACT,
    POSITION_ENCODINGS,
    UNION,
    WRITTEN,
    Condition,
    spelled,
)
from nope_probe.reports.page import MOST_ROWS, Headline, Report, captions, how_to_read, sections
from nope_probe.run.flags import COUNT, LARGEST, SEQ_LEN, Mistakes, without_effect
from nope_probe.run.settings import Layers
from nope_probe.studies.conditions import NAMES, RemovingSettings, parse_removed

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.run.folder import Run

Measure = Literal["loss", "in-context", "copy", "order", "bos", "extrapolation", "position"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
READ_BY = {"extrapolation": ("trained_len", "max_len"), "position": ("layers", "skip_keys")}
EXTRAPOLATED = Interval(ge=16, le=2**20)
TIMES = 4  # the reach of extrapolation, in trained contexts
GROUPS = {  # the names of groups of removals; those that the model has are measured
    "position": (
        *POSITION_ENCODINGS,
        "written",
        *(f"{name}+written" for name in POSITION_ENCODINGS),
        "mask",
    ),
    "sources": (*POSITION_ENCODINGS, "mask", *(f"mask+{name}" for name in POSITION_ENCODINGS)),
    "weights": ("w_q", "w_k", "qk", "w_o", "ov", "mlp"),
}
SAID = captions("behaviour")


class Quantity(NamedTuple):
    """How a number of `behaviour.csv` is measured; `WORDS` says what it is.

    Attributes:
        measure: the measure that it belongs to.
        of: a probe and a part of its windows (see `parts_of`), whose mean loss it is; empty for
            what is no loss.
        less: a probe and a part whose mean loss is taken off, if there is one.
        unmasked: why it means nothing without the mask; empty if it does.
    """

    measure: Measure
    of: tuple[str, str] | tuple[()] = ()
    less: tuple[str, str] | tuple[()] = ()
    unmasked: str = ""


COPIES = {  # the second copy, less the first
    kind: ((f"copy_{kind}", "second_copy"), (f"copy_{kind}", "first_copy"))
    for kind in ("text", "random")
}
QUANTITIES = {
    "loss": Quantity("loss", ("text", "all"), (), SAID["in_sight"]),
    "loss_suffix": Quantity("loss", ("text", "suffix")),
    "in_context": Quantity("in-context", ("text", "early"), ("text", "late"), SAID["in_sight"]),
    "copy_text": Quantity("copy", *COPIES["text"], SAID["first_in_sight"]),
    "copy_text_second": Quantity("copy", COPIES["text"][0]),
    "copy_random": Quantity("copy", *COPIES["random"], SAID["first_in_sight"]),
    "copy_random_second": Quantity("copy", COPIES["random"][0]),
    "order": Quantity("order", ("order", "suffix"), ("text", "suffix")),
    "without_bos": Quantity("bos", ("without_bos", "all"), ("text", "after_bos")),
    "other_first": Quantity("bos", ("other_first", "after_bos"), ("text", "after_bos")),
    "extrapolation": Quantity("extrapolation", ("long", "beyond"), ("long", "trained")),
    "position": Quantity("position"),
}
WORDS = columns("quantities")
# Measures of the figure and of the first table, the most telling first.
LEADING = ("loss_suffix", "copy_text_second", "position", "order", "without_bos", "loss")
SHOWN = 3  # columns of the first table, next to the conditions
HEADINGS = {"loss": "cost"}  # of measures with another label in figures
COLUMNS = columns("behaviour")
BY_POSITION = View(
    table="loss_by_position",
    title="Loss by position",
    y=("loss",),
    x="position",
    by=("removed", "replacement"),
    kind="curves",
    caption=SAID["by_position"],
)
VIEWS = (
    View(
        table="behaviour",
        title="What each removal changes",
        y=("difference",),
        x="removed",
        by=("removed", "replacement"),
        panels="measure",
        kind="rows",
        rows=f"measure in {LEADING} and difference == difference",
        same_scale=True,
        caption=SAID["changes"],
    ),
    BY_POSITION,
    replace(
        BY_POSITION,
        table="extrapolation",
        title="Loss by position, beyond the trained context",
        folded=True,
        caption=SAID["beyond"],
    ),
    View(
        table="decodability",
        title="How well position can be read",
        y=(("distance", "untrained"),),
        by=("removed", "replacement"),
        folded=True,
        caption=SAID["decoded"],
    ),
)


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Find what a model can no longer do without its mask, RoPE or weights.

    Runs the model with and without them, and reports losses by position, what context, order, BOS
    and copies are worth, how it extrapolates and whether position can be read from its residual
    stream: in nats or positions, with the difference to the intact model and intervals.

    Attributes:
        measures: What to measure.
        prefix: Without the mask, this many first tokens see each other, and only those after them
            are scored [half of --seq-len].
        replacement: What a removed weight becomes; several are measured side by side.
        trained_len: Tokens that the model was trained at [as recorded, else its context]; it is
            extrapolated to 4 times as many.
        max_len: Most tokens in a window of the extrapolation.
        layers: In which layers to read position, as in `ablate`; all layers are run.
    """

    command = "behaviour"
    function = "run_behaviour"
    examples = (
        "--model nope-tiny",
        "--model rope-tiny --remove mask rope --measures loss copy",
    )

    measures: tuple[Measure, ...] = MEASURES
    remove: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help=f"The conditions: {NAMES}; or a group, if the model has it: "
            "`position` (rope written rope+written mask), the default; `sources` (rope mask "
            "mask+rope); `weights` (w_q w_k qk w_o ov mlp)."
        ),
    ] = ("position",)
    prefix: Annotated[int | None, Interval(ge=4, le=LARGEST)] = None
    replacement: tuple[Replacement, ...] = ("mean",)  # type: ignore[assignment]
    trained_len: Annotated[int | None, EXTRAPOLATED] = None
    max_len: Annotated[int, EXTRAPOLATED] = 4096
    layers: Layers = "all"
    n_seqs: Annotated[int, COUNT] = 128
    seq_len: Annotated[int, SEQ_LEN] = 128

    runs_all_layers = True
    removes = True  # the model is compared with the intact model, whatever is named

    @property
    def prefix_len(self) -> int:
        """How many first tokens see each other where the mask is removed."""
        return self.seq_len // 2 if self.prefix is None else self.prefix

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        yield not self.reads_text, SAID["on_text"]
        yield from super().mistakes()
        n, prefix = self.seq_len, self.prefix_len
        yield not self.measures, "--measures needs a value"
        prefixes = f"expected a --prefix from 4 to {n - 4} of {n} tokens, got {prefix}"
        yield not 4 <= prefix <= n - 4, prefixes
        for measure, settings in READ_BY.items():
            if measure not in self.measures:
                yield from without_effect(self, settings, f"without the measure {measure}")

    @property
    def groups(self) -> list[str]:
        """The groups of removals that are named, in the order of the tables."""
        return [group for group in GROUPS if group in map(spelled, self.remove)]

    @property
    def named(self) -> Sequence[Condition]:
        """What is removed by name and not by that of a group, one condition at a time."""
        return [parse_removed(name) for name in map(spelled, self.remove) if name not in GROUPS]

    def wrong_removals(self) -> Mistakes:
        """Yield what can be wrong with what is removed, where it is named: a model has groups."""
        if not self.groups:
            yield from self.wrong_ablations(make_conditions(COMPONENTS, self))

    def wrong_ablations(self, conditions: Mapping[str, Ablation]) -> Mistakes:
        """Yield for flags of weights and of the mask whether they have no condition to act on."""
        removed = [ablation.condition for ablation in conditions.values()]
        yield from self.wrong_conditions(removed)
        scores_suffix = {"order", "loss"} & {*self.measures}  # of every condition
        if not (scores_suffix or any("mask" in condition for condition in removed)):
            yield from without_effect(self, ["prefix"], "where the mask is not removed")

    @property
    def positions(self) -> int | None:
        """A shipped model takes as many positions as the extrapolation does."""
        trained, needed = trained_length(self.model), super().positions
        return needed if trained is None else max(self.lengths(trained)[1], needed or 0)

    def lengths(self, n_ctx: int) -> tuple[int, int]:
        """Return the length that the model was trained at, and that of the extrapolation's windows.

        The first is as set, as recorded, or the model's context.
        """
        trained = self.trained_len or trained_length(self.model) or n_ctx
        return trained, min(TIMES * trained, self.max_len)


def make_conditions(
    has: Collection[str], settings: Settings, left_out: Collection[str] = ()
) -> dict[str, Ablation]:
    """Return the conditions' removals by name; the intact model first.

    With several replacements, a condition that removes weights has an entry for each, with a name
    such as `w_q:mean`.

    Args:
        has: the components that the model has.
        settings: name what is removed; the name of a group means its removals that the model has.
        left_out: components that are removed only where they are named, not with a group.

    Raises:
        UserError: for a name that does not exist.
    """
    single, ablations = settings.named, settings.ablations
    of_groups = [parse_removed(name) for group in settings.groups for name in GROUPS[group]]
    of_blocks = WRITTEN if settings.heads_by_layer is None else INTACT
    removable, conditions = {*of_blocks, *has} - {*left_out}, {INTACT.name: ablations[0]}
    named = dict.fromkeys([*(c for c in of_groups if c <= removable), *single])
    for condition in dict.fromkeys(x for of in named for x in (of, of.null)):
        several = len(ablations) > 1 and bool(condition.weights)
        for by in ablations if several else ablations[:1]:
            name = f"{condition.name}:{by.replacement}" if several else condition.name
            conditions[name] = by.without(condition)
    return conditions


def report(run: Run) -> Report:
    """Return a run's report.

    Args:
        run: tables `behaviour`, `loss_by_position`, `extrapolation`, `decodability`,
            where those of measures that were not taken are empty.
    """
    behaviour, results = run.tables["behaviour"], run.manifest.results
    marks = {"extrapolation": {"trained context": results["trained_len"]}}
    known = [about for name, about in WORDS.items() if name in {*behaviour["measure"]}]
    return Report(
        title=f"What {run.manifest.model_name} can do without its mask, RoPE or weights",
        headline=headline(run),
        sections=[
            *sections(VIEWS[:1], run.tables, {**COLUMNS, **WORDS}),
            *sections(VIEWS[1:], run.tables, COLUMNS, marks),
        ],
        how_to_read=(
            *how_to_read("behaviour", prefix=results["prefix"]),
            *(about.note for about in known),
        ),
    )


def headline(run: Run) -> Headline:
    """Return the largest change of the first measure, and a table of it and two more."""
    name, rows = run.manifest.model_name, less_nulls(run.tables["behaviour"])
    known, chance = rows.dropna(subset=["difference"]), run.tables["decodability"]["chance"].max()
    order = dict.fromkeys(("loss", *LEADING, *QUANTITIES))
    measures = [measure for measure in order if measure in {*known["measure"]}][:SHOWN]
    if not measures:
        return Headline(sentence=SAID["unmeasured"].format(model=name))
    most, about = largest_change(known[known["measure"] == measures[0]]), WORDS[measures[0]]
    change = column_text(most, "difference", about, HALF_WIDTH)
    row = row_name(most["removed"], most["replacement"])
    sentence = SAID["first"].format(model=name, about=about, change=change, row=row)
    table = as_text(rows, measures, float(chance))
    return Headline(sentence=sentence, table=table, caption=SAID["numbers"])


def largest_change(changes: pd.DataFrame) -> pd.Series:
    """Return the row of a measure's largest change: of a single removal if there is one."""
    single = changes[~changes["removed"].str.contains(UNION, regex=False)]
    return (single if len(single) else changes).sort_values("difference", key=abs).iloc[-1]


def less_nulls(behaviour: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without nulls; of written position alone, a difference is to its null.

    The null of a union lacks all else that the union removes, so that it says nothing of that.
    """
    conditions = map(Condition.parse, behaviour["removed"].unique())
    nulls = [of.null.name for of in conditions if of.null != of]
    rows = behaviour[~behaviour["removed"].isin(nulls)]
    alone = rows["removed"].eq(WRITTEN.name) & rows["beyond_null"].notna()
    for end in ("", "_low", "_high"):
        difference = rows[f"difference{end}"].mask(alone, rows[f"beyond_null{end}"])
        rows = rows.assign(**{f"difference{end}": difference})
    return rows


def as_text(behaviour: pd.DataFrame, measures: Sequence[str], chance: float) -> pd.DataFrame:
    """Return a row per condition: the intact model's values, the others' differences to them."""
    texts = brief(behaviour, "removed", ["difference"], WORDS, by="measure", style=HALF_WIDTH)
    intact = behaviour[behaviour["removed"] == INTACT.name].set_index("measure")["value"].dropna()
    headings = {"removed": "nats ±95%"}
    for name in measures:
        about = WORDS[name]
        headings[about.title] = heading(HEADINGS.get(name, about.label))
        texts.loc[0, about.title] = f"0 of {intact[name]:z.2f}" if name in intact else ""
    if "position" in measures:
        headings[WORDS["position"].title] += f"\n(chance {chance:.1f})"
    return texts[[*headings]].rename(columns=headings)[:MOST_ROWS]
