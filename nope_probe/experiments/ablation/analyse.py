"""From the score maps of all conditions to what a run holds: tables, maps, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from nope_probe.analyses.attribution import LayerAttribution, attribute
from nope_probe.analyses.mean_covariance import split_layer
from nope_probe.analyses.pattern import Measures, measure
from nope_probe.analyses.pattern_changes import KeptPattern, MaskEffect, mask_effect
from nope_probe.analyses.shapley import INTACT, MASK, Condition, PlayerSet
from nope_probe.analyses.trends import query_stride
from nope_probe.components import Replacement
from nope_probe.data.sequences import Kind
from nope_probe.experiments.ablation.conditions import ConditionMaps, Measured
from nope_probe.experiments.ablation.maps import (
    RunMaps,
    source_offsets_table,
    write_folds,
    write_maps,
)
from nope_probe.experiments.ablation.plan import Plan
from nope_probe.experiments.ablation.sections import report
from nope_probe.experiments.explore.views import explorer_of
from nope_probe.experiments.tables import (
    interactions_table,
    mean_covariance_table,
    measures_table,
    non_relative_table,
    players_table,
    sources_table,
)
from nope_probe.runtime.folder import Run, StoredArrays
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

ConditionMeasures = Mapping[Condition, Sequence[Measures]]


def analyse(session: Session[RunSettings], plan: Plan, measured: Measured) -> Run:
    """Attribute the positional pattern of every layer, and return the run."""
    inputs, skip_keys = session.sequences(), session.settings.n_skipped(session.sequences())
    layers = attribute_layers(measured.maps, plan, plan.player_sets, skip_keys)
    measures = {each: measure(maps, skip_keys) for each, maps in measured.maps.items()}
    tables = tables_of(plan, measured, layers, measures, inputs.kind, skip_keys)
    maps, folds = (session.checkpoint.scratch(name) for name in ("maps", "folds"))
    write_maps(maps, RunMaps(plan, measured, skip_keys))
    write_folds(folds, plan, measured)
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys, measured.intact.counts),
        "query_stride": query_stride(measured.intact.n),
        **_attribution_record(plan, measured, layers),
    }
    run = Run(
        manifest=manifest,
        arrays={"tokens": input_arrays(inputs)},
        files={"maps.safetensors": maps, "folds.safetensors": folds},
        tables=tables,
    )
    kept = kept_patterns_of(layers, measures)
    explorer = explorer_of(measured.maps, plan.switches, skip_keys, kept)
    shown = report(replace(run, arrays={"maps": StoredArrays(maps)}), explorer)
    return replace(run, page=shown.html(manifest))


def attribute_layers(
    maps: ConditionMaps, plan: Plan, player_sets: Sequence[PlayerSet], skip_keys: int
) -> list[LayerAttribution]:
    """Return the attribution of each layer to the plan's sources and to some player sets."""
    return attribute(maps, player_sets, position=plan.position, skip_keys=skip_keys)


def tables_of(
    plan: Plan,
    measured: Measured,
    layers: Sequence[LayerAttribution],
    measures: ConditionMeasures,
    tokens: Kind,
    skip_keys: int,
) -> dict[str, pd.DataFrame]:
    """Return the run's tables by name.

    Args:
        plan: the conditions.
        measured: their score maps.
        layers: the attribution of each layer.
        measures: per condition, the measures of each layer's pattern.
        tokens: the kind of the run's inputs.
        skip_keys: how many first keys to leave out.
    """
    again = [
        attribute_layers({**measured.maps, **each}, plan, plan.player_sets[:1], skip_keys)
        for each in measured.reparametrised
    ]
    others = {
        name: attribute_layers({**measured.maps, **maps}, plan, plan.player_sets, skip_keys)
        for name, maps in measured.others.items()
    }
    first, effects = measured.replacement, _mask_effects(tokens, layers, measured, skip_keys)
    return {
        "sources": sources_table(layers),
        "non_relative": non_relative_table(effects),
        "players": side_by_side(
            {first: players_table(layers, again)}
            | {name: players_table(each) for name, each in others.items()}
        ),
        "interactions": side_by_side(
            {name: interactions_table(each) for name, each in {first: layers, **others}.items()}
        ),
        "pattern": measures_table(
            ({"kept": plan.name(condition)}, each) for condition, each in measures.items()
        ),
        "controls": _controls_table(tokens, plan, measured, skip_keys),
        "mean_covariance": _mean_covariance_table(measured, skip_keys),
        "offsets": source_offsets_table(plan, measured, skip_keys),
    }


