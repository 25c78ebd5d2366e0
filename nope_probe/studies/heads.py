"""`heads`: what the heads do that a measure ranks first or last, by removing a part of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from nope_probe.errors import UserError
from nope_probe.figures.names import words
from nope_probe.figures.words import View, bound_columns, columns, heading, reader_of, with_readers
from nope_probe.removal import REMOVABLE, Condition
from nope_probe.reports.page import Headline, Report, captions, how_to_read, sections
from nope_probe.run.flags import COUNT, LARGEST, Mistakes, without_effect
from nope_probe.run.settings import Layers, RunSettings

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.models.info import ModelInfo
    from nope_probe.run.folder import Run

ORDERS: Mapping[str, str] = {  # and their names in a sentence
    "need": "need",
    "others": "position among the other keys",
    "positional": "position among all keys",
    "induction": "induction",
}
Removed = Literal["rope", "content", "mask"]
ENDS = {False: ("first", 0), True: ("last", -1)}  # of an order, whose heads are removed
COUNTS = (1, 5, 20)  # of the first heads; those that a small model lacks are left out
SHORTEST = 17  # tokens, so that a segment of 8 tokens fits twice behind BOS
SAID = captions("heads")
MEASURES = columns("costs")
COLUMNS = {**MEASURES, **columns("heads")}
VIEWS = (
    View(
        table="tests",
        title="What the heads cost",
        y=(("cost", "chance"),),
        x="k",
        by=("removed", "order"),
        panels="measure",
        kind="curves",
        across=2,
        scale="log",
        caption=SAID["costs"],
    ),
    View(
        table="single",
        title="Every head alone",
        y=("cost",),
        x="head",
        by=("layer",),
        panels="removed",
        kind="cells",
        rows="measure == 'copy_random'",
        caption=SAID["single"],
    ),
    View(
        table="order",
        title="The orders",
        caption=SAID["orders"],
    ),
)


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Test what the heads that a measure ranks first or last do, by removing a part of them.

    Orders all heads by a measure of their attention, removes RoPE, content or the mask from the
    first k, and reports what it costs on text, on second copies and in induction heads, next to
    as many other heads drawn from the same layers, or for k = 1 next to other single heads.
    With --least it is the last k, next to as many heads drawn from all.

    Attributes:
        by: Orders, highest first: need (how much a head's attention changes without what is
            removed), others and positional (the share of position among the other keys, and of
            all keys), induction; or a CSV file with the columns layer and head, in the order of
            the file.
        least: Remove from the last heads of an order, and draw among all heads: the heads of more
            draws include those of fewer.
        remove: What to remove from the first heads, one at a time [rope, or of a model without it
            the mask].
        k: In how many of the first heads, one number at a time.
        draws: How often as many other heads are drawn, for comparison; for k = 1, one more single
            heads of any layer.
        singles: For k = 1, compare with every other head alone, and map all heads: as many passes
            as heads.
        n_seqs: Sequences that costs are measured on.
        mean_seqs: Other sequences, on which heads are ordered (by need, on as many as n_seqs), and
            whose mean attention removed content leaves.
        layers: Which layers' heads to order, as in `ablate`; all layers are run.
    """

    command = "heads"
    function = "run_heads"
    examples = (
        "--model rope-tiny --k 1 4",
        "--model smollm2-135m --remove rope --k 1 5 --n-seqs 32 --seq-len 128",
    )

    by: tuple[str, ...] = ("need",)
    least: bool = False
    remove: tuple[Removed, ...] | None = None
    k: tuple[Annotated[int, COUNT], ...] = COUNTS
    draws: Annotated[int, Interval(ge=2, le=LARGEST)] = 19
    singles: bool = False
    n_seqs: Annotated[int, COUNT] = 8
    mean_seqs: Annotated[int, Interval(ge=8, le=LARGEST)] = 384
    layers: Layers = "all"

    runs_all_layers = True
    in_one_process = True

    @property
    def named(self) -> Sequence[Condition]:
        """What is removed by name, one condition at a time."""
        return [*map(Condition.parse, self.remove or ())]

    def removed_of(self, has: Collection[str]) -> tuple[str, ...]:
        """Return what is removed from a model that has some components."""
        return ("rope" if "rope" in has else "mask",) if self.remove is None else self.remove

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        yield not self.reads_text, "heads are tested on text, with a language model"
        yield from super().mistakes()
        removed = self.removed_of(REMOVABLE)
        names = [*map(name_of, self.by)]
        for flag, values in (("by", names), ("remove", removed), ("k", self.k)):
            are_different = len({*values}) == len(values) > 0
            yield not are_different, f"expected one or more different values of --{flag}"
        for order in self.by:
            is_known = is_file(order) or order in ORDERS
            yield not is_known, f"--by {order}: expected {', '.join(ORDERS)}, or a CSV file"
            is_missing = is_file(order) and not Path(order).is_file()
            yield is_missing, f"--by {order}: there is no such file"
        yield (
            "need" in self.by and (len(removed) > 1 or "content" in removed),
            "--by need is of --remove rope or --remove mask: take --by others",
        )
        yield self.seq_len < SHORTEST, f"copies need {self.length_of(SHORTEST)} or more"
        if 1 not in self.k:
            yield from without_effect(self, ["singles"], "without --k 1")

    def mistakes_of(self, info: ModelInfo) -> Mistakes:
        """Yield what can be wrong with the layers; refuse more heads than there are.

        Raises:
            UserError: for a number of heads next to which there are fewer others.
        """
        yield from super().mistakes_of(info)
        self.counts_of(len(self.layers_with_maps(info)) * info.n_heads)

    def counts_of(self, n_heads: int) -> list[int]:
        """Return the numbers of first heads in ascending order, of a model with n heads.

        Raises:
            UserError: for a number of heads next to which there are fewer others.
        """
        most = n_heads - 1 if self.least else n_heads // 2
        counts = [k for k in sorted(self.k) if self.k != COUNTS or k <= most]
        if not counts or max(counts) > most:
            why = "" if self.least else ", and chance takes as many others"
            raise UserError(
                f"--k {max(counts, default=1)}: there are {n_heads} heads{why}: take up to {most}"
            )
        return counts


