"""From losses, decodability and score maps to what a run holds: tables, manifest and page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.behaviour import (
    PerDocument,
    chance_distance,
    copy_cost,
    extrapolation_cost,
    in_context_gain,
    mean_interval,
    position_means,
    second_copy_loss,
    span_loss,
)
from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.bridge import (
    bridge_table,
    correlations_table,
    head_correlations,
    heads_table,
)
from nope_probe.experiments.behaviour.conditions import INTACT_NAME
from nope_probe.experiments.behaviour.plan import Plan, token_arrays
from nope_probe.experiments.behaviour.runner import Distances, Measured
from nope_probe.experiments.behaviour.sections import report
from nope_probe.experiments.behaviour.settings import Measure, Settings
from nope_probe.experiments.tables import Row, interval_columns, interval_names
from nope_probe.maps.folds import folds_of
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_record
from nope_probe.runtime.session import Session

POSITION_COLUMNS = ("condition", "position", "loss", "loss_low", "loss_high")
BINS = 64
DECODED = ("distance", "null", "untrained")
IN_SIGHT = "without the mask the next token is in sight: only the suffix is scored"
FIRST_IN_SIGHT = "without the mask the first copy is in sight: see the second copy's loss"
NO_COPY = "the intact model does not copy"
ABOVE_UNIFORM = "above a uniform guess: only the difference says something"
# By probe; probes differ in the number of documents and of targets.
ProbeLosses: TypeAlias = Mapping[str, Float[Tensor, "_ _"]]
COLUMNS = ("measure", "condition", *interval_names("value", "difference"), "note")


def analyse(session: Session[Settings], plan: Plan, measured: Measured) -> Run:
    """Estimate every measure in every condition, and return the run.

    Raises:
        UserError: for a loss that is not finite.
    """
    validate_finite_losses(measured)
    inputs, skip = session.sequences(), session.settings.n_skipped(session.sequences())
    tables = tables_of(plan, measured, skip)
    if plan.heads:
        tables["heads"] = heads_table(plan, measured)
        over_heads = head_correlations(tables["heads"])
        tables["correlations"] = pd.concat([tables["correlations"], over_heads])
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip, fold_counts(session, plan)),
        "conditions": list(plan.conditions),
        "measures": list(plan.measures),
        "skipped": plan.skipped,
        "prefix": plan.text.prefix,
        "trained_len": plan.trained,
        "bin_width": bin_width(plan),
    }
    run = Run(
        manifest=manifest,
        arrays={"tokens": {name: each.numpy() for name, each in token_arrays(plan.probes).items()}},
        tables=tables,
    )
    return replace(run, page=report(run).html(manifest))


def fold_counts(session: Session[Settings], plan: Plan) -> Int[Tensor, " fold"]:
    """Return how many text windows each fold of the score maps has."""
    n_folds, documents = session.settings.folds, plan.text.documents
    return folds_of(len(documents), n_folds, documents).bincount(minlength=n_folds)


def tables_of(plan: Plan, measured: Measured, skip: int) -> dict[str, pd.DataFrame]:
    """Return the run's tables by name; those of measures that were not taken have no rows."""
    behaviour = behaviour_table(plan, measured)
    decodability = decodability_table(plan, measured, skip)
    bridge = bridge_table(plan, measured, behaviour, decodability, skip)
    return {
        "loss_by_position": position_table(plan, measured, "text"),
        "extrapolation": position_table(plan, measured, "long", bin_width(plan)),
        "behaviour": behaviour,
        "decodability": decodability,
        "bridge": bridge,
        "correlations": correlations_table(bridge),
    }


def validate_finite_losses(measured: Measured) -> None:
    """Check that every loss is a number.

    Raises:
        UserError: naming the condition.
    """
    for (condition, probe), losses in measured.losses.items():
        if not losses.isfinite().all():
            raise UserError(f"non-finite losses in condition {condition} ({probe})")


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


def position_table(plan: Plan, measured: Measured, probe: str, width: int = 1) -> pd.DataFrame:
    """Return the mean loss at each position, in nats; without the mask, of the suffix alone.

    Args:
        plan: the conditions.
        measured: their losses.
        probe: the sequences.
        width: how many positions a row is the mean over; `position` is the first of them.
    """
    rows: list[Row] = []
    for condition in plan.conditions if probe in plan.probes else ():
        losses = measured.losses[condition, probe]
        first = plan.probes[probe].first_target if plan.removes_mask(condition) else 1
        starts = [first, *range(first + width - first % width, losses.shape[1] + 1, width)]
        stops = [*starts[1:], losses.shape[1] + 1]
        spans = [span_loss(losses, *ends) for ends in zip(starts, stops, strict=True)]
        means = position_means(torch.stack(spans, 1))
        columns = (each.tolist() for each in (means.value, means.low, means.high))
        for row in zip(starts, *columns, strict=True):
            rows.append(dict(zip(POSITION_COLUMNS, (condition, *row), strict=True)))
    return pd.DataFrame(rows, columns=list(POSITION_COLUMNS))


def bin_width(plan: Plan) -> int:
    """Return over how many positions losses in long windows are averaged: a few dozen bins."""
    if "long" not in plan.probes:
        return 1
    return max(1, plan.probes["long"].tokens.shape[1] // BINS)


def decodability_table(plan: Plan, measured: Measured, skip: int) -> pd.DataFrame:
    """Return how far the decoded index is from the true one, per layer, in positions.

    `distance` is of the regression on the residual stream after the layer, `null` of one on
    shuffled targets, `untrained` of the model with random weights; `difference` is to the intact
    model, paired over documents; `chance` is what the middle position achieves.
    """
    chance = chance_distance(plan.text.tokens.shape[1], skip)
    rows: list[Row] = []
    for condition, ours in measured.distances.items():
        intact = next(iter(measured.distances.values()))
        for layer in range(ours.shape[1]):
            untrained = measured.untrained.get(condition)
            is_intact = ours is intact
            difference = ours[:, layer, 0] - intact[:, layer, 0]
            rows.append(
                {
                    "layer": layer,
                    "condition": condition,
                    **interval_columns(mean_interval(ours[:, layer, 0]), "distance"),
                    **interval_columns(mean_interval(ours[:, layer, 1]), "null"),
                    **interval_columns(_mean_of(untrained, layer), "untrained"),
                    **interval_columns(
                        UNDEFINED if is_intact else mean_interval(difference), "difference"
                    ),
                    "chance": chance,
                }
            )
    columns = ["layer", "condition", *interval_names(*DECODED, "difference"), "chance"]
    return pd.DataFrame(rows, columns=columns)


def _mean_of(distances: Distances | None, layer: int) -> Interval:
    return UNDEFINED if distances is None else mean_interval(distances[:, layer, 0])
