"""The report of `ablate`: lead and order without sources and weights, their maps, and controls.

The sentence and the first table are of the shown layer, or of the mean over all layers; figures and
tables are of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures import measures, values
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import TABLE, words
from nope_probe.figures.panels import Pooled, RowMaps, pool, pool_with_leads
from nope_probe.figures.words import reader_of
from nope_probe.hooks.removing.stand_ins import STAND_INS
from nope_probe.removal import SOURCES, Condition, parts_of
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section, explorer_section, positions
from nope_probe.run.folder import Run
from nope_probe.studies.ablation import intact_page
from nope_probe.studies.page import (
    MOST_ROWS,
    Report,
    lengths_of,
    measures_section,
    no_pattern,
    noisy_layers,
    shown_layer,
    split_sections,
)
from nope_probe.studies.values import Answer

GROUPS = ("pattern", "term")  # of maps


def report(run: Run, explorer: Explorer | None = None, heads: str = "") -> Report:
    """Return a run's report.

    Args:
        run: maps [n_layers, query_pos, key_pos] in nats, as `RunMaps` names them; the tables
            `pattern`, `over_layers`, `terms`, `non_relative`, `controls`, `mean_covariance`,
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
        """The layer that is shown first; None if no pattern exceeds the noise."""
        return shown_layer(self.intact_rows(), self.manifest.fold_sizes)

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
        return bool(self.intact_rows()["lead"].notna().any())

    @property
    def noise(self) -> dict[str, list[int]]:
        """By map, the layers in which neither its pattern nor its lead exceeds the noise."""
        rows = self.intact_rows().rename(columns={"amplitude": "size"}).assign(term="intact")
        rows = rows.assign(size_low=rows["amplitude_low"], size_high=rows["amplitude_high"])
        leads = rows.assign(size_low=rows["lead_low"], size_high=rows["lead_high"])
        parts = [self.tables["terms"], rows.assign(of="pattern"), leads.assign(of="lead")]
        sizes = pd.concat(
            [part[["layer", "of", "term", "size_low", "size_high"]] for part in parts]
        )
        by_question = [
            noisy_layers(of, "term", "size") for _, of in sizes.groupby("of") if len(of.dropna())
        ]
        return {
            term: [layer for layer in layers if all(layer in x.get(term, ()) for x in by_question)]
            for term, layers in by_question[0].items()
        }


def _order(key: str) -> tuple[int, list[int], str]:
    """Return a sort key: the order of the words, interactions last."""
    _, parts = parts_of(key.split("/")[1])
    places = {name: place for place, name in enumerate(TABLE)}
    return len(parts), [places.get(part, len(TABLE)) for part in parts], key


def headline(findings: Findings) -> Headline:
    """Return the values of the shown layer, or the means over all, in every condition."""
    layer = findings.layer
    if layer is None:
        heads, name = findings.tables.get("head_pattern"), findings.manifest.model_name
        heads = None if heads is None else heads[heads["removed"] == "intact"]
        return no_pattern(name, findings.intact_rows(), heads, findings.manifest.fold_sizes)
    answer = Answer.of(findings.tables, findings.manifest, layer)
    return Headline(
        sentence=answer.sentence(),
        table=answer.table(),
        caption=_scope(findings, layer, is_mean=answer.is_mean),
    )


def _scope(findings: Findings, layer: int, is_mean: bool) -> str:
    """Return what the table's numbers are, and which layers they are of."""
    unit = "Order: how much of the intact model's pattern among the other keys is there."
    if is_mean:
        return f"{unit} Below half: the layers with less than half of their intact value."
    if len(findings.layers) == 1:
        return unit
    layers = notes.layers_of_run(findings.manifest)
    return f"{unit} L{layer} has the largest lead and pattern of {layers}."


def _heads(findings: Findings) -> Iterator[Section]:
    """Yield the sections of each head's values, if heads were measured."""
    if "head_pattern" not in findings.tables:
        return
    table = findings.tables["head_pattern"]
    yield Section(
        title="Heads without each source",
        figure=partial(values.head_values, table),
        caption="Each point is a head; touch it for numbers and intervals. On the diagonal nothing "
        "is lost without the source, on the zero line all is.",
        table=largest_heads(table),
    )
    if any(not {*Condition.parse(name)} <= {*SOURCES} for name in table["removed"].unique()):
        yield Section(
            title="Heads without each band of RoPE",
            figure=partial(values.head_bands, table, findings.manifest.results.get("wavelengths")),
            caption="Each row is a head: its lead, and how much of its pattern is there, without "
            "the band.",
        )


def largest_heads(table: pd.DataFrame) -> pd.DataFrame:
    """Return the heads with the largest leads and patterns, and their values without each source.

    Args:
        table: `head_pattern.csv`.
    """
    places, parts = ["layer", "head"], []
    intact = table[table["removed"] == "intact"].set_index(places)
    for name, title in values.QUESTIONS.items():
        largest = intact[name].abs().nlargest(MOST_ROWS).index
        rows: list[dict[str, Any]] = [
            {"head": reader_of({"layer": layer, "head": head}), "of": title}
            for layer, head in largest
        ]
        for removed, of_condition in table.groupby("removed", sort=False):
            label = "intact" if removed == "intact" else f"without {words(str(removed))}"
            left = of_condition.set_index(places).loc[largest]
            for row, (_, value) in zip(rows, left.iterrows(), strict=True):
                row[f"{label}, nats"] = interval_text(interval_of(value, name), "z.2f")
        parts.append(pd.DataFrame(rows))
    return pd.concat(parts, ignore_index=True)


def _answer(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page shows open: values in every layer, and the maps."""
    tables = findings.tables
    yield Section(
        title="Lead and order in every layer",
        figure=partial(values.values_by_layer, tables["pattern"]),
        caption="Above: the first key's lead over the others. Below: how much of the intact "
        "model's pattern among the other keys is there; of the intact model, its strength. A "
        "removed weight is replaced by its mean: queries, keys or what attention writes are "
        "constant.",
        table=tables["pattern"],
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
        table=tables["terms"],
    )


def _details(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page folds."""
    tables = findings.tables
    if "mean_covariance" in tables:
        yield Section(
            title="The pattern without removals: exact terms",
            figure=partial(
                values.term_sizes, tables["mean_covariance"], "The exact terms of the scores"
            ),
            caption="Mean and covariance term add up to the pattern; rotation (RoPE alone) and "
            "written position are parts of the mean term. A removal differs: it also takes what "
            "other blocks write because of the source.",
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
