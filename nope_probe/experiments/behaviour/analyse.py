"""From losses, decodability and score maps to a run's tables, manifest and page."""

from __future__ import annotations

from collections.abc import Iterator

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
    rank_correlation,
    second_copy_loss,
    span_loss,
)
from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.analyses.pattern_changes import pattern_lost, positional_part
from nope_probe.conditions import INTACT
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.plan import MeasuredBehaviour, Plan, head_name, map_key
from nope_probe.experiments.behaviour.sections import report
from nope_probe.experiments.behaviour.settings import EFFECTS, QUANTITIES, Settings
from nope_probe.experiments.sections import with_page
from nope_probe.experiments.tables import Row, interval_columns, interval_names
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.folds import folds_of
from nope_probe.maps.layers import LayerMaps, shared_patterns
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_record
from nope_probe.runtime.session import Session

BINS = 64
ALL_LAYERS = "all"
NO_COPY = "the intact model does not copy"
ABOVE_UNIFORM = "above a uniform guess: only the difference says something"
COLUMNS = ["measure", "condition", *interval_names("value", "difference"), "note"]
POSITION_COLUMNS = ["condition", "position", *interval_names("loss")]
DECODED = interval_names("distance", "null", "untrained", "difference")
BRIDGE_COLUMNS = ["condition", "layer", *interval_names("pattern", *EFFECTS)]
HEAD_COLUMNS = ["layer", "head", *interval_names("pattern", "loss", "copy")]
CORRELATION_COLUMNS = ["over", "layer", "effect", "rho", "p", "n"]


def analyse(session: Session[Settings], plan: Plan, measured: MeasuredBehaviour) -> Run:
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
    skip = session.settings.n_skipped(inputs)
    documents = plan.text.documents
    fold_sizes = folds_of(len(documents), n_folds, documents).bincount(minlength=n_folds)
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip, fold_sizes),
        "conditions": list(plan.conditions),
        "measures": list(plan.measures),
        "skipped": plan.skipped,
        "left_out": plan.left_out,
        "prefix": plan.text.prefix,
        "trained_len": plan.trained,
        "bin_width": bin_width(plan),
    }
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


def tables_of(plan: Plan, measured: MeasuredBehaviour, skip: int) -> dict[str, pd.DataFrame]:
    """Return the run's tables by name; those of measures that were not taken have no rows."""
    rows = [row for name in QUANTITIES for row in _rows(plan, measured, name)]
    behaviour = pd.DataFrame(rows, columns=COLUMNS)
    decodability = decodability_table(plan, measured, skip)
    bridge = bridge_table(plan, measured, behaviour, decodability, skip)
    tables = {
        "loss_by_position": position_table(plan, measured, "text"),
        "extrapolation": position_table(plan, measured, "long", bin_width(plan)),
        "behaviour": behaviour,
        "decodability": decodability,
        "bridge": bridge,
    }
    if plan.heads:
        tables["heads"] = heads_table(plan, measured)
    return tables | {"correlations": correlations_table(bridge, tables.get("heads"))}


