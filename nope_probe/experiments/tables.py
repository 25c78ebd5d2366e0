"""The tables of a run: one row per layer and thing, one column per number, as in its CSV files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from nope_probe.analyses.attribution import LayerAttribution, MaskEffect, PlayerAttribution
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.mean_covariance import MeanCovariance
from nope_probe.analyses.pattern import Measures

Row = dict[str, Any]


def interval_columns(interval: Interval, name: str = "") -> Row:
    """Give an interval as three columns: name, name_low, name_high (or share, low, high)."""
    prefix = f"{name}_" if name else ""
    value = name or "share"
    return {
        value: interval.value,
        f"{prefix}low": interval.low,
        f"{prefix}high": interval.high,
    }


def sources_table(layers: Sequence[LayerAttribution]) -> pd.DataFrame:
    """Tabulate the sources: layer, term, rms (nats), share, low, high."""
    return pd.DataFrame(
        {
            "layer": each.layer,
            "term": source.term,
            **interval_columns(source.rms, "rms"),
            **interval_columns(source.share),
        }
        for each in layers
        for source in each.sources
    )


def non_relative_table(effects: Mapping[str, Sequence[MaskEffect]]) -> pd.DataFrame:
    """Tabulate the RMS of the non-relative part with and without the mask (nats), paired.

    Args:
        effects: per kind of tokens (text, shuffled), the effect in each layer.
    """
    return pd.DataFrame(
        {
            "layer": layer,
            "tokens": tokens,
            **interval_columns(effect.with_mask, "with_mask"),
            **interval_columns(effect.without_mask, "without_mask"),
            **interval_columns(effect.difference, "difference"),
        }
        for tokens, layers in effects.items()
        for layer, effect in enumerate(layers)
    )


def players_table(
    layers: Sequence[LayerAttribution],
    reparametrisations: Sequence[Sequence[LayerAttribution]] = (),
) -> pd.DataFrame:
    """Tabulate what each player means; with reparametrisations, their range too."""
    rows = []
    for index, each in enumerate(layers):
        for need in each.needs:
            row: Row = {"layer": each.layer, "game": need.game, "player": need.player}
            row |= interval_columns(need.share)
            row |= interval_columns(need.sufficiency, "sufficiency") | interval_columns(
                need.necessity, "necessity"
            )
            if reparametrisations:
                row |= _reparametrised_range(need, [other[index] for other in reparametrisations])
            rows.append(row)
    return pd.DataFrame(rows)


def _reparametrised_range(need: PlayerAttribution, others: Sequence[LayerAttribution]) -> Row:
    twins = [
        twin
        for other in others
        for twin in other.needs
        if (twin.game, twin.player) == (need.game, need.player)
    ]
    row: Row = {}
    for name in ("share", "sufficiency", "necessity"):
        values = [getattr(each, name).value for each in [need, *twins]] if twins else [float("nan")]
        row |= {
            f"{name}_reparametrised_min": min(values),
            f"{name}_reparametrised_max": max(values),
        }
    return row


def interactions_table(layers: Sequence[LayerAttribution]) -> pd.DataFrame:
    """Tabulate what only several players together bring: layer, players, share, low, high."""
    return pd.DataFrame(
        {
            "layer": each.layer,
            "game": interaction.game,
            "players": "+".join(interaction.players),
            **interval_columns(interaction.share),
        }
        for each in layers
        for interaction in each.interactions
    )


def measures_table(
    measured: Iterable[tuple[Mapping[str, Any], Sequence[Measures]]],
) -> pd.DataFrame:
    """Tabulate pattern measures per layer; each group of layers comes with columns of its own."""
    return pd.DataFrame(
        {"layer": layer, **labels, **_measure_columns(measures)}
        for labels, layers in measured
        for layer, measures in enumerate(layers)
    )


def _measure_columns(measures: Measures) -> Row:
    row: Row = {}
    for name in Measures.__dataclass_fields__:
        row |= interval_columns(getattr(measures, name), name)
    return row


def mean_covariance_table(layers: Sequence[MeanCovariance]) -> pd.DataFrame:
    """Tabulate the mean and covariance terms: share, RMS (nats), dimensions of the mean keys."""
    return pd.DataFrame(
        {
            "layer": each.layer,
            "term": name,
            **interval_columns(share),
            **interval_columns(rms, "rms"),
            **interval_columns(each.dimensions, "dimensions"),
        }
        for each in layers
        for name, share, rms in (
            ("mean", each.mean, each.mean_rms),
            ("covariance", each.covariance, each.covariance_rms),
        )
    )
