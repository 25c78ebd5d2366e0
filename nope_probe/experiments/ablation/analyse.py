"""From the score maps of all conditions to tables and maps, and to what a run holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from nope_probe.analyses.mean_covariance import split_mean_covariance
from nope_probe.analyses.pattern import measure, row_centred
from nope_probe.analyses.shapley import INTACT, MASK, PlayerSet, shapley, source_terms
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.ablation.conditions import Measured
from nope_probe.experiments.ablation.page import ablation_page
from nope_probe.experiments.ablation.plan import Plan
from nope_probe.experiments.ablation.summary import headline
from nope_probe.experiments.tables import (
    interactions_table,
    mean_covariance_table,
    measures_table,
    non_relative_table,
    players_table,
    sources_table,
)
from nope_probe.hooks.folds import pooled
from nope_probe.runtime.folder import Run
from nope_probe.runtime.provenance import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

Maps = dict[str, Float[Tensor, "layer query_pos key_pos"]]


@dataclass(frozen=True, kw_only=True)
class AblationStudy:
    """Where a model's positional pattern comes from, and which weights it needs.

    Attributes:
        sources: per layer and term (content, mask, rope, ...), its RMS in nats and its share.
        players: per layer and player, its Shapley share, what is lost without it, and alone.
        interactions: per layer and players, the share of what only they bring together.
        patterns: per condition and layer, the measures of the pattern.
        non_relative: per layer, the RMS of the non-relative part with and without the mask, nats.
        controls: the measures with no key left out, and on shuffled tokens where these were given.
        mean_covariance: per layer, the mean and the covariance term; empty where scores are no q.k.
        maps: `score/<kept>`, `source/<term>`, `mean_covariance/<term>`, `shapley/<player>`: float32
            [layer, query_pos, key_pos], nats.
        layers: what the tables were made from.
        skip_keys: how many first keys the patterns leave out.
    """

    sources: pd.DataFrame
    players: pd.DataFrame
    interactions: pd.DataFrame
    patterns: pd.DataFrame
    non_relative: pd.DataFrame
    controls: pd.DataFrame
    mean_covariance: pd.DataFrame
    maps: dict[str, Float[np.ndarray, "layer query_pos key_pos"]]
    layers: list[LayerAttribution]
    skip_keys: int

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables, under the names of a run's CSV files."""
        return {
            "sources": self.sources,
            "non_relative": self.non_relative,
            "players": self.players,
            "interactions": self.interactions,
            "pattern": self.patterns,
            "controls": self.controls,
            "mean_covariance": self.mean_covariance,
        }


def study_of(plan: Plan, measured: Measured, inputs: Sequences, skip_keys: int) -> AblationStudy:
    """Attribute the positional pattern of every layer.

    Args:
        plan: the conditions.
        measured: their score maps.
        inputs: the sequences that they were measured on.
        skip_keys: how many first keys to leave out.
    """
    layers = attribute(measured.maps, plan.player_sets, position=plan.position, skip_keys=skip_keys)
    again = [
        attribute(
            {**measured.maps, **each},
            plan.player_sets[:1],
            position=plan.position,
            skip_keys=skip_keys,
        )
        for each in measured.reparametrised
    ]
    return AblationStudy(
        sources=sources_table(layers),
        players=players_table(layers, again),
        interactions=interactions_table(layers),
        patterns=_pattern_table(plan, measured, skip_keys),
        non_relative=non_relative_table(_mask_effects(inputs, layers, measured, skip_keys)),
        controls=_controls_table(inputs, plan, measured, skip_keys),
        mean_covariance=_mean_covariance_table(measured, skip_keys),
        maps={
            name: each.float().numpy() for name, each in _maps(plan, measured, skip_keys).items()
        },
        layers=layers,
        skip_keys=skip_keys,
    )


def analyse(session: Session[RunSettings], plan: Plan, measured: Measured) -> Run:
    """Attribute the positional pattern of every layer, and put the run together."""
    inputs, skip_keys = session.sequences(), session.settings.n_skipped(session.sequences())
    study = study_of(plan, measured, inputs, skip_keys)
    maps, tables = study.maps, study.tables
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys),
        "gains": None if measured.gains is None else {**measured.gains.c},
        "player_sets": {each.name: [p.name for p in each.players] for each in plan.player_sets},
        "conditions": [plan.name(condition) for condition in plan.conditions],
        "position": plan.position,
        "conjunctions": _conjunctions(study.layers, plan.player_sets),
    }
    page = ablation_page(maps, tables, manifest, headline(manifest, tables))
    arrays = {
        "tokens": input_arrays(inputs),
        "maps": maps,
        "folds": _packed_folds(plan, measured),
    }
    return Run(manifest=manifest, arrays=arrays, tables=tables, page=page)


def _mask_effects(
    inputs: Sequences, layers: Sequence[LayerAttribution], measured: Measured, skip_keys: int
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


def tokens_kind(inputs: Sequences) -> str:
    """Name what a run's windows hold, as its tables do."""
    if inputs.inputs.is_floating_point():
        return "vectors"
    return next((kind for kind in ("shuffled", "random") if kind in inputs.name), "text")


def _conjunctions(
    layers: Sequence[LayerAttribution], player_sets: Sequence[PlayerSet]
) -> dict[str, list[int]]:
    """Name per game the layers in which all players get about the same share."""
    return {
        game.name: [each.layer for each in layers if each.is_conjunction(game.name)]
        for game in player_sets
    }


def _pattern_table(plan: Plan, measured: Measured, skip_keys: int) -> pd.DataFrame:
    return measures_table(
        ({"kept": plan.name(condition)}, measure(maps.folds, skip_keys))
        for condition, maps in measured.maps.items()
    )


def _controls_table(
    inputs: Sequences, plan: Plan, measured: Measured, skip_keys: int
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


def _mean_covariance_table(measured: Measured, skip_keys: int) -> pd.DataFrame:
    intact = measured.intact
    if intact.mean_term is None or intact.key_means is None:
        return pd.DataFrame()
    return mean_covariance_table(
        split_mean_covariance(intact.folds, intact.mean_term, intact.key_means, skip_keys)
    )


def _maps(plan: Plan, measured: Measured, skip_keys: int) -> Maps:
    means = {condition: each.mean for condition, each in measured.maps.items()}
    maps: Maps = {f"score/{plan.name(condition)}": mean for condition, mean in means.items()}
    patterns = {condition: row_centred(mean, skip_keys) for condition, mean in means.items()}
    for name, term in source_terms(plan.position).items():
        maps[f"source/{name}"] = term_map(term, patterns)
    if measured.intact.mean_term is not None:
        mean = pooled(measured.intact.mean_term, measured.intact.counts)
        maps["mean_covariance/mean"] = mean
        maps["mean_covariance/covariance"] = measured.intact.mean - mean
    for index, players in enumerate(plan.player_sets):
        prefix = "shapley" if index == 0 else f"shapley_{players.name}"
        for player in players.players:
            maps[f"{prefix}/{player.name}"] = term_map(shapley(players, player), patterns)
    return maps


def _packed_folds(plan: Plan, measured: Measured) -> dict[str, np.ndarray]:
    """Pack each condition's fold maps as lower triangles, diagonal included."""
    n = measured.intact.folds.shape[-1]
    row, column = torch.tril_indices(n, n)
    return {
        f"score/{plan.name(condition)}": maps.folds[..., row, column].float().numpy()
        for condition, maps in measured.maps.items()
    }
