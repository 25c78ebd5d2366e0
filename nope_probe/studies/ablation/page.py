"""The report of `ablate`: what lead and pattern lose without sources and weights, and controls.

The lead sentences are of the strongest layer, by lead and pattern; figures and tables are of all
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures import measures, shares
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import bound_columns
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import TABLE, phrase, words
from nope_probe.figures.panels import Pooled, RowMaps, pool, pool_with_leads
from nope_probe.figures.words import reader_of
from nope_probe.hooks.removing.stand_ins import STAND_INS
from nope_probe.removal import SOURCES, parts_of
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section, explorer_section, positions
from nope_probe.run.folder import Run
from nope_probe.studies.ablation import intact_page
from nope_probe.studies.losses import SHORT, LayerLosses
from nope_probe.studies.page import (
    MOST_ROWS,
    Report,
    lengths_of,
    measures_section,
    no_pattern,
    noisy_layers,
    split_sections,
    strongest_row,
)

GROUPS = ("pattern", "term")  # of maps
WIDEST = 0.5  # interval of a loss of a head that the second sentence names


def report(run: Run, explorer: Explorer | None = None, heads: str = "") -> Report:
    """Return a run's report.

    Args:
        run: maps [n_layers, query_pos, key_pos] in nats, as `RunMaps` names them; the tables
            `sources`, `terms`, `weights`, `pattern`, `non_relative`, `controls`, `mean_covariance`,
            `offsets`; tables that a run lacks may be missing or empty.
        explorer: the patterns of all conditions, if the page shows them.
        heads: the patterns of all heads of a run that removes nothing, if the page shows them.
    """
    if not run.manifest.positional_sources:
        return intact_page.report(run, heads)
    findings = Findings(run)
    return Report(
        title=f"The sources of the positional pattern of {run.manifest.model_name}",
        headline=headline(findings),
        sections=[
            *explorer_section(explorer),
            *_heads(findings),
            *_answer(findings),
            *(replace(section, folded=True) for section in _details(findings)),
        ],
        how_to_read=[
            *notes.how_to_read("scores"),
            *(f"Replaced by {kind}: {STAND_INS[kind].note}." for kind in findings.replacements),
        ],
    )


class Findings:
    """The tables of a run, its maps, pooled when they are drawn, and the layer shown first.

    Attributes:
        manifest: the run's.
        maps: the run's maps by name.
        tables: the tables that have rows.
        replacements: of removed weights, the first being that of the headline.
    """

    def __init__(self, run: Run) -> None:
        self.manifest, self.maps = run.manifest, run.arrays.get("maps", {})
        self.query_positions, self.lengths = run.query_positions, lengths_of(run)
        self.replacements = self.manifest.replacements or ()
        self.tables = {name: table for name, table in run.tables.items() if len(table)}

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """The names of the patterns' maps by group."""
        return {
            group: sorted((key for key in self.maps if key.startswith(f"{group}/")), key=_order)
            for group in GROUPS
        }

    def pooled(self, key: str) -> Pooled:
        """Return a map with as many positions as the page has room for."""
        n_drawn = sum(len(keys) + 1 for keys in self.names.values())
        cells, skip_keys = np.asarray(self.maps[key]), self.manifest.skip_keys
        maps = RowMaps(values=cells, queries=self.query_positions, skip_keys=skip_keys)
        pooling = pool if key.startswith("score") else pool_with_leads
        return pooling(maps, positions(n_drawn, len(cells)))

    def drawn(self, maps: Mapping[str, Pooled], **about: Any) -> go.Figure:
        """Draw maps of all layers, the shown layer first; see `term_maps`."""
        return term_maps(maps, layer=self.shown, layers=self.layers, **about)

    def terms(self, group: str) -> dict[str, Pooled]:
        """Return the maps of a group by the names of their terms."""
        return {key.split("/")[1]: self.pooled(key) for key in self.names[group]}

    @cached_property
    def layer(self) -> int | None:
        """The strongest layer, by lead and pattern; None if no pattern exceeds the noise."""
        row = strongest_row(self.intact_rows(), self.manifest.fold_sizes)
        return None if row is None else int(row["layer"])

    @property
    def shown(self) -> int:
        """The layer that figures show first."""
        return self.layers[0] if self.layer is None else self.layer

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers, in the order of the maps."""
        return self.intact_rows()["layer"].tolist()

    def intact_rows(self) -> pd.DataFrame:
        """Return the measures of the intact model, a row per layer."""
        pattern = self.tables["pattern"]
        return pattern[pattern["removed"] == "intact"]

    @property
    def has_lead(self) -> bool:
        """Whether the first key has a lead in some layer."""
        return bool((self.tables["terms"]["of"] == "lead").any())

    @property
    def noise(self) -> dict[str, list[int]]:
        """By map of a pattern, the layers in which the pattern does not exceed its noise."""
        terms = self.tables["terms"]
        rows = self.intact_rows()
        flat = rows.loc[~(rows["amplitude_low"] > 0), "layer"].astype(int).tolist()
        return {**noisy_layers(terms[terms["of"] == "pattern"], "term", "size"), "intact": flat}


def _order(key: str) -> tuple[int, list[int], str]:
    """Return a sort key: the order of the words, interactions last."""
    _, parts = parts_of(key.split("/")[1])
    places = {name: place for place, name in enumerate(TABLE)}
    return len(parts), [places.get(part, len(TABLE)) for part in parts], key


def headline(findings: Findings) -> Headline:
    """Return what the strongest layer's lead and pattern lose without each source and weight."""
    layer = findings.layer
    if layer is None:
        heads, name = findings.tables.get("heads"), findings.manifest.model_name
        return no_pattern(name, findings.intact_rows(), heads, findings.manifest.fold_sizes)
    losses = LayerLosses.of(findings.tables, findings.manifest, layer)
    return Headline(
        sentence=" ".join(filter(None, [losses.sources_sentence(), losses.weights_sentence()])),
        table=losses.table(),
        caption=_scope(findings, layer),
        also=heads_sentence(findings.tables, losses),
    )


