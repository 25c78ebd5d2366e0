"""From losses and decodability to a run's tables, manifest and page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import pandas as pd
import torch

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
from nope_probe.analyses.jackknife import UNDEFINED
from nope_probe.errors import UserError
from nope_probe.maps.folds import folds_of
from nope_probe.removal import INTACT
from nope_probe.run.folder import Run
from nope_probe.run.session import Session
from nope_probe.studies.behaviour.page import MeasuresTaken, report
from nope_probe.studies.behaviour.plan import BehaviourPlan, MeasuredBehaviour, head_name
from nope_probe.studies.behaviour.settings import QUANTITIES, Settings
from nope_probe.studies.page import with_page
from nope_probe.studies.tables import TableRow, interval_columns, interval_names

BINS = 64
NO_COPY = "the intact model does not copy"
ABOVE_UNIFORM = "above a uniform guess: only the difference says something"
COLUMNS = ["measure", "condition", *interval_names("value", "difference"), "note"]
POSITION_COLUMNS = ["condition", "position", *interval_names("loss")]
DECODED = interval_names("distance", "null", "untrained", "difference")
HEAD_COLUMNS = ["layer", "head", *interval_names("pattern", "loss", "copy")]


def analyse(session: Session[Settings], plan: BehaviourPlan, measured: MeasuredBehaviour) -> Run:
    """Estimate every measure in every condition, and return the run.

    Args:
        session: the run in progress.
        plan: the conditions.
        measured: their measurements.

    Raises:
        UserError: for a loss that is not finite.
    """
    for (condition, probe), losses in measured.losses.items():
        if not losses.isfinite().all():
            raise UserError(f"non-finite losses in condition {condition} ({probe})")
    inputs, n_folds = session.sequences(), session.settings.folds
    skip = session.settings.skip_keys_of(inputs)
    documents = plan.text.documents
    fold_sizes = folds_of(len(documents), n_folds, documents).bincount(minlength=n_folds)
    measures = MeasuresTaken(
        measures=tuple(plan.measures),
        skipped=plan.skipped,
        prefix=plan.text.prefix,
        trained_len=plan.trained,
        bin_width=bin_width(plan),
    )
    manifest = replace(
        session.manifest_of(inputs, skip, fold_sizes),
        conditions=tuple(plan.conditions),
        left_out=plan.left_out,
        results=asdict(measures),
    )
    tokens = {name: probe.tokens for name, probe in plan.probes.items() if name != "text"}
    tokens |= {"tokens": plan.text.tokens, "documents": documents}
    if "long" in plan.probes:
        tokens["long_documents"] = plan.probes["long"].documents
    run = Run(
        manifest=manifest,
        arrays={"tokens": {name: array.numpy() for name, array in tokens.items()}},
        tables=tables_of(plan, measured, skip),
    )
    return with_page(session, run, report)


def tables_of(
    plan: BehaviourPlan, measured: MeasuredBehaviour, skip: int
) -> dict[str, pd.DataFrame]:
    """Return the run's tables by name; those of measures that were not taken have no rows."""
    rows = [row for name in QUANTITIES for row in _rows(plan, measured, name)]
    tables = {
        "loss_by_position": position_table(plan, measured, "text"),
        "extrapolation": position_table(plan, measured, "long", bin_width(plan)),
        "behaviour": pd.DataFrame(rows, columns=COLUMNS),
        "decodability": decodability_table(plan, measured, skip),
    }
    if plan.heads:
        tables["heads"] = heads_loss_table(plan, measured)
    return tables


def _rows(plan: BehaviourPlan, measured: MeasuredBehaviour, name: str) -> Iterator[TableRow]:
    """Yield the rows of one of `QUANTITIES`, a row per condition, in nats or positions.

    `difference` is to the intact model on the same documents and targets. An empty value has a
    note that says why.
    """
    about = QUANTITIES[name]
    reason = plan.skipped.get(about.measure, "")
    if about.measure not in plan.measures or not (reason or about.probe in plan.probes):
        return
    if not reason and name in ("copy_text", "copy_random"):
        intact = mean_interval(per_document(plan, measured, name, INTACT.name))
        reason = "" if intact.high < 0 else NO_COPY
    for condition in plan.conditions:
        value = difference = UNDEFINED
        is_unmasked = "mask" in plan.conditions[condition].condition
        note = reason or (about.unmasked if is_unmasked else "")
        if not note:
            values = per_document(plan, measured, name, condition, is_unmasked)
            intact_same = per_document(plan, measured, name, INTACT.name, is_unmasked)
            value = mean_interval(values)
            if condition != INTACT.name:
                difference = mean_interval(values - intact_same)
            if name == "copy_random_second" and value.value > plan.uniform:
                value, note = UNDEFINED, ABOVE_UNIFORM
        yield {
            "measure": name,
            "condition": condition,
            **interval_columns(value=value, difference=difference),
            "note": note,
        }


