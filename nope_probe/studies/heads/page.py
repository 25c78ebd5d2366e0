"""The report of a run of `heads`: what the first heads of an order do, against chance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import pandas as pd

from nope_probe.figures.heads import cost_by_k, single_costs
from nope_probe.figures.names import phrase
from nope_probe.figures.words import listed
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section
from nope_probe.run.folder import Run
from nope_probe.studies.page import Report

OF_MEASURES = {
    "text": "text",
    "copy_random": "a second copy of random tokens",
    "copy_text": "a second copy of text",
    "induction": "the induction heads' attention",
}


LOSSES = ("text", "copy_random", "copy_text")
NO_ORDER = "No order differs from chance: its first heads cost as much as heads of the same layers."


@dataclass(frozen=True, kw_only=True)
class HeadsTested:
    """What a run says of its heads.

    Attributes:
        n_heads: how many heads were ordered.
        induction_heads: the strongest in the intact model, whose attention is a measure.
        intact: the measures of the intact model: losses in nats, and a share of attention.
        cost_of_means: what the most heads without content cost on other texts, and on texts of
            their means, nats; empty where content is not removed.
    """

    n_heads: int
    induction_heads: tuple[str, ...] = ()
    intact: Mapping[str, float] = field(default_factory=dict)
    cost_of_means: tuple[float, ...] = ()


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: the tables `cost`, `order`, `tests` and, if wanted, `single`.
    """
    removed = listed([phrase(part) for part in run.manifest.removed or ()])
    return Report(
        title=f"What the heads of {run.manifest.model_name} do, by removing {removed}",
        headline=headline(run),
        sections=[*_sections(run)],
        how_to_read=[*notes.how_to_read("heads"), *_means_note(run)],
    )


def headline(run: Run) -> Headline:
    """Return what the first heads of an order carry, and the costs of all orders."""
    tests, n_heads = run.tables["tests"], run.manifest.results_as(HeadsTested).n_heads
    differing = tests[tests["differs"]]
    caption = (
        "Costs in nats (of induction, a fall of attention), and in brackets where 95% of as many "
        "heads of the same layers are expected. Marked *: beyond chance."
    )
    table = _brief(tests)
    if differing.empty:
        return Headline(sentence=NO_ORDER, table=table, caption=caption)
    losses = differing[differing["measure"].isin(LOSSES)]
    rows = losses if len(losses) else differing
    best = rows.iloc[int((rows["cost"] - rows["chance"]).abs().to_numpy().argmax())]
    same = (tests[["removed", "order", "k"]] == best[["removed", "order", "k"]]).all(axis=1)
    of_text = float(tests.loc[same & (tests["measure"] == "text"), "cost"].iloc[0])
    on_text = "" if best["measure"] == "text" else f"; text costs {of_text:+.2f}"
    unit = "nats" if best["measure"] in LOSSES else "of attention"
    sentence = (
        f"Without {phrase(str(best['removed']))} in the first {best['k']} of {n_heads} heads by "
        f"{best['order']}, {OF_MEASURES[str(best['measure'])]} costs {best['cost']:+.2f} {unit}; "
        f"in as many heads of the same layers {best['chance']:+.2f}{on_text}."
    )
    return Headline(sentence=sentence, table=table, caption=caption)


def _brief(tests: pd.DataFrame) -> pd.DataFrame:
    """Return the costs of every removal, order and k, as text."""
    rows = []
    for (removed, order, k), group in tests.groupby(["removed", "order", "k"], sort=False):
        cells = {"removed": removed, "order": order, "k": str(k)}
        for row in group.to_dict("records"):
            star = "*" if row["differs"] else ""
            chance = f"[{row['chance_low']:.2f}, {row['chance_high']:.2f}]"
            cells[str(row["measure"])] = f"{row['cost']:+.2f}{star} {chance}"
        rows.append(cells)
    return pd.DataFrame(rows)


def _means_note(run: Run) -> list[str]:
    costs = run.manifest.results_as(HeadsTested).cost_of_means
    if not costs:
        return []
    on_others, on_own = costs
    return [
        f"Mean attention comes from {run.manifest.settings['mean_seqs']} other sequences. The "
        f"most heads without content cost {on_others:+.2f} nats on the measured texts, and "
        f"{on_own:+.2f} on texts of the means."
    ]


def _sections(run: Run) -> Iterator[Section]:
    yield Section(
        title="What the first heads cost",
        figure=partial(cost_by_k, run.tables["cost"], run.tables["tests"]),
        caption="Lines: the first k heads of an order, with 95% intervals. Bands: where 95% of as "
        "many heads drawn from the same layers are expected.",
        table=run.tables["tests"],
    )
    if "single" in run.tables:
        single = run.tables["single"]
        for (removed, order), rows in single.groupby(["removed", "order"], sort=False):
            yield Section(
                title=f"Each of the first heads by {order} alone, without {phrase(str(removed))}",
                figure=partial(single_costs, rows, f"First heads by {order}"),
                caption="Each head loses it alone. Blank heads are not among the first.",
                table=rows,
            )
    yield Section(
        title="The orders",
        caption="All heads in each order, with the value that they were ordered by.",
        table=run.tables["order"],
    )
