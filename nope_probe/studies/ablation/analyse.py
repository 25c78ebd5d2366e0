"""From the score maps of all conditions to a run's tables, manifest and page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import pandas as pd

from nope_probe.analyses.attribution import (
    MeanValue,
    mean_over_layers,
    patterns_of,
    sizes_of_terms,
    values_in,
    values_of_heads,
)
from nope_probe.analyses.contrasts import Grams, contrast_grams, contrast_map, source_terms
from nope_probe.analyses.offsets import OffsetBins, bin_means, offset_bins
from nope_probe.analyses.pattern import Measures, measure, query_stride
from nope_probe.analyses.pattern_changes import MaskEffect, mask_effect
from nope_probe.analyses.pattern_rows import pattern_distance_sums, score_distance_sums
from nope_probe.analyses.splits import split_mean_covariance
from nope_probe.data.sequences import InputKind
from nope_probe.figures.explorer import Explorer, head_maps
from nope_probe.figures.panels import RowMaps
from nope_probe.hooks.removing.components import wavelengths_of
from nope_probe.hooks.removing.stand_ins import WITH_GAIN
from nope_probe.maps.centred import row_centred
from nope_probe.maps.layers import windows_of
from nope_probe.maps.maps import Layers
from nope_probe.removal import INTACT, MASK, NO_REPLACEMENT, Condition
from nope_probe.run.checkpoint import write_folds
from nope_probe.run.folder import Run, StoredArrays
from nope_probe.run.identity import input_arrays
from nope_probe.run.session import Session
from nope_probe.studies.ablation.intact import IntactModel, contrasts, head_means
from nope_probe.studies.ablation.maps import RunMaps, named_scores, write_maps
from nope_probe.studies.ablation.page import report
from nope_probe.studies.ablation.plan import AblationPlan, Measured
from nope_probe.studies.ablation.settings import Settings
from nope_probe.studies.explorer import PAGE_BYTES, explorer_of
from nope_probe.studies.page import Report, with_page
from nope_probe.studies.study import Results
from nope_probe.studies.tables import (
    WITHOUT_SOURCES,
    head_pattern_table,
    mean_covariance_table,
    mean_table,
    measures_table,
    non_relative_table,
    offsets_table,
    pattern_table,
    queries_table,
    term_table,
    terms_table,
)

ALL_OF_IT = (NO_REPLACEMENT, INTACT)  # names the intact model's maps


def analyse(
    session: Session[Settings],
    plan: AblationPlan,
    measured: Measured,
    intact: IntactModel | None,
    results: Results,
) -> Run:
    """Measure the lead and the pattern of every layer in every condition, and return the run.

    Args:
        session: the run in progress.
        plan: the conditions.
        measured: their score maps.
        intact: what else is read of the intact model, where nothing is removed.
        results: those of its passes, by key.
    """
    inputs = session.sequences()
    analysis = Analysis(
        plan=plan, measured=measured, tokens=inputs.kind, offset_bins=session.settings.offset_bins
    )
    first = next(iter(measured.intact.values()))
    maps, folds = (session.checkpoint.scratch(name) for name in ("maps", "folds"))
    write_folds(folds, named_scores(measured))
    tables = analysis.tables()
    if intact is not None:
        bins = session.settings.offset_bins
        tables |= intact.tables(measured.intact, results, bins)
        tables["pattern"] = tables["pattern"].join(contrasts(measured.intact))
    gains = {} if measured.gains is None else measured.gains.gains
    manifest = replace(
        session.manifest_of(inputs),
        query_stride=query_stride(len(first.queries)),
        layers=tuple(plan.layers),
        windows=windows_of(measured.intact),
        lengths=session.lengths,
        replacements=tuple(plan.replacements),
        conditions=tuple(condition.name for condition in (*plan.plain, *plan.replacing)),
        removed=tuple(condition.name for condition in plan.removed),
        positional_sources=tuple(plan.sources),
        left_out=dict(plan.left_out),
        results={
            "wavelengths": wavelengths_of(session.loaded.model, chain.from_iterable(plan.removed)),
            "gains": gains.get("identity"),
            **{f"gains_{name}": gains.get(name) for name in WITH_GAIN if name != "identity"},
        },
    )
    arrays = {"tokens": input_arrays(inputs)}
    files = {"folds.safetensors": folds}
    if intact is not None:
        arrays |= {"maps": intact.maps(measured.intact, results)}
        of_intact = Run(manifest=manifest, arrays=arrays, files=files, tables=tables)
        patterns = head_patterns(measured.intact, tables["heads"]) if "heads" in tables else ""
        return with_page(session, of_intact, partial(report, heads=patterns))
    write_maps(maps, RunMaps(plan, measured))
    files["maps.safetensors"] = maps
    run = Run(manifest=manifest, arrays=arrays, files=files, tables=tables)

    def report_of(run: Run) -> Report:
        return report(replace(run, arrays={"maps": StoredArrays(maps)}), analysis.explorer())

    return with_page(session, run, report_of)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The measures of all conditions' maps.

    Attributes:
        plan: the conditions.
        measured: their score maps.
        tokens: the kind of the inputs.
        offset_bins: which distances share a mean.
    """

    plan: AblationPlan
    measured: Measured
    tokens: InputKind
    offset_bins: OffsetBins = "auto"

    @cached_property
    def conditions(self) -> list[tuple[Condition, str, Layers]]:
        """Each condition with its replacement, if it replaces weights, and its maps."""
        by_replacement = {NO_REPLACEMENT: self.measured.maps, **self.measured.replaced}
        return [
            (condition, replacement, maps)
            for replacement, of_replacement in by_replacement.items()
            for condition, maps in of_replacement.items()
        ]

    @cached_property
    def grams(self) -> list[Grams[tuple[str, Condition]]]:
        """The inner products of all conditions of each layer, by replacement and condition."""
        named = {(replacement, condition): maps for condition, replacement, maps in self.conditions}
        return [contrast_grams(patterns_of(named, layer)) for layer in self.plan.layers]

    @cached_property
    def keys(self) -> list[tuple[str, Condition]]:
        """The name of each condition's maps in `grams`: its replacement, and the condition."""
        return [(replacement, condition) for condition, replacement, _ in self.conditions]

    @cached_property
    def of_sources(self) -> list[Grams[Condition]]:
        """The inner products of the sources' conditions of each layer."""
        names = {condition: (NO_REPLACEMENT, condition) for condition in self.plan.of_sources}
        return [{name: gram.renamed(names) for name, gram in layer.items()} for layer in self.grams]

    @cached_property
    def measures(self) -> list[list[Measures]]:
        """The measures of each layer, in the order of the conditions, the intact model first."""
        return [measure(maps) for _, _, maps in self.conditions]

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the run's tables by name."""
        tables = {
            "offsets": self._offsets_table(),
            "queries": queries_table(self.measured.intact),
        }
        if not self.plan.sources:
            return {"pattern": self._intact_table(), **tables}
        sizes = [
            ({"layer": layer}, {of: sizes_of_terms(grams, of) for of in grams})
            for layer, grams in zip(self.plan.layers, self.of_sources, strict=True)
        ]
        tables |= {
            "pattern": self._pattern_table(),
            "terms": terms_table(sizes),
            "non_relative": non_relative_table(self._mask_effects(), self.plan.layers),
            "controls": self._controls_table(),
            "mean_covariance": self._mean_covariance_table(),
        }
        if len(self.plan.layers) > 1:
            tables["over_layers"] = self._mean_table()
        return tables | (self._head_tables() if self.plan.per_head else {})

    def _intact_table(self) -> pd.DataFrame:
        """Return the measures of the intact model, a row per layer."""
        return measures_table([({"removed": INTACT.name}, self.measures[0])], self.plan.layers)

    def _pattern_table(self) -> pd.DataFrame:
        """Return the values of each layer in each condition, and the measures of its pattern."""
        rows = [
            ({"removed": condition.name, "replacement": replacement}, measures)
            for (condition, replacement, _), measures in zip(
                self.conditions, self.measures, strict=True
            )
        ]
        values = (values_in(of, key, ALL_OF_IT) for key in self.keys for of in self.grams)
        return pattern_table(rows, values, self.plan.layers)

    def _mean_table(self) -> pd.DataFrame:
        """Return the means over layers of lead and kept in each condition."""
        return mean_table(
            ({"removed": condition.name, "replacement": replacement}, self._means_of(key))
            for (condition, replacement, _), key in zip(self.conditions, self.keys, strict=True)
        )

    def _means_of(self, key: tuple[str, Condition]) -> dict[str, MeanValue]:
        """Return the means over layers of lead and kept in one condition, where layers have any."""
        leads = [gram for layer in self.grams if (gram := layer.get("lead")) is not None]
        kept = [(layer["pattern"].kept(key, ALL_OF_IT), layer["pattern"]) for layer in self.grams]
        known = [(of, gram.kept(ALL_OF_IT, ALL_OF_IT)) for of, gram in kept if of is not None]
        means = {}
        if leads:
            whole = [gram.mean({ALL_OF_IT: 1.0}) for gram in leads]
            means["lead"] = mean_over_layers([gram.mean({key: 1.0}) for gram in leads], whole)
        if known:
            left, whole = ([x for x in side if x is not None] for side in zip(*known, strict=True))
            means["kept"] = mean_over_layers(left, whole)
        return means

    def _head_tables(self) -> dict[str, pd.DataFrame]:
        """Return the values of each head without sources and bands, and the sizes of its terms."""
        maps = {condition: self.measured.maps[condition] for condition in self.plan.of_heads}
        heads = list(values_of_heads(maps))
        terms = terms_table(({"layer": x.layer, "head": x.head}, x.terms) for x in heads)
        return {"head_pattern": head_pattern_table(heads), "head_terms": terms}

    def explorer(self) -> Explorer:
        """Return the explorer of all that is removed, weights by the first replacement."""
        first = next(iter(self.measured.replaced), NO_REPLACEMENT)
        chosen = [key for key in self.keys if key[0] in (NO_REPLACEMENT, first)]
        by_key = {key: maps for key, (_, _, maps) in zip(self.keys, self.conditions, strict=True)}
        names = {condition: (name, condition) for name, condition in chosen}
        grams = [{of: gram.renamed(names) for of, gram in layer.items()} for layer in self.grams]
        replaced = f" A removed weight's replacement is {first}." * bool(self.measured.replaced)
        return explorer_of(
            {c: [[layer] for layer in by_key[key].values()] for c, key in names.items()},
            [[of_layer] for of_layer in grams],
            layers=self.plan.layers,
            title="Remove a part of the model, and see what is left",
            note="Maps and numbers are the run's, over all its sequences. What is removed is "
            f"removed in every layer.{replaced} Brackets: 95% intervals.",
            max_bytes=PAGE_BYTES,
        )

    def _mask_effects(self) -> dict[str, list[MaskEffect]]:
        """Return the mask's effect on the non-relative part, per kind of tokens."""
        both = (INTACT, MASK)
        maps = {self.tokens: {condition: self.measured.maps[condition] for condition in both}}
        if self.measured.shuffled:
            maps["shuffled"] = self.measured.shuffled
        return {
            tokens: [
                mask_effect(*patterns_of(of_tokens, layer).values()) for layer in self.plan.layers
            ]
            for tokens, of_tokens in maps.items()
        }

    def _controls_table(self) -> pd.DataFrame:
        """Return the measures on shuffled tokens."""
        rows = [
            ({"tokens": "shuffled", "removed": condition.name}, measure(maps))
            for condition, maps in self.measured.shuffled.items()
        ]
        return measures_table(rows, self.plan.layers, labels=("tokens", "removed"))

    def _mean_covariance_table(self) -> pd.DataFrame:
        """Return the mean and covariance terms, and where known the mean term's four parts."""
        positions, splits = self.measured.positions, []
        terms = None if positions is None else term_table(positions)
        for layer, maps in self.measured.intact.items():
            if maps.mean_term is not None:
                splits.append(split_mean_covariance(layer, maps.pattern))
        return mean_covariance_table(splits, terms)

    def _offsets_table(self) -> pd.DataFrame:
        """Return the table of offset profiles: layer, term, offset, and the mean with its bounds.

        The terms are `score`, `pattern`, those of `source_terms`, and `without_sources`: these add
        up to `pattern`.
        """
        intact = self.measured.intact
        of_terms = source_terms(self.plan.sources)
        if self.plan.sources:
            of_terms[WITHOUT_SOURCES] = {Condition(self.plan.sources): 1.0}
        needed = {INTACT, *(condition for term in of_terms.values() for condition in term)}
        of_intact = [maps.pattern for maps in intact.values()]
        bins = offset_bins(of_intact[0].maps.n_offsets, self.offset_bins)
        patterns = {}
        for key in needed:
            seen = [  # on the cells that the intact model sees
                replace(pattern, maps=self.measured.maps[key][layer])
                for layer, pattern in zip(intact, of_intact, strict=True)
            ]
            patterns[key] = bin_means(seen, pattern_distance_sums, bins)
        terms = {
            "score": bin_means(of_intact, score_distance_sums, bins),
            "pattern": patterns[INTACT],
        }
        terms |= {name: contrast_map(term, patterns) for name, term in of_terms.items()}
        return offsets_table(terms, intact, bins)


def head_patterns(layers: Layers, heads: pd.DataFrame) -> str:
    """Return the positional pattern of every head, for the page."""
    first = next(iter(layers.values()))
    patterns = row_centred(head_means(layers), first.skip_keys, first.queries)
    return head_maps(RowMaps(values=patterns.float().numpy(), queries=first.queries.numpy()), heads)
