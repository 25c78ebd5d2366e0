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
from nope_probe.studies.heads.settings import LOWEST
from nope_probe.studies.page import Report

OF_MEASURES = {
    "text": "text",
    "copy_random": "a second copy of random tokens",
    "copy_text": "a second copy of text",
    "induction": "the induction heads' attention",
}

OF_ORDERS = {
    "others": "position among the other keys",
    "positional": "position among all keys",
    "first_key": "the first key's weight",
    "previous_token": "attention to the previous token",
}

LOSSES = ("text", "copy_random", "copy_text")
NOTHING = "No first heads cost more, or less, than all other heads that they were compared with."


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
        run: the tables `cost`, `order`, `tests` and, with k = 1, `single`.
    """
    removed = listed([phrase(part) for part in run.manifest.removed or ()])
    return Report(
        title=f"What the heads of {run.manifest.model_name} do, by removing {removed}",
        headline=headline(run),
        sections=[*_sections(run)],
        how_to_read=[*notes.how_to_read("heads"), *_means_note(run)],
    )


def headline(run: Run) -> Headline:
    """Return what the first heads of an order carry beyond all others, and the costs of all."""
    tests, tested = run.tables["tests"], run.manifest.results_as(HeadsTested)
    caption = (
        "Costs in nats (of induction, a fall of attention), and in brackets those of other heads: "
        "for k = 1 of every other head alone, else of as many drawn from the same layers, from the "
        "lowest to the highest. Marked *: beyond all of them, with its 95% interval."
    )
    beyond = tests[tests["beyond"]]
    if beyond.empty:
        return Headline(sentence=NOTHING, table=_brief(tests), caption=caption)
    losses = beyond[beyond["measure"].isin(LOSSES)]
    rows = losses if len(losses) else beyond
    best = rows.iloc[int((rows["cost"] - rows["chance"]).abs().to_numpy().argmax())]
    alike = ["removed", "order", "measure"]
    ks = rows.loc[(rows[alike] == best[alike]).all(axis=1), "k"].tolist()
    is_highest = best["cost"] > best["chance_high"]
    end = f"at {'most' if is_highest else 'least'} "
    end += f"{best['chance_high' if is_highest else 'chance_low']:+.2f}"
    order = run.tables["order"]
    top = order[order["order"] == best["order"]].iloc[0]
    first, others = (
        (f"L{top['layer']}H{top['head']}, the first", f"any other of the {best['of']} heads alone")
        if best["k"] == 1
        else (f"the first {best['k']}", f"{best['of'] - 1} draws of {best['k']} others")
    )
    measure = str(best["order"]).removeprefix(LOWEST)
    order_by = f"{'lowest ' * (measure != best['order'])}{OF_ORDERS.get(measure, measure)}"
    same = (tests[["removed", "order", "k"]] == best[["removed", "order", "k"]]).all(axis=1)
    of_text = float(tests.loc[same & (tests["measure"] == "text"), "cost"].iloc[0])
    on_text = "" if best["measure"] == "text" else f"; text costs {of_text:+.2f}"
    unit = "nats" if best["measure"] in LOSSES else "of attention"
    compared = tests.loc[(tests[alike] == best[alike]).all(axis=1), "k"]
    which = f" So it is for k = {listed([*map(str, ks)])}" if len(ks) > 1 else ""
    if len(compared) > 1 and not which:
        which = f" So it is for k = {ks[0]} alone"
    sentence = (
        f"Without {phrase(str(best['removed']))} in {first} of {tested.n_heads} heads by "
        f"{order_by}, {OF_MEASURES[str(best['measure'])]} costs {best['cost']:+.2f} {unit}; "
        f"in {others}, {end}{on_text}.{which}{'.' * bool(which)}"
    )
    return Headline(sentence=sentence, table=_brief(tests), caption=caption)


def _brief(tests: pd.DataFrame) -> pd.DataFrame:
    """Return the costs of every removal, order and k, as text."""
    rows = []
    for (removed, order, k), group in tests.groupby(["removed", "order", "k"], sort=False):
        cells = {"removed": removed, "order": order, "k": str(k)}
        for row in group.to_dict("records"):
            star = "*" if row["beyond"] else ""
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
        caption="Lines: the first k heads of an order, with 95% intervals. Bands: from the lowest "
        "to the highest of as many other heads of the same layers; for k = 1, of all other heads.",
        table=run.tables["tests"],
    )
    if "single" in run.tables:
        for removed, rows in run.tables["single"].groupby("removed", sort=False):
            yield Section(
                title=f"Every head alone, without {phrase(str(removed))}",
                figure=partial(single_costs, rows, "Every head alone"),
                caption="What a second copy of random tokens costs where one head alone loses it.",
                table=rows,
            )
    yield Section(
        title="The orders",
        caption="All heads in each order, with the value that they were ordered by.",
        table=run.tables["order"],
    )