def per_document(
    plan: BehaviourPlan,
    measured: MeasuredBehaviour,
    name: str,
    condition: str,
    suffix_only: bool = False,
) -> PerDocument:
    """Return one of `QUANTITIES` in a condition, a number per document.

    Args:
        plan: the conditions.
        measured: their losses, and distances of the decoded index.
        name: the quantity.
        condition: the condition.
        suffix_only: whether only targets after the prefix are scored.
    """
    if name == "position":
        return measured.distances[condition][..., 0].mean(1)
    text = measured.losses[condition, "text"]
    losses = measured.losses[condition, QUANTITIES[name].probe]
    suffix = plan.text.prefix
    first = suffix if suffix_only else 2  # the first token after BOS has no loss without it
    match name:
        case "loss":
            return span_loss(losses, 1)
        case "loss_suffix":
            return span_loss(losses, suffix)
        case "in_context":
            return in_context_gain(losses)
        case "copy_text" | "copy_random":
            return copy_cost(losses, plan.segment)
        case "copy_text_second" | "copy_random_second":
            return second_copy_loss(losses, plan.segment)
        case "order":
            return span_loss(losses, suffix) - span_loss(text, suffix)
        case "without_bos":
            return span_loss(losses, first - 1) - span_loss(text, first)
        case "other_first":
            return span_loss(losses, first) - span_loss(text, first)
        case _:
            return extrapolation_cost(losses, plan.trained)


def position_table(
    plan: BehaviourPlan, measured: MeasuredBehaviour, probe: str, width: int = 1
) -> pd.DataFrame:
    """Return the mean loss at each position, in nats; without the mask, of the suffix alone.

    Args:
        plan: the conditions.
        measured: their losses.
        probe: the sequences.
        width: how many positions a row is the mean over; `position` is the first of them.
    """
    tables = [pd.DataFrame(columns=POSITION_COLUMNS)]
    for condition in plan.conditions if probe in plan.probes else ():
        losses = measured.losses[condition, probe]
        first = plan.probes[probe].prefix if "mask" in plan.conditions[condition].condition else 1
        starts = [first, *range(first + width - first % width, losses.shape[1] + 1, width)]
        stops = [*starts[1:], losses.shape[1] + 1]
        spans = [span_loss(losses, *ends) for ends in zip(starts, stops, strict=True)]
        means = position_means(torch.stack(spans, 1))
        columns = (means.value.numpy(), means.low.numpy(), means.high.numpy())
        row = zip(POSITION_COLUMNS, (condition, starts, *columns), strict=True)
        tables.append(pd.DataFrame(dict(row)))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def bin_width(plan: BehaviourPlan) -> int:
    """Return over how many positions losses in long windows are averaged: a few dozen bins."""
    if "long" not in plan.probes:
        return 1
    return max(1, plan.probes["long"].tokens.shape[1] // BINS)


def decodability_table(plan: BehaviourPlan, measured: MeasuredBehaviour, skip: int) -> pd.DataFrame:
    """Return the distance of decoded and true index, per layer, in positions.

    `distance` is of the regression on the residual stream after the layer, `null` of one on
    shuffled targets, `untrained` of the model with random weights; `difference` is to the intact
    model, paired over documents; `chance` is what the middle position achieves.
    """
    chance = chance_distance(plan.text.tokens.shape[1], skip)
    rows: list[TableRow] = []
    for condition, distances in measured.distances.items():
        changes = distances - measured.distances[INTACT.name]
        untrained = measured.untrained.get(condition)
        for place, layer in enumerate(plan.layers):
            row: TableRow = {"layer": layer, "condition": condition, "chance": chance}
            intervals = {
                "distance": mean_interval(distances[:, place, 0]),
                "null": mean_interval(distances[:, place, 1]),
            }
            if untrained is not None:
                intervals["untrained"] = mean_interval(untrained[:, place, 0])
            if condition != INTACT.name:
                intervals["difference"] = mean_interval(changes[:, place, 0])
            rows.append(row | interval_columns(**intervals))
    return pd.DataFrame(rows, columns=["layer", "condition", *DECODED, "chance"])


def heads_loss_table(plan: BehaviourPlan, measured: MeasuredBehaviour) -> pd.DataFrame:
    """Return per head its positional part, nats, and what is lost without its W_Q, nats per token.

    `loss` is the rise of the mean loss, `copy` of the loss of a text segment's second copy.
    """
    rows: list[TableRow] = []
    for layer, head in plan.heads:
        row: TableRow = {"layer": layer, "head": head}
        if measured.head_patterns:
            row |= interval_columns(pattern=measured.head_patterns[layer][head])
        for effect, quantity in (("loss", "loss"), ("copy", "copy_text_second")):
            if QUANTITIES[quantity].probe in plan.probes:
                without = per_document(plan, measured, quantity, head_name(layer, head))
                rise = mean_interval(without - per_document(plan, measured, quantity, INTACT.name))
                row |= interval_columns(**{effect: rise})
        rows.append(row)
    return pd.DataFrame(rows, columns=HEAD_COLUMNS)
