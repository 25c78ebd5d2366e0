"""From what was measured to what a run holds: maps, folds, tables, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attribution import (
    LayerAttribution,
    MaskEffect,
    attribute,
    mask_effect,
    term_map,
)
from nope_probe.analyses.game import INTACT, MASK, Condition, Game, shapley, source_terms
from nope_probe.analyses.pattern import measure, row_centred
from nope_probe.analyses.routes import split_routes
from nope_probe.data import Windows
from nope_probe.experiment import Measured, Plan
from nope_probe.hooks.capture import ScoreMaps, pooled
from nope_probe.models import Loaded
from nope_probe.provenance import kept_inputs, provenance
from nope_probe.report_ablate import ablation_page
from nope_probe.results import Run
from nope_probe.summary import answer
from nope_probe.tables import (
    interactions_table,
    measures_table,
    non_relative_table,
    players_table,
    routes_table,
    sources_table,
)

Maps = dict[str, Float[Tensor, "layer query_pos key_pos"]]


def assemble(
    *,
    settings: Mapping[str, Any],
    loaded: Loaded,
    inputs: Windows,
    plan: Plan,
    measured: Measured,
    gauges: Sequence[Mapping[Condition, ScoreMaps]],
    skip_keys: int,
    started: float,
) -> Run:
    """Analyse what was measured and put a run together."""
    folds = {condition: maps.folds for condition, maps in measured.maps.items()}
    layers = attribute(folds, plan.games, position=plan.position, skip_keys=skip_keys)
    again = [_attribute_again({**measured.maps, **each}, plan, skip_keys) for each in gauges]
    tables = {
        "sources": sources_table(layers),
        "non_relative": non_relative_table(_mask_effects(inputs, layers, measured, skip_keys)),
        "players": players_table(layers, again),
        "interactions": interactions_table(layers),
        "pattern": _pattern_table(plan, measured, skip_keys),
        "controls": _controls_table(inputs, plan, measured, skip_keys),
        "routes": _routes_table(measured, skip_keys),
    }
    maps = {name: each.float().numpy() for name, each in _maps(plan, measured, skip_keys).items()}
    manifest = {
        **provenance(
            settings=settings,
            loaded=loaded,
            inputs=inputs,
            skip_keys=skip_keys,
            started=started,
        ),
        "gains": None if measured.gains is None else {**measured.gains.c},
        "games": {game.name: [p.name for p in game.players] for game in plan.games},
        "conditions": [plan.name(condition) for condition in plan.conditions],
        "position": plan.position,
        "conjunctions": _conjunctions(layers, plan.games),
    }
    page = ablation_page(maps, tables, manifest, answer(manifest, tables))
    arrays = {
        "tokens": kept_inputs(inputs),
        "maps": maps,
        "folds": _packed_folds(plan, measured),
    }
    return Run(manifest=manifest, arrays=arrays, tables=tables, page=page)


def _attribute_again(
    maps: Mapping[Condition, ScoreMaps], plan: Plan, skip_keys: int
) -> list[LayerAttribution]:
    return attribute(
        {condition: each.folds for condition, each in maps.items()},
        plan.games[:1],
        position=plan.position,
        skip_keys=skip_keys,
    )


def _mask_effects(
    inputs: Windows, layers: Sequence[LayerAttribution], measured: Measured, skip_keys: int
) -> dict[str, list[MaskEffect]]:
    """Compare the non-relative part with and without the mask, on the run's tokens and shuffled."""
    effects = {tokens_kind(inputs): [each.non_relative for each in layers]}
    if measured.shuffled:
        with_mask, without = (measured.shuffled[c].folds for c in (INTACT, MASK))
        effects["shuffled"] = [
            mask_effect(with_mask[:, layer], without[:, layer], skip_keys)
            for layer in range(with_mask.shape[1])
        ]
    return effects


def tokens_kind(inputs: Windows) -> str:
    """Name what a run's windows hold, as its tables do."""
    if inputs.inputs.is_floating_point():
        return "vectors"
    return next((kind for kind in ("shuffled", "random") if kind in inputs.name), "text")


def _conjunctions(
    layers: Sequence[LayerAttribution], games: Sequence[Game]
) -> dict[str, list[int]]:
    """Name per game the layers in which all players get about the same share."""
    return {
        game.name: [each.layer for each in layers if each.is_conjunction(game.name)]
        for game in games
    }


def _pattern_table(plan: Plan, measured: Measured, skip_keys: int) -> pd.DataFrame:
    return measures_table(
        ({"kept": plan.name(condition)}, measure(maps.folds, skip_keys))
        for condition, maps in measured.maps.items()
    )


def _controls_table(
    inputs: Windows, plan: Plan, measured: Measured, skip_keys: int
) -> pd.DataFrame:
    """Measure what content and sinks could have passed for: no skipped keys, shuffled tokens."""
    runs = [(tokens_kind(inputs), measured.maps[INTACT], 0, INTACT)] if skip_keys else []
    runs += [
        ("shuffled", maps, skip_keys, condition) for condition, maps in measured.shuffled.items()
    ]
    return measures_table(
        (
            {"tokens": tokens, "skip_keys": skip, "kept": plan.name(condition)},
            measure(maps.folds, skip),
        )
        for tokens, maps, skip, condition in runs
    )


def _routes_table(measured: Measured, skip_keys: int) -> pd.DataFrame:
    intact = measured.intact
    if intact.mean_route is None or intact.key_means is None:
        return pd.DataFrame()
    return routes_table(split_routes(intact.folds, intact.mean_route, intact.key_means, skip_keys))


def _maps(plan: Plan, measured: Measured, skip_keys: int) -> Maps:
    means = {condition: each.mean for condition, each in measured.maps.items()}
    maps: Maps = {f"score/{plan.name(condition)}": mean for condition, mean in means.items()}
    patterns = {condition: row_centred(mean, skip_keys) for condition, mean in means.items()}
    for name, term in source_terms(plan.position).items():
        maps[f"source/{name}"] = term_map(term, patterns)
    if measured.intact.mean_route is not None:
        route = pooled(measured.intact.mean_route, measured.intact.counts)
        maps |= {"route/mean": route, "route/content": measured.intact.mean - route}
    for index, game in enumerate(plan.games):
        prefix = "shapley" if index == 0 else f"shapley_{game.name}"
        for player in game.players:
            maps[f"{prefix}/{player.name}"] = term_map(shapley(game, player), patterns)
    return maps


def _packed_folds(plan: Plan, measured: Measured) -> dict[str, np.ndarray]:
    """Pack each condition's fold maps as lower triangles, diagonal included."""
    n = measured.intact.folds.shape[-1]
    row, column = torch.tril_indices(n, n)
    return {
        f"score/{plan.name(condition)}": maps.folds[..., row, column].float().numpy()
        for condition, maps in measured.maps.items()
    }