def heads_sentence(tables: Mapping[str, pd.DataFrame], losses: LayerLosses) -> str:
    """Return a sentence on the heads with the smallest and the largest loss; empty without heads.

    Lead and pattern are without the source of their largest loss. Heads whose interval is wider
    than `WIDEST` are left out.
    """
    parts = []
    for question, of in losses.spoken.items() if "head_sources" in tables else ():
        source = max(losses.sources, key=lambda name: of[name][0] if name in of else -np.inf)
        rows = shares.heads_with(tables["head_sources"], tables["head_pattern"], question)
        low, high = bound_columns(source)
        rows = rows[(rows["layer"] == losses.layer) & (rows[high] - rows[low] < WIDEST)]
        if len(rows) > 1 < len(losses.sources):
            rows = rows.sort_values(source)
            ends = rows.iloc[[0, -1]].to_dict("records")
            least, most = (f"{row[source]:z.0%} (H{row['head']})" for row in ends)
            parts.append(f"{least} to {most} of {SHORT[question]} without {phrase(source)}")
    return f"Heads of L{losses.layer} lose {'; '.join(parts)}." if parts else ""


def _scope(findings: Findings, layer: int) -> str:
    """Return which layers the lead is of."""
    unit = "Percent of position's part, which the sources make; below 0% it grows."
    if len(findings.layers) == 1:
        return unit
    layers = notes.layers_of_run(findings.manifest)
    return f"L{layer} is the strongest of {layers}, by lead and pattern. {unit}"


def _heads(findings: Findings) -> Iterator[Section]:
    """Yield the sections of what each head loses, if heads were measured."""
    tables = findings.tables
    if "head_sources" not in tables:
        return
    sources, pattern = tables["head_sources"], tables["head_pattern"]
    n_heads = len(pattern[["layer", "head"]].drop_duplicates())
    heads = {name: shares.heads_with(sources, pattern, name) for name in shares.QUESTIONS}
    left_out = [f"{n_heads - len(rows)} {name}s" for name, rows in heads.items()]
    yield Section(
        title="Heads: lost without each source",
        figure=partial(shares.head_losses, sources, pattern),
        caption="Each point is a head, larger with a larger lead or pattern; touch it for numbers "
        "and intervals. Beyond -100% or 200% it is drawn there. Left out, within noise: "
        f"{' and '.join(left_out)} of {n_heads} heads.",
        table=largest_heads(heads),
    )
    if not sources["source"].isin(SOURCES).all():
        yield Section(
            title="Heads: lost without each band of RoPE",
            figure=partial(
                shares.head_bands, sources, findings.manifest.results.get("wavelengths")
            ),
            caption="Each row is a head. Red: the band makes a part of the lead or pattern, which "
            "is lost without it. Blue: it grows without it. Losses of bands need not add up.",
        )


