"""From the score maps of all conditions to a run's tables, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from nope_probe.analyses.attribution import (
    LayerAttribution,
    LayerPlayers,
    attribute,
    attribute_losses,
    patterns_of,
)
from nope_probe.analyses.jackknife import mean_intervals
from nope_probe.analyses.offsets import bin_means, offset_bins
from nope_probe.analyses.pattern import Measures, measure, measure_heads, query_stride
from nope_probe.analyses.pattern_changes import KeptPattern, MaskEffect, mask_effect
from nope_probe.analyses.pattern_rows import (
    contrast_map,
    pattern_distance_sums,
    score_distance_sums,
)
from nope_probe.analyses.shapley import source_terms
from nope_probe.analyses.splits import split_mean_covariance
from nope_probe.conditions import INTACT, MASK, Condition
from nope_probe.data.sequences import Kind
from nope_probe.experiments.ablation.maps import RunMaps, write_folds, write_maps
from nope_probe.experiments.ablation.plan import ConditionMaps, Measured, Plan
from nope_probe.experiments.ablation.sections import report
from nope_probe.experiments.engine import Engine
from nope_probe.experiments.explorer import explorer_of
from nope_probe.experiments.sections import Report, strongest, with_page
from nope_probe.experiments.tables import (
    columns_of,
    interactions_table,
    mean_covariance_table,
    measures_table,
    non_relative_table,
    players_table,
    profiles_table,
    queries_table,
    sources_table,
    term_table,
)
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.stand_ins import WITH_GAIN, Replacement
from nope_probe.maps.layers import windows_of
from nope_probe.maps.maps import Layers
from nope_probe.runtime.folder import Run, StoredArrays
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

HEADS_BYTES = 1 << 30


def analyse(session: Session[RunSettings], plan: Plan, measured: Measured) -> Run:
    """Attribute the positional pattern of every layer, and return the run.

    Args:
        session: the run in progress.
        plan: the conditions.
        measured: their score maps.
    """
    inputs, skip_keys = session.sequences(), session.settings.n_skipped(session.sequences())
    analysis = Analysis(plan=plan, measured=measured, tokens=inputs.kind)
    intact = next(iter(measured.intact.values()))
    maps, folds = (session.checkpoint.scratch(name) for name in ("maps", "folds"))
    write_maps(maps, RunMaps(plan, measured))
    write_folds(folds, plan, measured)
    tables = analysis.tables()
    if analysis.strongest is None:
        heads = heads_table(Engine.of(session), measured.intact)
        tables |= {} if heads is None else {"heads": heads}
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys, intact.counts),
        "query_stride": query_stride(len(intact.queries)),
        "layers": list(plan.layers),
        "windows": windows_of(measured.intact),
        "lengths": session.lengths,
        **analysis.record(),
    }
    run = Run(
        manifest=manifest,
        arrays={"tokens": input_arrays(inputs)},
        files={"maps.safetensors": maps, "folds.safetensors": folds},
        tables=tables,
    )
    replacement = plan.substitutes[0].replacement if plan.removes_weights else ""

    def report_of(run: Run) -> Report:
        explorer = explorer_of(measured.maps, plan.switches, analysis.kept_patterns(), replacement)
        return report(replace(run, arrays={"maps": StoredArrays(maps)}), explorer)

    return with_page(session, run, report_of)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The measures of all conditions' maps.

    Attributes:
        plan: the conditions.
        measured: their score maps.
        tokens: the kind of the inputs.
    """

    plan: Plan
    measured: Measured
    tokens: Kind

    @cached_property
    def layers(self) -> list[LayerAttribution]:
        """The attribution of each layer to the sources and the players."""
        return self._attributed({})

    def _attributed(self, maps: ConditionMaps) -> list[LayerAttribution]:
        """Return the attribution to the player sets, with other maps of some conditions."""
        maps = self.measured.maps | maps
        return attribute(maps, self.plan.player_sets, sources=self.plan.sources)

    def _losses(self) -> dict[Replacement, list[LayerPlayers]]:
        """Return the pattern's loss without each weight under replacements that only check it."""
        sources = {condition: self.measured.maps[condition] for condition in self.plan.of_sources}
        return {
            name: attribute_losses(sources | maps, self.plan.player_sets)
            for name, maps in self.measured.checks.items()
        }

    @cached_property
    def measures(self) -> dict[Condition, list[Measures]]:
        """Per condition, the measures of each layer's pattern."""
        return {key: measure(maps) for key, maps in self.measured.maps.items()}

    @cached_property
    def strongest(self) -> LayerAttribution | None:
        """The layer whose mean over heads has the strongest pattern; None without a pattern."""
        rows = measures_table([({}, self.measures[INTACT])], self.plan.layers, labels=())
        counts = next(iter(self.measured.intact.values())).counts
        best = strongest(rows, counts.tolist())
        return None if best is None else self.layers[self.plan.layers.index(int(best["layer"]))]

    @property
    def half_width(self) -> float | None:
        """Half the width of the widest interval of a source's share, in the strongest layer."""
        if self.strongest is None:
            return None
        return max((term.share.high - term.share.low) / 2 for term in self.strongest.sources)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the run's tables by name."""
        first = self.plan.substitutes[0].replacement
        others = {name: self._attributed(maps) for name, maps in self.measured.others.items()}
        interactions = {name: interactions_table(layers) for name, layers in others.items()}
        all_layers: dict[Replacement, Sequence[LayerPlayers]] = {**others, **self._losses()}
        players = {name: players_table(layers) for name, layers in all_layers.items()}
        measured = [({"kept": self.plan.name(key)}, some) for key, some in self.measures.items()]
        return {
            "sources": sources_table(self.layers),
            "non_relative": non_relative_table(self._mask_effects(), self.plan.layers),
            "players": side_by_side({first: players_table(self.layers)} | players),
            "interactions": side_by_side({first: interactions_table(self.layers)} | interactions),
            "pattern": measures_table(measured, self.plan.layers),
            "controls": self._controls_table(),
            "mean_covariance": self._mean_covariance_table(),
            "offsets": self._offsets_table(),
            "queries": queries_table(self.measured.intact),
        }

    def record(self) -> dict[str, Any]:
        """Return the manifest's entries on conditions."""
        plan, sets = self.plan, {players.name: players for players in self.plan.player_sets}
        gains = {} if self.measured.gains is None else self.measured.gains.gains
        substitutes = (*plan.substitutes, *plan.checks)
        return {
            "half_width": self.half_width,
            "gains": gains.get("identity"),
            **{f"gains_{name}": gains.get(name) for name in WITH_GAIN if name != "identity"},
            "replacements": [substitute.replacement for substitute in substitutes],
            "player_sets": {name: [p.name for p in sets[name].players] for name in sets},
            "conditions": [plan.name(condition) for condition in plan.conditions],
            "positional_sources": list(plan.sources),
            "left_out": dict(plan.left_out),
            "conjunctions": {
                name: [layer.layer for layer in self.layers if layer.is_conjunction(name)]
                for name in sets
            },
        }

    def kept_patterns(self) -> dict[Condition, list[KeptPattern]]:
        """Return what each condition leaves of every layer's pattern."""
        return {
            condition: [
                KeptPattern(
                    amplitude=measures.amplitude_others,
                    locality=measures.locality,
                    share=layer.kept[condition],
                )
                for layer, measures in zip(self.layers, of_condition, strict=True)
            ]
            for condition, of_condition in self.measures.items()
        }

    def _mask_effects(self) -> dict[str, list[MaskEffect]]:
        """Return the mask's effect on the non-relative part, per kind of tokens."""
        effects: dict[str, list[MaskEffect]] = {
            self.tokens: [layer.non_relative for layer in self.layers]
        }
        if self.measured.shuffled:
            effects["shuffled"] = [
                mask_effect(patterns[INTACT], patterns[MASK])
                for patterns in (
                    patterns_of(self.measured.shuffled, layer) for layer in self.plan.layers
                )
            ]
        return effects

    def _controls_table(self) -> pd.DataFrame:
        """Return the measures with no key apart, and on shuffled tokens."""
        rows, skip_keys = [], next(iter(self.measured.intact.values())).skip_keys
        if skip_keys:
            labels = {"tokens": self.tokens, "skip_keys": 0, "kept": self.plan.name(INTACT)}
            rows.append((labels, measure(self.measured.intact, 0)))
        for condition, maps in self.measured.shuffled.items():
            labels = {"tokens": "shuffled", "skip_keys": skip_keys}
            labels["kept"] = self.plan.name(condition)
            rows.append((labels, measure(maps)))
        return measures_table(rows, self.plan.layers, labels=("tokens", "skip_keys", "kept"))

    def _mean_covariance_table(self) -> pd.DataFrame:
        """Return the mean and covariance terms, and where known the mean term's four parts."""
        positions, splits = self.measured.positions, []
        terms = None if positions is None else term_table(positions)
        for layer, maps in self.measured.intact.items():
            if maps.mean_term is not None:
                splits.append(split_mean_covariance(layer, maps.others))
        return mean_covariance_table(splits, terms)

    def _offsets_table(self) -> pd.DataFrame:
        """Return the table of offset profiles: layer, term, offset, and the mean with its bounds.

        The terms are `score`, `all` (the pattern) and those of `source_terms`, which add up to
        `all`.
        """
        contrasts, intact = source_terms(self.plan.sources), self.measured.intact
        needed = {INTACT, *(condition for term in contrasts.values() for condition in term)}
        of_intact = [maps.others for maps in intact.values()]
        n_offsets = of_intact[0].maps.n - 1 - of_intact[0].maps.skip_keys
        bins = offset_bins(n_offsets, self.plan.settings.offset_bins)
        patterns = {}
        for key in needed:
            seen = [  # on the cells that the intact model sees
                replace(pattern, maps=self.measured.maps[key][layer])
                for layer, pattern in zip(intact, of_intact, strict=True)
            ]
            patterns[key] = bin_means(seen, pattern_distance_sums, bins)
        terms = {"score": bin_means(of_intact, score_distance_sums, bins), "all": patterns[INTACT]}
        terms |= {name: contrast_map(term, patterns) for name, term in contrasts.items()}
        weights = of_intact[0].maps.weights
        profiles = {name: mean_intervals(means, weights) for name, means in terms.items()}
        return profiles_table(profiles, self.plan.layers, bins, n_offsets)