def _rows(plan: Plan, measured: MeasuredBehaviour, name: str) -> Iterator[Row]:
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
        is_unmasked = plan.removes_mask(condition)
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
    plan: Plan, measured: MeasuredBehaviour, name: str, condition: str, suffix_only: bool = False
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
    plan: Plan, measured: MeasuredBehaviour, probe: str, width: int = 1
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
        first = plan.probes[probe].prefix if plan.removes_mask(condition) else 1
        starts = [first, *range(first + width - first % width, losses.shape[1] + 1, width)]
        stops = [*starts[1:], losses.shape[1] + 1]
        spans = [span_loss(losses, *ends) for ends in zip(starts, stops, strict=True)]
        means = position_means(torch.stack(spans, 1))
        columns = (means.value.numpy(), means.low.numpy(), means.high.numpy())
        row = zip(POSITION_COLUMNS, (condition, starts, *columns), strict=True)
        tables.append(pd.DataFrame(dict(row)))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def bin_width(plan: Plan) -> int:
    """Return over how many positions losses in long windows are averaged: a few dozen bins."""
    if "long" not in plan.probes:
        return 1
    return max(1, plan.probes["long"].tokens.shape[1] // BINS)


def decodability_table(plan: Plan, measured: MeasuredBehaviour, skip: int) -> pd.DataFrame:
    """Return the distance of decoded and true index, per layer, in positions.

    `distance` is of the regression on the residual stream after the layer, `null` of one on
    shuffled targets, `untrained` of the model with random weights; `difference` is to the intact
    model, paired over documents; `chance` is what the middle position achieves.
    """
    chance = chance_distance(plan.text.tokens.shape[1], skip)
    rows: list[Row] = []
    for condition, distances in measured.distances.items():
        changes = distances - measured.distances[INTACT.name]
        untrained = measured.untrained.get(condition)
        for place, layer in enumerate(plan.layers):
            row: Row = {"layer": layer, "condition": condition, "chance": chance}
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


def bridge_table(
    plan: Plan,
    measured: MeasuredBehaviour,
    behaviour: pd.DataFrame,
    decodability: pd.DataFrame,
    skip: int,
) -> pd.DataFrame:
    """Return per condition and layer the losses of pattern and behaviour.

    `pattern` is in nats of p (see `pattern_lost`); `loss` and `copy` (of the second copy of a text
    segment) in nats per token, the same in all rows of a condition; `position` is how much farther
    from the true index the layer's decoded one is, in positions.

    Args:
        plan: the conditions.
        measured: their score maps.
        behaviour: the table of behaviour.
        decodability: the table of decodability.
        skip: how many first keys patterns leave out.
    """
    rows: list[Row] = []
    for condition, ablation in plan.conditions.items() if measured.maps else ():
        if condition == INTACT.name:
            continue
        for place, layer in enumerate(plan.layers):
            lost = _pattern_lost(plan, measured, ablation, place, skip)
            rows.append({"condition": condition, "layer": layer, **interval_columns(pattern=lost)})
    bridge = pd.DataFrame(rows, columns=BRIDGE_COLUMNS[:5])
    for effect, quantity in EFFECTS.items():
        renamed = dict(zip(interval_names("difference"), interval_names(effect), strict=True))
        table, keys = behaviour[behaviour["measure"] == quantity], ["condition"]
        if effect == "position":
            table, keys = decodability, ["condition", "layer"]
        columns = table[[*keys, *renamed]].rename(columns=renamed)
        bridge = bridge.merge(columns, on=keys, how="left")
    return bridge


def _pattern_lost(
    plan: Plan, measured: MeasuredBehaviour, ablation: Ablation, place: int, skip: int
) -> Interval:
    """Return what a removal takes from the positional part of one layer, nats."""
    whole = measured.maps[map_key(plan.conditions[INTACT.name])]
    masked, parts = whole.folds[:, place].isnan(), []
    for removed in (plan.conditions[INTACT.name], ablation):
        scores = measured.maps[map_key(removed)].folds[:, place].masked_fill(masked, torch.nan)
        content = measured.maps[map_key(plan.without_sources(removed))].folds[:, place]
        layers = [
            LayerMaps.of(x, whole.counts, whole.query_positions, whole.skip_keys)
            for x in (scores, content)
        ]
        parts.append(positional_part(*shared_patterns(layers)))
    return pattern_lost(*parts)


def correlations_table(bridge: pd.DataFrame, heads: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return Spearman's rho of the positional pattern's and behaviour's losses.

    Args:
        bridge: the table of the bridge: over conditions, each layer's pattern has a row per effect,
            and so has the sum over layers (`all`).
        heads: the table of heads: over all heads, their own pattern and what is lost without W_Q.
    """
    groups: list[tuple[str, object, pd.DataFrame]] = [
        ("conditions", layer, rows) for layer, rows in bridge.groupby("layer")
    ]
    if len(bridge):
        conditions = bridge.groupby("condition", sort=False)
        summed = conditions["pattern"].sum().to_frame().join(conditions[list(EFFECTS)].mean())
        groups.append(("conditions", ALL_LAYERS, summed))
    if heads is not None:
        groups.append(("heads", ALL_LAYERS, heads))
    rows = []
    for over, layer, table in groups:
        for effect in (name for name in EFFECTS if name in table):
            correlation = rank_correlation(table["pattern"].tolist(), table[effect].tolist())
            rows.append((over, layer, effect, correlation.rho, correlation.p, correlation.n))
    return pd.DataFrame(rows, columns=CORRELATION_COLUMNS)


def heads_table(plan: Plan, measured: MeasuredBehaviour) -> pd.DataFrame:
    """Return per head its positional part, nats, and what is lost without its W_Q, nats per token.

    `loss` is the rise of the mean loss, `copy` of the loss of a text segment's second copy.
    """
    rows: list[Row] = []
    for layer, head in plan.heads:
        row: Row = {"layer": layer, "head": head}
        if measured.head_patterns:
            row |= interval_columns(pattern=measured.head_patterns[layer][head])
        for effect, quantity in (("loss", "loss"), ("copy", "copy_text_second")):
            if QUANTITIES[quantity].probe in plan.probes:
                without = per_document(plan, measured, quantity, head_name(layer, head))
                rise = mean_interval(without - per_document(plan, measured, quantity, INTACT.name))
                row |= interval_columns(**{effect: rise})
        rows.append(row)
    return pd.DataFrame(rows, columns=HEAD_COLUMNS)
