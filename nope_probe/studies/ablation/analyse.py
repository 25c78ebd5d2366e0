"""From the score maps of all conditions to a run's tables, manifest and page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import pandas as pd

from nope_probe.analyses.attribution import (
    LayerAttribution,
    attribute_each_head,
    attributed,
    patterns_of,
)
from nope_probe.analyses.contrasts import Grams, contrast_grams, contrast_map, source_terms
from nope_probe.analyses.offsets import OffsetBins, bin_means, offset_bins
from nope_probe.analyses.pattern import Measures, measure, measure_heads, query_stride
from nope_probe.analyses.pattern_changes import MaskEffect, mask_effect
from nope_probe.analyses.pattern_rows import pattern_distance_sums, score_distance_sums
from nope_probe.analyses.splits import split_mean_covariance
from nope_probe.data.sequences import InputKind
from nope_probe.figures.explorer import Explorer, head_maps
from nope_probe.figures.panels import RowMaps
from nope_probe.hooks.layers.model import layers_of
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
from nope_probe.studies.engine import Engine
from nope_probe.studies.explorer import PAGE_BYTES, explorer_of
from nope_probe.studies.page import Report, strongest_row, with_page
from nope_probe.studies.study import Results
from nope_probe.studies.tables import (
    WITHOUT_SOURCES,
    columns_of,
    head_pattern_table,
    made_by_sources,
    mean_covariance_table,
    measures_table,
    non_relative_table,
    offsets_table,
    queries_table,
    sources_table,
    term_table,
    terms_table,
    weights_table,
)

HEADS_BYTES = 1 << 30
OF_HEADS = ("layer", "head")


def analyse(
    session: Session[Settings],
    plan: AblationPlan,
    measured: Measured,
    intact: IntactModel | None,
    results: Results,
) -> Run:
    """Attribute the lead and the pattern of every layer, and return the run.

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
    elif analysis.strongest_layer is None:
        heads = heads_table(Engine.of(session), measured.intact)
        tables |= {} if heads is None else {"heads": heads}
    gains = {} if measured.gains is None else measured.gains.gains
    manifest = replace(
        session.manifest_of(inputs),
        query_stride=query_stride(len(first.queries)),
        layers=tuple(plan.layers),
        windows=windows_of(measured.intact),
        lengths=session.lengths,
        half_width=analysis.half_width if plan.sources else None,
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

    def grams_of(self, named: Mapping[str, Iterable[Condition]]) -> list[Grams[Condition]]:
        """Return the inner products of some conditions of each layer.

        Args:
            named: the conditions, by replacement.
        """
        names = {c: (name, c) for name, conditions in named.items() for c in conditions}
        return [
            {question: gram.renamed(names) for question, gram in of_layer.items()}
            for of_layer in self.grams
        ]

    def attributed(self, named: Mapping[str, Iterable[Condition]]) -> list[LayerAttribution]:
        """Return the attribution of each layer from some conditions, by replacement."""
        layers = zip(self.grams_of(named), self.plan.layers, strict=True)
        return [attributed(grams, self.plan.sources, layer) for grams, layer in layers]

    @cached_property
    def layers(self) -> list[LayerAttribution]:
        """The attribution of each layer, from the conditions that replace no weight."""
        return self.attributed({NO_REPLACEMENT: self.measured.maps})

    @cached_property
    def by_replacement(self) -> dict[str, list[LayerAttribution]]:
        """The attribution of each layer, with the losses without weights, by replacement."""
        return {
            name: self.attributed({NO_REPLACEMENT: self.plan.of_sources, name: replaced})
            for name, replaced in self.measured.replaced.items()
        }

    @cached_property
    def measures(self) -> list[list[Measures]]:
        """The measures of each layer, in the order of the conditions, the intact model first."""
        return [measure(maps) for _, _, maps in self.conditions]

    @cached_property
    def strongest_layer(self) -> LayerAttribution | None:
        """The strongest layer, by lead and pattern of its mean map; None without a pattern."""
        rows = measures_table([({}, self.measures[0])], self.plan.layers, labels=())
        counts = next(iter(self.measured.intact.values())).counts
        best = strongest_row(rows, counts.tolist())
        return None if best is None else self.layers[self.plan.layers.index(int(best["layer"]))]

    @property
    def half_width(self) -> float | None:
        """Half the width of the widest interval of a source's loss, in the strongest layer."""
        if self.strongest_layer is None:
            return None
        losses = [x.losses for x in self.strongest_layer.by_question.values()]
        widths = [(loss.lost.high - loss.lost.low) / 2 for some in losses for loss in some.values()]
        return max((width for width in widths if width == width), default=None)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the run's tables by name."""
        tables = {
            "offsets": self._offsets_table(),
            "queries": queries_table(self.measured.intact),
        }
        if not self.plan.sources:
            return {"pattern": self._intact_table(), **tables}
        tables |= {
            "sources": sources_table(self.layers),
            "terms": terms_table(self.layers),
            "weights": weights_table({NO_REPLACEMENT: self.layers, **self.by_replacement}),
            "pattern": self._pattern_table(),
            "non_relative": non_relative_table(self._mask_effects(), self.plan.layers),
            "controls": self._controls_table(),
            "mean_covariance": self._mean_covariance_table(),
        }
        return tables | (self._head_tables() if self.plan.per_head else {})

    def _intact_table(self) -> pd.DataFrame:
        """Return the measures of the intact model, a row per layer."""
        return measures_table([({"removed": INTACT.name}, self.measures[0])], self.plan.layers)

    def _pattern_table(self) -> pd.DataFrame:
        """Return the measures of each condition, and how much of lead and pattern sources make."""
        labels = ("removed", "replacement")
        rows = [
            ({"removed": condition.name, "replacement": replacement}, measures)
            for (condition, replacement, _), measures in zip(
                self.conditions, self.measures, strict=True
            )
        ]
        table = measures_table(rows, self.plan.layers, labels)
        made = pd.DataFrame(
            made_by_sources(layer, condition.name)
            for condition, replacement, _ in self.conditions
            for layer in self.by_replacement.get(replacement, self.layers)
        )
        return pd.concat([table, made], axis=1)

    def _head_tables(self) -> dict[str, pd.DataFrame]:
        """Return what each head loses without each source and band, its terms, and their sizes."""
        maps = {condition: self.measured.maps[condition] for condition in self.plan.of_heads}
        heads = list(attribute_each_head(maps, self.plan.sources))
        return {
            "head_sources": sources_table(heads, OF_HEADS),
            "head_terms": terms_table(heads, OF_HEADS),
            "head_pattern": head_pattern_table(heads),
        }

    def explorer(self) -> Explorer:
        """Return the explorer of all that is removed, weights by the first replacement."""
        plan, measured = self.plan, self.measured
        maps, replaced = {NO_REPLACEMENT: measured.maps}, ""
        for replacement, of_replacement in [*measured.replaced.items()][:1]:
            maps[replacement] = of_replacement
            replaced = f" A removed weight's replacement is {replacement}."
        shown = {one: of_one for part in maps.values() for one, of_one in part.items()}
        return explorer_of(
            {one: [[layer] for layer in of_one.values()] for one, of_one in shown.items()},
            [[grams] for grams in self.grams_of(maps)],
            plan.sources,
            [*plan.of_sources, *plan.removed],
            layers=plan.layers,
            title="Remove a part of the model, and see what is lost",
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


def heads_table(
    engine: Engine, intact: Layers, max_bytes: int = HEADS_BYTES
) -> pd.DataFrame | None:
    """Return the amplitude of the pattern of every head: layer, head, nats with bounds.

    Args:
        engine: the model on the sequences of the run.
        intact: the maps of the means over heads; those of heads are captured where it has none.
        max_bytes: memory for the maps of the heads of one layer; None is returned if they need
            more, as for models with one head.
    """
    n_heads = max(layer.n_heads for layer in layers_of(engine.model))
    first = next(iter(intact.values()))
    n_cells = len(first.queries) * first.n
    if n_heads == 1 or 4 * engine.n_folds * n_heads * n_cells > max_bytes:
        return None
    alone, rows = replace(engine, checkpoint=None), []
    for number, layer in intact.items():
        maps = {number: layer} if layer.heads else alone.scores("", layers=[number], per_head=True)
        rows += [
            {"layer": layer, "head": head, **columns_of(measures, ("amplitude",))}
            for (layer, head), measures in measure_heads(maps).items()
        ]
    return pd.DataFrame(rows)
