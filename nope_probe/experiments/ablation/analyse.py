"""From the score maps of all conditions to what a run holds: tables, maps, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attribution import LayerAttribution, attribute
from nope_probe.analyses.contrasts import contrast_map
from nope_probe.analyses.mask_effect import MaskEffect, mask_effect
from nope_probe.analyses.mean_covariance import split_mean_covariance
from nope_probe.analyses.pattern import measure, row_centred
from nope_probe.analyses.player_attribution import BASE
from nope_probe.analyses.shapley import (
    INTACT,
    MASK,
    Condition,
    PlayerSet,
    base,
    shapley,
    source_terms,
)
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.ablation.conditions import ConditionMaps, Measured
from nope_probe.experiments.ablation.offsets import source_offsets_table
from nope_probe.experiments.ablation.page import ablation_page
from nope_probe.experiments.ablation.plan import Plan
from nope_probe.experiments.ablation.side_by_side import side_by_side
from nope_probe.experiments.ablation.summary import headline
from nope_probe.experiments.explore.conditions import explorer_of
from nope_probe.experiments.tables import (
    interactions_table,
    mean_covariance_table,
    measures_table,
    non_relative_table,
    players_table,
    sources_table,
)
from nope_probe.hooks.folds import pack_triangle, pooled
from nope_probe.runtime.folder import Run
from nope_probe.runtime.provenance import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

Maps = dict[str, Float[Tensor, "layer query_pos key_pos"]]


def analyse(session: Session[RunSettings], plan: Plan, measured: Measured) -> Run:
    """Attribute the positional pattern of every layer, and return the run."""
    inputs, skip_keys = session.sequences(), session.settings.n_skipped(session.sequences())
    layers = attribute_layers(measured.maps, plan, plan.player_sets, skip_keys)
    tables = tables_of(plan, measured, layers, tokens_kind(inputs), skip_keys)
    maps = {name: each.float().numpy() for name, each in maps_of(plan, measured, skip_keys).items()}
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys, measured.intact.counts),
        **_attribution_record(plan, measured, layers),
    }
    return Run(
        manifest=manifest,
        arrays={
            "tokens": input_arrays(inputs),
            "maps": maps,
            "folds": _packed_folds(plan, measured),
        },
        tables=tables,
        page=ablation_page(
            maps,
            tables,
            manifest,
            headline(manifest, tables),
            explorer_of(measured.maps, plan.player_sets, skip_keys),
        ),
    )


def attribute_layers(
    maps: ConditionMaps, plan: Plan, player_sets: Sequence[PlayerSet], skip_keys: int
) -> list[LayerAttribution]:
    """Return the attribution of each layer to the plan's sources and to some player sets."""
    return attribute(maps, player_sets, position=plan.position, skip_keys=skip_keys)


def tables_of(
    plan: Plan,
    measured: Measured,
    layers: Sequence[LayerAttribution],
    tokens: str,
    skip_keys: int,
) -> dict[str, pd.DataFrame]:
    """Return the run's tables by name.

    Args:
        plan: the conditions.
        measured: their score maps.
        layers: the attribution of each layer.
        tokens: the kind of the run's inputs, as `tokens_kind` returns it.
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
        "pattern": _pattern_table(plan, measured, skip_keys),
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
    tokens: str, layers: Sequence[LayerAttribution], measured: Measured, skip_keys: int
) -> dict[str, list[MaskEffect]]:
    """Return the mask's effect on the non-relative part, on the run's tokens and on shuffled."""
    effects = {tokens: [each.non_relative for each in layers]}
    if measured.shuffled:
        with_mask, without = (measured.shuffled[c] for c in (INTACT, MASK))
        effects["shuffled"] = [
            mask_effect(
                with_mask.folds[:, layer], without.folds[:, layer], skip_keys, with_mask.counts
            )
            for layer in range(with_mask.folds.shape[1])
        ]
    return effects


def tokens_kind(inputs: Sequences) -> str:
    """Return the kind of a run's inputs: text, shuffled, random or vectors."""
    if inputs.inputs.is_floating_point():
        return "vectors"
    return next((kind for kind in ("shuffled", "random") if kind in inputs.name), "text")