def largest_heads(heads: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the largest leads and patterns of heads, in nats, and what they lose by source.

    Args:
        heads: of the lead and of the pattern, the rows of `heads_with`.
    """
    parts = []
    for question, rows in heads.items():
        names: dict[str, str] = {n: f"lost without {words(n)}" for n in SOURCES if n in rows}
        columns = {
            old: new
            for before, after in {"size": "size, nats", **names}.items()
            for old, new in zip(
                (before, *bound_columns(before)), (after, *bound_columns(after)), strict=True
            )
        }
        largest = rows.loc[rows["size"].abs().nlargest(MOST_ROWS).index]
        part = largest[[*columns]].rename(columns=columns)
        part.insert(0, "head", [reader_of(row) for row in largest.to_dict("records")])
        part.insert(1, "of", question)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _answer(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page shows open: losses in every layer, and the maps."""
    tables = findings.tables
    yield Section(
        title="Lost without each source, in every layer",
        figure=partial(shares.source_losses, tables["sources"]),
        caption="Left: the first key's lead over the others. Right: the pattern among the other "
        "keys. 100%: all that the sources make of it is gone.",
        table=tables["sources"],
    )
    yield Section(
        title="The pattern, and what each source makes",
        figure=lambda: findings.drawn(
            {"intact": findings.pooled("pattern/intact"), **findings.terms("term")},
            title="The positional pattern and what each source makes",
            flat=findings.noise,
        ),
        caption="The intact map is the sum of the others: what each source makes alone, what they "
        "make only together, and what is left without sources."
        + (" The column on the left is the first key's lead." if findings.has_lead else ""),
    )
    yield Section(
        title="What each source makes alone",
        figure=partial(shares.source_terms, tables["terms"]),
        caption="Shares of position's part add up to 100%. A source alone is a model that has no "
        "other source. What is left without any source is not position.",
        table=tables["terms"],
    )
    if "weights" in tables:
        yield Section(
            title="Lost without each weight, in every layer",
            figure=partial(shares.weight_losses, tables["weights"]),
            caption="Mean: a weight's output is constant. Identity, the paper's: coordinates pass "
            "on as they are. Amplification, in the table: how much stronger position's part is "
            "with the weight than without.",
            table=tables["weights"],
        )


def _details(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page folds."""
    tables = findings.tables
    if "mean_covariance" in tables:
        yield Section(
            title="The pattern without removals: exact terms",
            figure=partial(shares.mean_covariance_shares, tables["mean_covariance"]),
            caption="Mean and covariance term add up to 100%; rotation (RoPE alone) and written "
            "position are parts of the mean term. A removal differs: it also takes what other "
            "blocks write because of the source.",
            table=tables["mean_covariance"],
        )
        yield _mean_covariance_maps(findings)
    yield measures_section(tables["pattern"])
    yield Section(
        title="What the mask adds beyond distance",
        figure=partial(measures.mask_effect, tables["non_relative"]),
        caption="The part of the positional pattern that is no function of distance, with "
        "the mask and without. Right: the paired difference; above zero, the mask adds.",
        table=tables["non_relative"],
    )
    if "controls" in tables:
        yield Section(
            title="Control: shuffled tokens",
            figure=partial(measures.controls, tables["controls"], tables["pattern"]),
            caption="A pattern that remains on shuffled tokens (open markers) does not come "
            "from word order.",
            table=tables["controls"],
        )
    yield from split_sections(tables, findings.lengths)
    yield Section(
        title="Scores of the intact model",
        figure=lambda: score_maps(
            findings.pooled("score/intact"), layer=findings.shown, layers=findings.layers
        ),
        caption="The mean score that each query gives each key, over sequences and heads. "
        "Brighter keys of a row are attended to more.",
    )


def _mean_covariance_maps(findings: Findings) -> Section:
    terms = findings.tables["mean_covariance"]
    rows = terms[terms["term"].isin(("mean", "covariance")) & (terms["of"] == "pattern")]
    named = rows.assign(map=rows["term"] + "_term")
    drawn = {name: maps for name, maps in findings.terms("pattern").items() if name != "intact"}
    return Section(
        title="Maps of the mean and the covariance term",
        figure=lambda: findings.drawn(
            drawn,
            title="The mean term and the covariance term",
            flat=noisy_layers(named, "map", "size"),
        ),
        caption="The mean term: each position has a mean query and a mean key. "
        "The covariance term: tokens that share their past are alike. Nothing is ablated.",
    )