def _attribution_record(
    plan: Plan, measured: Measured, layers: Sequence[LayerAttribution]
) -> dict[str, Any]:
    return {
        "layer_passes": asdict(measured.layer_passes),
        "gains": None if measured.gains is None else {**measured.gains.c},
        "gains_random": None if measured.gains is None else {**measured.gains.c_random} or None,
        "replacements": [measured.replacement, *measured.others],
        "player_sets": {each.name: [p.name for p in each.players] for each in plan.player_sets},
        "conditions": [plan.name(condition) for condition in plan.conditions],
        "position": plan.position,
        "conjunctions": {
            each.name: [layer.layer for layer in layers if layer.is_conjunction(each.name)]
            for each in plan.player_sets
        },
    }


def _mask_effects(
    tokens: Kind, layers: Sequence[LayerAttribution], measured: Measured, skip_keys: int
) -> dict[str, list[MaskEffect]]:
    """Return the mask's effect on the non-relative part, on the run's tokens and on shuffled."""
    effects: dict[str, list[MaskEffect]] = {tokens: [each.non_relative for each in layers]}
    if measured.shuffled:
        with_mask, without = (measured.shuffled[c] for c in (INTACT, MASK))
        effects["shuffled"] = [
            mask_effect(one.folds, other.folds, skip_keys, with_mask.counts)
            for one, other in zip(with_mask.layers, without.layers, strict=True)
        ]
    return effects


def _controls_table(tokens: Kind, plan: Plan, measured: Measured, skip_keys: int) -> pd.DataFrame:
    """Return the measures without skipped keys, and on shuffled tokens."""
    runs = [(tokens, measured.maps[INTACT], 0, INTACT)] if skip_keys else []
    runs += [
        ("shuffled", maps, skip_keys, condition) for condition, maps in measured.shuffled.items()
    ]
    return measures_table(
        (
            (
                {"tokens": kind, "skip_keys": skip, "kept": plan.name(condition)},
                measure(maps, skip),
            )
            for kind, maps, skip, condition in runs
        ),
        labels=("tokens", "skip_keys", "kept"),
    )


def _mean_covariance_table(measured: Measured, skip_keys: int) -> pd.DataFrame:
    return mean_covariance_table(
        [
            split_layer(
                index,
                layer.folds,
                layer.mean_term,
                layer.key_means[...],
                skip_keys,
                measured.intact.counts,
            )
            for index, layer in enumerate(measured.intact.layers)
            if layer.mean_term is not None and layer.key_means is not None
        ]
    )


def kept_patterns_of(
    layers: Sequence[LayerAttribution], measures: ConditionMeasures
) -> dict[Condition, list[KeptPattern]]:
    """Return what each condition leaves of every layer's pattern."""
    return {
        condition: [
            KeptPattern(
                amplitude=each.amplitude, locality=each.locality, share=layer.kept[condition]
            )
            for layer, each in zip(layers, of_condition, strict=True)
        ]
        for condition, of_condition in measures.items()
    }


def side_by_side(tables: Mapping[Replacement, pd.DataFrame]) -> pd.DataFrame:
    """Return tables of players or interactions as one, with a column `replacement`.

    Args:
        tables: per replacement, its table; columns that only the first has are empty in the others.
    """
    first = next(iter(tables.values()))
    named = [each.assign(replacement=name) for name, each in tables.items() if len(each)]
    columns = [*first.columns[:3], "replacement", *first.columns[3:]]
    return pd.concat(named or [first.assign(replacement=[])], ignore_index=True)[columns]
