"""From losses, decodability and score maps to what a run holds: tables, manifest and page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from nope_probe.analyses.behaviour import chance_distance, mean_interval, position_means, span_loss
from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.bridge import (
    bridge_table,
    correlations_table,
    head_correlations,
)
from nope_probe.experiments.behaviour.estimates import behaviour_table
from nope_probe.experiments.behaviour.heads import MeasuredHeads, heads_table
from nope_probe.experiments.behaviour.page import behaviour_page
from nope_probe.experiments.behaviour.plan import Plan
from nope_probe.experiments.behaviour.probes import token_arrays
from nope_probe.experiments.behaviour.runner import Distances, Measured
from nope_probe.experiments.behaviour.summary import headline
from nope_probe.experiments.tables import Row, interval_columns, interval_names
from nope_probe.maps.folds import folds_of
from nope_probe.runtime.folder import Run
from nope_probe.runtime.provenance import input_record
from nope_probe.runtime.session import Session

if TYPE_CHECKING:
    from nope_probe.experiments.behaviour.settings import Settings

POSITION_COLUMNS = ("condition", "position", "loss", "loss_low", "loss_high")
BINS = 64
DECODED = ("distance", "null", "untrained")


def analyse(
    session: Session[Settings], plan: Plan, measured: Measured, heads: MeasuredHeads | None = None
) -> Run:
    """Estimate every measure in every condition, and return the run.

    Raises:
        UserError: for a loss that is not finite.
    """
    validate_finite_losses(measured)
    inputs, skip = session.sequences(), session.settings.n_skipped(session.sequences())
    tables = tables_of(plan, measured, skip)
    if heads is not None:
        tables["heads"] = heads_table(plan, measured, heads)
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
    return Run(
        manifest=manifest,
        arrays={"tokens": {name: each.numpy() for name, each in token_arrays(plan.probes).items()}},
        tables=tables,
        page=behaviour_page(tables, manifest, headline(manifest, tables)),
    )


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
