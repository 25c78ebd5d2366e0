"""The report of `ablate`: what lead and pattern lose without sources and weights, and controls.

The lead sentences are of the layer with the strongest pattern; figures and tables are of all
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

from nope_probe.experiments.ablation.verdicts import sources_sentence, weights_sentence
from nope_probe.experiments.sections import (
    Report,
    fold_sizes_of,
    lengths_of,
    no_pattern,
    noisy_layers,
    of_layer,
    split_sections,
    strongest,
)
from nope_probe.figures import measures, shares
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import ValueAndBounds, interval_of
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import TABLE, phrase
from nope_probe.figures.panels import Pooled, RowMaps, pool, pool_with_leads
from nope_probe.hooks.removing.stand_ins import STAND_INS, Replacement
from nope_probe.reports import notes
from nope_probe.reports.page import Lead, Section, explorer_section, positions
from nope_probe.runtime.folder import Run

Losses = dict[str, dict[str, ValueAndBounds]]  # of lead and pattern, by what is removed
CONSTANT = {  # rows of the lead's table, where a weight's output is held constant
    "w_q": "lost with constant queries (W_Q)",
    "w_k": "lost with constant keys (W_K)",
    "w_q+w_k": "lost with both constant",
    "w_o": "lost where attention writes a constant (W_O)",
}
GROUPS = ("pattern", "term")  # of maps
SMALL_LEAD = 0.5  # of the pattern's amplitude


def report(run: Run, explorer: Explorer | None = None) -> Report:
    """Return a run's report.

    Args:
        run: maps [n_layers, query_pos, key_pos] in nats, as `RunMaps` names them; the tables
            `sources`, `terms`, `weights`, `pattern`, `non_relative`, `controls`, `mean_covariance`,
            `offsets`; tables that a run lacks may be missing or empty.
        explorer: the patterns of all conditions, if the page shows them.
    """
    findings = Findings(run)
    return Report(
        title=f"The sources of the positional pattern of {notes.model_name(run.manifest)}",
        lead=lead(findings),
        sections=[
            *explorer_section(explorer),
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
        self.replacements: list[Replacement] = self.manifest["replacements"]
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
        cells = np.asarray(self.maps[key])
        maps, size = (
            RowMaps(values=cells, queries=self.query_positions),
            positions(n_drawn, len(cells)),
        )
        if key.startswith("score"):
            return pool(maps, size)
        return pool_with_leads(maps, size, self.manifest["skip_keys"])

    def drawn(self, maps: Mapping[str, Pooled], **about: Any) -> go.Figure:
        """Draw maps of all layers, the shown layer first; see `term_maps`."""
        skip_keys = self.manifest["skip_keys"]
        return term_maps(maps, layer=self.shown, layers=self.layers, skip_keys=skip_keys, **about)

    def terms(self, group: str) -> dict[str, Pooled]:
        """Return the maps of a group by the names of their terms."""
        return {key.split("/")[1]: self.pooled(key) for key in self.names[group]}

    @cached_property
    def fold_sizes(self) -> tuple[int, ...]:
        """The number of sequences in each fold."""
        return tuple(fold_sizes_of(self.manifest))

    @cached_property
    def layer(self) -> int | None:
        """The layer with the strongest pattern; None if no pattern exceeds the noise."""
        row = strongest(self.intact_rows(), self.fold_sizes)
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
    """Return a sort key: the order of the words, unions after these, interactions last."""
    parts = key.split("/")[1].split("_x_")
    places = {name: place for place, name in enumerate(TABLE)}
    return len(parts), [places.get(part, len(TABLE)) for part in parts], key


def lead(findings: Findings) -> Lead:
    """Return what the strongest layer's lead and pattern lose without each source and weight."""
    layer = findings.layer
    if layer is None:
        heads, name = findings.tables.get("heads"), notes.model_name(findings.manifest)
        return no_pattern(name, findings.intact_rows(), heads, findings.fold_sizes)
    row = of_layer(findings.intact_rows(), layer).iloc[0]
    losses = _losses(findings, layer)
    left = _without_sources(findings, layer)
    # A lead that is small next to the pattern has a row in the table, and no sentence.
    least = SMALL_LEAD * row["amplitude"]
    spoken = {name: of for name, of in losses.items() if name != "lead" or row["lead"] > least}
    sentences = [
        sources_sentence(
            layer,
            spoken,
            findings.manifest["positional_sources"],
            from_sources={name: interval_of(row, f"{name}_from_sources") for name in spoken},
            left=left.get("lead") if "lead" in spoken else None,
            lead=row["lead"],
        ),
        weights_sentence(spoken),
    ]
    return Lead(
        sentence=" ".join(filter(None, sentences)),
        table=_table(findings, row, losses, left),
        caption=_scope(findings, layer),
    )