def heads_table(
    engine: Engine, intact: Layers, max_bytes: int = HEADS_BYTES
) -> pd.DataFrame | None:
    """Return the amplitude of the pattern of every head: layer, head, nats with bounds.

    Args:
        engine: the model on the sequences of the run.
        intact: the maps of the means over heads.
        max_bytes: memory for the maps of the heads of one layer; None is returned if they need
            more, as for models with one head.
    """
    n_heads = max(layer.n_heads for layer in layers_of(engine.model))
    first = next(iter(intact.values()))
    n_cells = len(first.queries) * first.n
    if n_heads == 1 or 4 * engine.n_folds * n_heads * n_cells > max_bytes:
        return None
    alone, rows = replace(engine, checkpoint=None), []
    for number in intact:
        maps = alone.scores(None, layers=[number], per_head=True)
        rows += [
            {"layer": layer, "head": head, **columns_of(measures, ("amplitude",))}
            for (layer, head), measures in measure_heads(maps).items()
        ]
    return pd.DataFrame(rows)


def side_by_side(tables: Mapping[Replacement, pd.DataFrame]) -> pd.DataFrame:
    """Return tables of players or interactions as one, with a column `replacement`.

    Args:
        tables: by replacement; columns that only the first table has are empty in the others.
    """
    first = next(iter(tables.values()))
    named = [table.assign(replacement=name) for name, table in tables.items() if len(table)]
    columns = [*first.columns[:3], "replacement", *first.columns[3:]]
    return pd.concat(named or [first.assign(replacement=[])], ignore_index=True)[columns]
