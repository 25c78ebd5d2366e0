"""The ablate command's report, drawn from what a run folder holds: it needs no model, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from nope_probe.experiments.ablation import findings
from nope_probe.experiments.ablation.parts import Parts
from nope_probe.experiments.ablation.player_sections import player_sections
from nope_probe.experiments.findings import measure_finding
from nope_probe.experiments.split_page import split_sections
from nope_probe.figures import measures, shares
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.reports import notes
from nope_probe.reports.explorer import explorer_section
from nope_probe.reports.page import Section, page


def ablation_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    headline: Sequence[str],
    explorer: Explorer | None = None,
) -> str:
    """Return the report of an ablation run.

    Args:
        maps: arrays or tensors [n_layers, query_pos, key_pos] in nats: `score/<kept>` of the intact
            model, the first of the manifest's conditions, and patterns: `pattern/all`,
            `pattern/mean_term`, `pattern/covariance_term`, `source/<term>`, `shapley/<player>` and
            `shapley_circuits/<player>` of the first replacement of the weights, and of the others
            `shapley_<replacement>/<player>` and `shapley_circuits_<replacement>/<player>`.
        tables: `sources`, `players`, `interactions`, `pattern`, `non_relative`, `controls`,
            `mean_covariance`; those that a run does not have may be missing or empty. Where weights
            were replaced in several ways, `players` and `interactions` say which.
        manifest: what was run.
        headline: the result, a sentence each.
        explorer: the patterns of all conditions behind switches.

    Raises:
        KeyError: if the intact model's map or pattern is missing.
    """
    model = manifest.get("model", {})
    name = model.get("name") if isinstance(model, Mapping) else model
    title = f"The sources of the positional pattern of {name or 'a model'}"
    parts = Parts(maps, tables, manifest)
    folded = [replace(each, folded=True) for each in _details(parts)]
    sections = [*explorer_section(explorer), *_sources(parts), *folded]
    return page(title, headline, sections, manifest)


def _details(parts: Parts) -> Iterator[Section]:
    """Yield the sections that the page folds."""
    yield from player_sections(parts)
    yield from _mean_covariance(parts)
    yield from _measures(parts)
    yield from _controls(parts)
    yield from split_sections(parts.tables)
    yield _scores(parts)


def _sources(parts: Parts) -> Iterator[Section]:
    table = parts.tables.get("sources")
    if parts.terms["source"]:
        terms = {"all": parts.whole, **parts.terms["source"]}
        title = "The positional pattern and its sources"
        if table is not None:
            title = findings.source_finding(table, parts.layer)
        yield Section(
            title=title,
            figure=term_maps(
                terms,
                title="The positional pattern and what each source brings",
                layer=parts.shown,
                flat=parts.noise(table, "term", "rms"),
            ),
            caption="The whole positional pattern is the sum of the maps beside it. Content is "
            "what is left without mask and position encoding; the others are what these bring.",
        )
    if table is not None:
        yield Section(
            title=findings.layers_finding(table),
            figure=shares.source_shares(table),
            caption="A share says how much of the positional pattern a source explains; shares "
            "add up to 1, and a negative one works against the pattern. RMS: each source's own "
            "strength. In the table, “position” is the sum of all but content.",
            table=table,
        )


def _mean_covariance(parts: Parts) -> Iterator[Section]:
    terms, table = parts.terms["pattern"], parts.tables.get("mean_covariance")
    if len(terms) > 1:
        noise, title = None, "Maps of the mean and covariance terms"
        if table is not None:
            title = findings.mean_covariance_map_finding(table, parts.layer)
            named = table.assign(term=table["term"].astype(str) + "_term")
            noise = parts.noise(named, "term", "rms")
        yield Section(
            title=title,
            figure=term_maps(
                terms, title="The mean term and the covariance term", layer=parts.shown, flat=noise
            ),
            caption="The mean term: each position has a mean query and a mean key of its own. "
            "The covariance term: tokens that share their past are alike. Nothing is ablated.",
        )
    if table is not None:
        yield Section(
            title=findings.mean_covariance_finding(table, parts.layer),
            figure=shares.mean_covariance_shares(table),
            caption="The two shares add up to 1. Dimensions: the number of directions in which "
            "the positions' mean keys spread; 1 is a line.",
            table=table,
        )


def _measures(parts: Parts) -> Iterator[Section]:
    if "pattern" in parts.tables:
        yield Section(
            title=measure_finding(parts.intact_rows()),
            figure=measures.pattern_measures(parts.tables["pattern"], parts.intact),
            caption=notes.MEASURES,
        )
    if "non_relative" in parts.tables:
        table = parts.tables["non_relative"]
        yield Section(
            title=findings.mask_effect_finding(table),
            figure=measures.mask_effect(table),
            caption="The part of the positional pattern that is no function of distance, with "
            "the mask and without. Right: the paired difference; above zero, the mask adds.",
            table=table,
        )


def _controls(parts: Parts) -> Iterator[Section]:
    if "controls" not in parts.tables:
        return
    table, title = parts.tables["controls"], "Controls"
    if "pattern" in parts.tables:
        title = findings.control_finding(table, parts.intact_rows(), parts.layer, parts.intact)
    yield Section(
        title=title,
        figure=measures.controls(table, parts.intact),
        caption="A pattern that remains on shuffled tokens (open markers) does not come "
        "from word order. With no key skipped, an attention sink at the first key counts "
        "as positional pattern.",
    )


def _scores(parts: Parts) -> Section:
    title = "Scores of the intact model"
    if "pattern" in parts.tables:
        title = findings.score_finding(parts.intact_rows(), parts.layer)
    skip = int(parts.manifest.get("skip_keys", 0))
    return Section(
        title=title,
        figure=score_maps(parts.score, layer=parts.shown, skip_keys=skip),
        caption="The mean score that each query gives each key, over sequences and heads. Only "
        "differences within a row matter to attention: brighter keys are attended to more."
        + (" Colours leave the first key out, as the measures do." if skip else ""),
    )