def _scope(findings: Findings, layer: int) -> str:
    """Return which layers, sequences and texts the lead is of."""
    chosen = f"L{layer} has the strongest pattern of {notes.layers_of(findings.manifest)}. "
    return (
        f"{chosen if len(findings.layers) > 1 else ''}{notes.texts_of(findings.manifest)} Percent "
        "of position's part, which the sources make; below 0% it grows."
    )


def _losses(findings: Findings, layer: int) -> Losses:
    """Return what lead and pattern lose, weights by the first replacement."""
    losses: Losses = {}
    sources = of_layer(findings.tables["sources"], layer).rename(columns={"source": "removed"})
    weights = findings.tables.get("weights")
    tables = [sources] if weights is None else [sources, of_layer(weights, layer)]
    first = findings.replacements[:1]
    for table in tables:
        for row in table.dropna(subset=["lost"]).to_dict("records"):
            if row.get("replacement", "") in ("", *first):
                of_question = losses.setdefault(str(row["of"]), {})
                of_question[str(row["removed"])] = interval_of(row, "lost")
    return losses


def _without_sources(findings: Findings, layer: int) -> dict[str, ValueAndBounds]:
    """Return the size of lead and pattern without any source, nats."""
    terms = of_layer(findings.tables["terms"], layer)
    rows = terms[terms["term"] == "without_sources"].to_dict("records")
    return {str(row["of"]): interval_of(row, "size") for row in rows}


def _table(
    findings: Findings,
    row: pd.Series,
    losses: Losses,
    left: Mapping[str, ValueAndBounds],
) -> pd.DataFrame:
    """Return the first table: sizes, and what lead and pattern lose, in words."""
    seq_len = notes.run_size(findings.manifest)["seq_len"]
    sizes = {"lead": row["lead"], "pattern": row["amplitude"]}
    cells: dict[str, dict[str, str]] = {
        "size": {
            name: f"leads by {size:z.2g} nats" if name == "lead" else f"{size:z.2g} nats"
            for name, size in sizes.items()
            if size == size
        },
        "left without any source": {
            name: f"{size:z.1f} nats" if name == "lead" else f"{size:z.2f} nats"
            for name, (size, _, _) in left.items()
        },
    }
    for removed in dict.fromkeys(name for some in losses.values() for name in some):
        label = _row_of(removed, findings)
        if label:
            cells[label] = {
                name: f"{100 * some[removed][0]:z.0f}%"
                for name, some in losses.items()
                if removed in some
            }
    questions = [name for name in shares.QUESTIONS if any(name in by for by in cells.values())]
    table: dict[str, list[str]] = {f"L{row['layer']:.0f} at {seq_len:,} tokens": [*cells]}
    for name in questions:
        table[shares.QUESTIONS[name]] = [by.get(name, "") for by in cells.values()]
    return pd.DataFrame(table)


def _row_of(removed: str, findings: Findings) -> str:
    """Return the row of what is removed; empty for a circuit that equals another row."""
    is_constant = findings.replacements[:1] in (["mean"], ["zero"])
    if is_constant and removed == "w_o+w_v" and "w_o" in findings.manifest["removed"]:
        return ""
    if findings.replacements[:1] == ["mean"] and removed in CONSTANT:
        return CONSTANT[removed]
    return f"lost without {phrase(removed)}"


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
        caption="The whole is the sum of the maps next to it: what each source makes alone, what "
        "they make only together, and what is left without sources."
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
    yield Section(
        title="Measures of the pattern's shape",
        figure=partial(measures.pattern_measures, tables["pattern"]),
        caption=notes.MEASURES,
        table=tables["pattern"],
    )
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
            findings.pooled("score/intact"),
            layer=findings.shown,
            layers=findings.layers,
            skip_keys=findings.manifest["skip_keys"],
        ),
        caption="The mean score that each query gives each key, over sequences and heads. "
        "Brighter keys of a row are attended to more.",
    )


def _mean_covariance_maps(findings: Findings) -> Section:
    terms = findings.tables["mean_covariance"]
    rows = terms[terms["term"].isin(("mean", "covariance"))]
    named = rows.assign(map=rows["term"] + "_term")
    drawn = {name: maps for name, maps in findings.terms("pattern").items() if name != "intact"}
    return Section(
        title="Maps of the mean and the covariance term",
        figure=lambda: findings.drawn(
            drawn,
            title="The mean term and the covariance term",
            flat=noisy_layers(named, "map", "rms"),
        ),
        caption="The mean term: each position has a mean query and a mean key of its own. "
        "The covariance term: tokens that share their past are alike. Nothing is ablated.",
    )