def _pattern_table(plan: Plan, measured: Measured, skip_keys: int) -> pd.DataFrame:
    return measures_table(
        ({"kept": plan.name(condition)}, measure(maps, skip_keys))
        for condition, maps in measured.maps.items()
    )


def _controls_table(tokens: str, plan: Plan, measured: Measured, skip_keys: int) -> pd.DataFrame:
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
    intact = measured.intact
    if intact.mean_term is None or intact.key_means is None:
        return mean_covariance_table([])
    return mean_covariance_table(
        split_mean_covariance(
            intact.folds, intact.mean_term, intact.key_means, skip_keys, intact.counts
        )
    )


def maps_of(plan: Plan, measured: Measured, skip_keys: int) -> Maps:
    """Return the run's maps by name, nats.

    `score/<kept>` per condition (of further replacements `score_<replacement>/<kept>`) and
    `mean_covariance/<term>` are score maps; `pattern/all`, `pattern/mean_term`,
    `pattern/covariance_term`, `source/<term>` and `shapley/<player>` (of further player sets
    `shapley_<set>/<player>`, of further replacements these with `_<replacement>` before the slash)
    are patterns. The Shapley maps of a set, with that of `base` where no source plays, add up to
    the positional part of the pattern.
    """
    means = {condition: each.mean for condition, each in measured.maps.items()}
    patterns = {condition: row_centred(mean, skip_keys) for condition, mean in means.items()}
    maps: Maps = {f"score/{plan.name(condition)}": mean for condition, mean in means.items()}
    for replacement, others in measured.others.items():
        for condition, each in others.items():
            maps[f"score_{replacement}/{plan.name(condition)}"] = each.mean
    maps["pattern/all"] = patterns[INTACT]
    for name, term in source_terms(plan.position).items():
        maps[f"source/{name}"] = contrast_map(term, patterns)
    for name, term_map in _mean_covariance_maps(measured).items():
        maps[f"mean_covariance/{name}"] = term_map
        maps[f"pattern/{name}_term"] = row_centred(term_map, skip_keys)
    maps |= _shapley_maps(plan, patterns)
    for replacement, others in measured.others.items():
        changed = {each: row_centred(kept.mean, skip_keys) for each, kept in others.items()}
        maps |= _shapley_maps(plan, {**patterns, **changed}, f"_{replacement}")
    return maps


def _shapley_maps(plan: Plan, patterns: Mapping[Condition, Tensor], suffix: str = "") -> Maps:
    """Return the Shapley maps of all player sets from the patterns of all conditions."""
    maps: Maps = {}
    for index, players in enumerate(plan.player_sets):
        prefix = ("shapley" if index == 0 else f"shapley_{players.name}") + suffix
        for player in players.players:
            maps[f"{prefix}/{player.name}"] = contrast_map(shapley(players, player), patterns)
        if not players.has_source:
            maps[f"{prefix}/{BASE}"] = contrast_map(base(players), patterns)
    return maps


def _mean_covariance_maps(measured: Measured) -> Maps:
    intact = measured.intact
    if intact.mean_term is None:
        return {}
    mean = pooled(intact.mean_term, intact.counts)
    return {"mean": mean, "covariance": intact.mean - mean}


def _packed_folds(plan: Plan, measured: Measured) -> dict[str, np.ndarray]:
    """Return each condition's fold maps as lower triangles, diagonal included."""
    named = {f"score/{plan.name(condition)}": each for condition, each in measured.maps.items()}
    for replacement, others in measured.others.items():
        for condition, each in others.items():
            named[f"score_{replacement}/{plan.name(condition)}"] = each
    return {name: pack_triangle(maps.folds).float().numpy() for name, maps in named.items()}
