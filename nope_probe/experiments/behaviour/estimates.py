"""The measures of behaviour that are read from losses: per document, and as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.behaviour import (
    PerDocument,
    copy_cost,
    extrapolation_cost,
    in_context_gain,
    mean_interval,
    second_copy_loss,
    span_loss,
)
from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.experiments.behaviour.conditions import INTACT_NAME
from nope_probe.experiments.behaviour.measures import Measure
from nope_probe.experiments.behaviour.plan import Plan
from nope_probe.experiments.behaviour.runner import Measured
from nope_probe.experiments.tables import Row, interval_columns, interval_names

IN_SIGHT = "without the mask the next token is in sight: only the suffix is scored"
FIRST_IN_SIGHT = "without the mask the first copy is in sight: see the second copy's loss"
NO_COPY = "the intact model does not copy"
ABOVE_UNIFORM = "above a uniform guess: only the difference says something"
# By probe; probes differ in the number of documents and of targets.
ProbeLosses: TypeAlias = Mapping[str, Float[Tensor, "_ _"]]
COLUMNS = ("measure", "condition", *interval_names("value", "difference"), "note")


@dataclass(frozen=True, kw_only=True)
class LossMeasure:
    """A number per document that is read from the losses of one condition.

    Attributes:
        measure: the measure that it belongs to.
        read: from the plan, the losses of each probe and the first target that is scored.
        unmasked: why it means nothing without the mask; empty if it does.
    """

    measure: Measure
    read: Callable[[Plan, ProbeLosses, int], PerDocument]
    unmasked: str = ""


def _suffix(plan: Plan, losses: ProbeLosses, first: int) -> PerDocument:
    return span_loss(losses["text"], plan.text.first_target)


def _order(plan: Plan, losses: ProbeLosses, first: int) -> PerDocument:
    start = plan.text.first_target
    return span_loss(losses["order"], start) - span_loss(losses["text"], start)


def _without_bos(plan: Plan, losses: ProbeLosses, first: int) -> PerDocument:
    start = max(first, 2)  # the first token after BOS has no loss without it
    return span_loss(losses["without_bos"], start - 1) - span_loss(losses["text"], start)


def _other_first(plan: Plan, losses: ProbeLosses, first: int) -> PerDocument:
    start = max(first, 2)
    return span_loss(losses["other_first"], start) - span_loss(losses["text"], start)


def _copy(kind: str) -> LossMeasure:
    def read(plan: Plan, losses: ProbeLosses, first: int) -> PerDocument:
        return copy_cost(losses[kind], plan.segment)

    return LossMeasure(measure="copy", read=read, unmasked=FIRST_IN_SIGHT)


def _second(kind: str) -> LossMeasure:
    def read(plan: Plan, losses: ProbeLosses, first: int) -> PerDocument:
        return second_copy_loss(losses[kind], plan.segment)

    return LossMeasure(measure="copy", read=read)


LOSS_MEASURES: dict[str, LossMeasure] = {
    "loss": LossMeasure(
        measure="loss",
        read=lambda plan, losses, first: span_loss(losses["text"], 1),
        unmasked=IN_SIGHT,
    ),
    "loss_suffix": LossMeasure(measure="loss", read=_suffix),
    "in_context": LossMeasure(
        measure="in-context",
        read=lambda plan, losses, first: in_context_gain(losses["text"]),
        unmasked=IN_SIGHT,
    ),
    "copy_text": _copy("copy_text"),
    "copy_text_second": _second("copy_text"),
    "copy_random": _copy("copy_random"),
    "copy_random_second": _second("copy_random"),
    "order": LossMeasure(measure="order", read=_order),
    "without_bos": LossMeasure(measure="bos", read=_without_bos),
    "other_first": LossMeasure(measure="bos", read=_other_first),
    "extrapolation": LossMeasure(
        measure="extrapolation",
        read=lambda plan, losses, first: extrapolation_cost(losses["long"], plan.trained),
    ),
}


def behaviour_table(plan: Plan, measured: Measured) -> pd.DataFrame:
    """Return the table of behaviour: a row per measure and condition, in nats.

    `difference` is to the intact model on the same documents and targets. An empty value has a
    note that says why.
    """
    rows = [row for name in LOSS_MEASURES for row in _rows(plan, measured, name)]
    rows += _position_rows(plan, measured)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _read(plan: Plan, measured: Measured, name: str, condition: str, no_mask: bool) -> PerDocument:
    losses = {probe: measured.losses[condition, probe] for probe in plan.probes}
    first = plan.text.first_target if no_mask else 1
    return LOSS_MEASURES[name].read(plan, losses, first)


def _rows(plan: Plan, measured: Measured, name: str) -> Iterator[Row]:
    about = LOSS_MEASURES[name]
    if about.measure not in plan.measures:
        return
    reason = plan.skipped.get(about.measure, "")
    if not reason and name in ("copy_text", "copy_random"):
        intact = mean_interval(_read(plan, measured, name, INTACT_NAME, no_mask=False))
        reason = "" if intact.high < 0 else NO_COPY
    for condition in plan.conditions:
        no_mask = plan.removes_mask(condition)
        note = reason or (about.unmasked if no_mask else "")
        if note:
            yield _row(name, condition, UNDEFINED, UNDEFINED, note)
            continue
        ours = _read(plan, measured, name, condition, no_mask)
        intact_same = _read(plan, measured, name, INTACT_NAME, no_mask)
        value, note = mean_interval(ours), ""
        if name == "copy_random_second" and value.value > plan.uniform:
            value, note = UNDEFINED, ABOVE_UNIFORM
        yield _row(name, condition, value, _difference(condition, ours, intact_same), note)


def _position_rows(plan: Plan, measured: Measured) -> Iterator[Row]:
    """Yield the mean over layers of the distance between predicted and true index, in positions."""
    if not plan.measured("position"):
        return
    means = {name: each[..., 0].mean(1) for name, each in measured.distances.items()}
    for name, ours in means.items():
        difference = _difference(name, ours, means[INTACT_NAME])
        yield _row("position", name, mean_interval(ours), difference, "")


def _difference(condition: str, ours: PerDocument, intact: PerDocument) -> Interval:
    return UNDEFINED if condition == INTACT_NAME else mean_interval(ours - intact)


def _row(name: str, condition: str, value: Interval, difference: Interval, note: str) -> Row:
    return {
        "measure": name,
        "condition": condition,
        **interval_columns(value, "value"),
        **interval_columns(difference, "difference"),
        "note": note,
    }