def is_file(order: str) -> bool:
    """Return whether an order is a file of the user's, and no measure."""
    return order.endswith(".csv")


def name_of(order: str) -> str:
    """Return the name of an order in tables: a file's without its folder and ending."""
    return Path(order).stem if is_file(order) else order


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: the tables `cost`, `order`, `tests` and, with k = 1, `single`.
    """
    tables, removed = dict(run.tables), run.manifest.removed or ()
    n_rows = len(removed) * len(MEASURES) * run.manifest.results["n_heads"]
    if len(tables.get("single", ())) < n_rows:
        tables.pop("single", None)  # a map has every head
    return Report(
        title=f"What the heads of {run.manifest.model_name} do, by removing a part of them",
        headline=headline(run),
        sections=[*sections(VIEWS, tables, COLUMNS)],
        how_to_read=how_to_read("heads"),
    )


def headline(run: Run) -> Headline:
    """Return the cost that is furthest from other heads' mean cost, and the costs of all."""
    best = furthest(run.tables["tests"], is_least=run.manifest.settings["least"])
    row, measure = row_of(run, best), MEASURES[str(best["measure"])].label
    cost, others = cell_of(best).split("\n")
    sentence = SAID["first"].format(row=row, measure=measure, cost=cost, others=others)
    return Headline(sentence=sentence, table=as_text(run), caption=SAID["numbers"])


def furthest(tests: pd.DataFrame, *, is_least: bool) -> pd.Series:
    """Return the row of `tests` whose cost is furthest from other heads' mean cost.

    What is beyond all other heads comes first, and loss before induction; of the last heads, text.
    """
    losses = ["text"] if is_least else [name for name in MEASURES if name != "induction"]
    far = (tests["cost"] - tests["chance"]).abs().where(tests["measure"].isin(losses), 0.0)
    ranked = tests.assign(far=far, counts=tests["beyond"] & (far > 0))
    return ranked.sort_values(["counts", "far"]).iloc[-1]


def row_of(run: Run, test: Mapping[Any, Any] | pd.Series) -> str:
    """Return what a row of `tests` removes, and from which heads."""
    order, (end, place) = test["order"], ENDS[run.manifest.settings["least"]]
    head = reader_of(run.tables["order"].query("order == @order").iloc[place])
    row = SAID["single_head" if test["k"] == 1 else "several_heads"]
    by, removed = ORDERS.get(order, order), words(test["removed"])
    return row.format(removed=removed, head=head, end=end, k=test["k"], by=by)


def cell_of(test: Mapping[Any, Any] | pd.Series) -> str:
    """Return the cost of a row of `tests`, marked where beyond all others, and their range."""
    cost = f"{test['cost']:+z.2f}{'*' * bool(test['beyond'])}"
    return f"{cost}\n{test['chance_low']:z.2f} to {test['chance_high']:z.2f}"


def as_text(run: Run) -> pd.DataFrame:
    """Return the costs of every removal, order and k, as text."""
    import pandas as pd

    cells: dict[str, dict[str, str]] = {}
    for test in run.tables["tests"].to_dict("records"):
        measure = heading(MEASURES[test["measure"]].label)
        cells.setdefault(row_of(run, test), {})[measure] = cell_of(test)
    return pd.DataFrame.from_dict(cells, orient="index").rename_axis("without").reset_index()


def against_chance(costs: pd.DataFrame, single: pd.DataFrame) -> pd.DataFrame:
    """Compare what an order's first heads cost with other heads.

    The others are the draws, each set of heads once, or for k = 1 other single heads.

    Args:
        costs: the rows of the orders' first heads, and those of the draws.
        single: the rows of single heads, if k = 1 was run.

    Returns:
        removed, order, k, measure, cost with its bounds; chance (the others' mean) with the others'
        lowest and highest cost; the cost's rank among `of` costs, 1 being the highest; and
        whether it is beyond all others with its 95% interval.
    """
    import pandas as pd

    rows = list[dict[str, object]]()
    names = ["removed", "order", "k", "measure"]
    for keys, group in costs.groupby(names, sort=False):
        first = group[group["draw"].isna()].iloc[0]
        if first["k"] == 1:
            same = single["removed"].eq(first["removed"]) & single["measure"].eq(first["measure"])
            group = with_readers(single[same]).rename(columns={"reader": "heads"})
        others = group.drop_duplicates("heads")
        chance = others.loc[others["heads"] != first["heads"], "cost"].to_numpy(float)
        low, high = chance.min(), chance.max()
        rows.append(
            {
                **dict(zip(names, keys, strict=True)),
                **{name: float(first[name]) for name in ("cost", *bound_columns("cost"))},
                **{"chance": chance.mean(), "chance_low": low, "chance_high": high},
                **{"rank": 1 + int((chance > first["cost"]).sum()), "of": 1 + len(chance)},
                "beyond": bool(first["cost_low"] > high or first["cost_high"] < low),
            }
        )
    return pd.DataFrame(rows)
