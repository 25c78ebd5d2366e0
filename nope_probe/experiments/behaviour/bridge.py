"""What conditions and heads do to the positional pattern, beside what they do to behaviour."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nope_probe.analyses.behaviour import (
    mean_interval,
    rank_correlation,
    second_copy_loss,
    span_loss,
)
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern_changes import pattern_lost, positional_part
from nope_probe.experiments.behaviour.conditions import INTACT_NAME, Removal
from nope_probe.experiments.behaviour.plan import Plan
from nope_probe.experiments.behaviour.runner import Measured
from nope_probe.experiments.tables import Row, interval_columns, interval_names
from nope_probe.figures.intervals import ValueAndBounds, interval_of

# What behaviour loses, by column of the bridge: the rows of `behaviour.csv` whose differences to
# the intact model exist in all conditions.
EFFECTS = {"loss": "loss_suffix", "copy": "copy_text_second", "position": "position"}
COLUMNS = ("condition", "layer", *interval_names("pattern", *EFFECTS))
HEAD_COLUMNS = ("layer", "head", *interval_names("pattern", "loss", "copy"))
CORRELATION_COLUMNS = ("over", "layer", "effect", "rho", "p", "n")
ALL_LAYERS = "all"


def bridge_table(
    plan: Plan,
    measured: Measured,
    behaviour: pd.DataFrame,
    decodability: pd.DataFrame,
    skip: int,
) -> pd.DataFrame:
    """Return per condition and layer what is lost of the pattern and of behaviour.

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
    for name in plan.conditions if measured.maps else ():
        if name == INTACT_NAME:
            continue
        n_layers = next(iter(measured.maps.values())).folds.shape[1]
        for layer in range(n_layers):
            lost = _pattern_lost(plan, measured, plan.conditions[name], layer, skip)
            row: Row = {"condition": name, "layer": layer, **interval_columns(lost, "pattern")}
            for effect in ("loss", "copy"):
                row |= _columns(effect, _difference(behaviour, name, measure=EFFECTS[effect]))
            row |= _columns("position", _difference(decodability, name, layer=layer))
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _pattern_lost(
    plan: Plan, measured: Measured, removal: Removal, layer: int, skip: int
) -> Interval:
    counts = measured.maps[removal].counts
    whole, left = (
        positional_part(
            measured.maps[each].folds[:, layer],
            measured.maps[each.without(plan.sources)].folds[:, layer],
            skip,
            counts,
        )
        for each in (Removal(), removal)
    )
    return pattern_lost(whole, left, counts)


def _difference(table: pd.DataFrame, condition: str, **where: object) -> ValueAndBounds:
    """Return the difference to the intact model in the row of a condition; NaN if there is none."""
    rows = table[table["condition"] == condition]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    nothing = (float("nan"),) * 3
    return nothing if rows.empty else interval_of(rows.iloc[0], "difference")


def _columns(name: str, interval: ValueAndBounds) -> Row:
    return dict(zip(interval_names(name), interval, strict=True))


def correlations_table(bridge: pd.DataFrame) -> pd.DataFrame:
    """Return Spearman's rho over conditions of what the pattern and what behaviour loses.

    Each layer's pattern has a row per effect, and so has the sum over layers (`all`).

    Args:
        bridge: the table of the bridge.
    """
    layers: list[tuple[object, pd.DataFrame]] = [*bridge.groupby("layer")]
    if len(bridge):
        layers.append((ALL_LAYERS, _summed(bridge)))
    rows = [row for layer, ours in layers for row in _correlations("conditions", layer, ours)]
    return pd.DataFrame(rows, columns=list(CORRELATION_COLUMNS))


def head_correlations(heads: pd.DataFrame) -> pd.DataFrame:
    """Return Spearman's rho over all heads of their own pattern and what is lost without W_Q.

    Args:
        heads: the table of heads.
    """
    rows = [row for row in _correlations("heads", ALL_LAYERS, heads)]
    return pd.DataFrame(rows, columns=list(CORRELATION_COLUMNS))


def _correlations(over: str, layer: object, table: pd.DataFrame) -> Iterator[Row]:
    for effect in (name for name in EFFECTS if name in table):
        found = rank_correlation(table["pattern"].tolist(), table[effect].tolist())
        row: Row = {"over": over, "layer": layer, "effect": effect}
        yield row | {"rho": found.rho, "p": found.p, "n": found.n}


def _summed(bridge: pd.DataFrame) -> pd.DataFrame:
    """Return per condition the sum of the pattern lost over layers, and the mean of each effect."""
    groups = bridge.groupby("condition", sort=False)
    return groups["pattern"].sum().to_frame().join(groups[list(EFFECTS)].mean())


def heads_table(plan: Plan, measured: Measured) -> pd.DataFrame:
    """Return per head its positional part, nats, and what is lost without its W_Q, nats per token.

    `loss` is the rise of the mean loss, `copy` of the loss of a text segment's second copy.
    """
    rows: list[Row] = []
    for name, removal in plan.heads.items():
        assert removal.head is not None
        layer, head = removal.head
        row: Row = {"layer": layer, "head": head}
        if measured.head_patterns:
            row |= interval_columns(measured.head_patterns[layer][head], "pattern")
        ours, intact = (measured.losses[each, "text"] for each in (name, INTACT_NAME))
        row |= interval_columns(mean_interval(span_loss(ours, 1) - span_loss(intact, 1)), "loss")
        if "copy_text" in plan.probes:
            second, intact_second = (
                second_copy_loss(measured.losses[each, "copy_text"], plan.segment)
                for each in (name, INTACT_NAME)
            )
            row |= interval_columns(mean_interval(second - intact_second), "copy")
        rows.append(row)
    return pd.DataFrame(rows, columns=list(HEAD_COLUMNS))
