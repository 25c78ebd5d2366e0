"""The page of `ablate`: its sentence and first table, its sections, maps and heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.analyses.verdicts import mostly_lost
from nope_probe.figures.attention import head_values
from nope_probe.figures.intervals import bound_columns, excludes_zero, interval_of
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import phrase, row_name, short, varying_name
from nope_probe.figures.panels import ACROSS, Pooled, RowMaps, pool, pool_with_leads
from nope_probe.figures.words import (
    MEASURES,
    NO_PATTERN,
    NUMBERS,
    WITHIN,
    Columns,
    capitalised,
    listed,
    with_readers,
)
from nope_probe.removal import INTACT, NO_REPLACEMENT, SOURCES, WRITTEN, Condition
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Section, positions
from nope_probe.run.folder import Run
from nope_probe.studies.tidy import (
    KEYS,
    above_noise,
    brief,
    preferred_keys,
    shown_layer,
    strongest_row,
)

SHOWN = ("lead", "amplitude", "locality")
WHAT = {
    "kept": "the order of the keys",
    "lead": "the first key's lead over the others",
    "non_relative": "what is not a function of distance",
}
SHORT = WHAT | {"kept": "the order", "lead": "the lead"}
PERCENT = 1.0  # the paper's Figure 5 draws from the 1% to the 99% quantile
PATTERN = (
    "Mean scores less each row's mean over the keys before the query: softmax sees nothing else. "
    "Red keys get more attention than the row's mean."
)
SUM = (
    "The intact map is the sum of the others: what each source makes alone, what they make only "
    "together, and what is left without sources."
)
LEADS = " The column on the left is the first key's lead over the others."
PER_HEAD = "score_per_head/intact"


def intact_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the intact model."""
    return table[table["removed"] == INTACT.name]


def headline(run: Run) -> Headline:
    """Return the numbers of the shown layer, or the means over all, in every condition."""
    answer = Answer.of(run)
    if answer.place:
        table, caption = answer.table(), answer.definitions()
        return Headline(sentence=answer.sentence(), table=table, caption=caption)
    result = no_pattern(run)
    if 2 * answer.numbers.get("lead", 0) > answer.n_layers:
        sentence = f"{result.sentence} {capitalised(answer.makers_of('lead'))}."
        result = replace(result, sentence=sentence)
    return result


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Who makes each of the three numbers, and their values in every condition.

    A source makes a number in a layer where the number exceeds its noise and, without the source,
    less than half of it is left (`mostly_lost`). Sentences name what does so in most layers.

    Attributes:
        place: of which layer the values are, such as `L3`, or `30 layers`; empty where no layer has
            a pattern that exceeds the noise.
        seq_len: tokens in a sequence.
        rows: a row per condition and replacement, the intact model first: `removed`,
            `replacement`, the three numbers with their bounds, and `loss` and `cost` where the
            model was run to its end (nats).
        counts: `over_layers.csv`, whose rows count layers.
        n_layers: how many layers have maps.
    """

    place: str
    seq_len: int
    rows: list[dict[Any, Any]]
    counts: list[dict[Any, Any]]
    n_layers: int

    @classmethod
    def of(cls, run: Run) -> Answer:
        """Return the answer of the shown layer, or over all layers of a run of `--layers all`."""
        manifest, table, means = run.manifest, run.tables["pattern"], run.tables["over_layers"]
        layer, n_layers = shown_layer(intact_rows(table), manifest.fold_sizes), len(manifest.layers)
        if layer is None:
            table, place = means, ""
        elif manifest.settings.get("layers") == "all" and n_layers > 1:
            table, place = means, f"{n_layers} layers"
        else:
            costs = means.filter(regex="^(removed|replacement|(loss|cost)(_low|_high)?)$")
            table, place = table[table["layer"] == layer].merge(costs, how="left"), f"L{layer}"
        return cls(
            place=place,
            seq_len=manifest.seq_len,
            rows=table.to_dict("records"),
            counts=means.to_dict("records"),
            n_layers=n_layers,
        )

    def sentence(self) -> str:
        """Return who makes each number, which weights it goes through, and what removal costs."""
        said = [*map(self.makers_of, self.numbers), *self.ways(), *self.costs()]
        return " ".join(f"{capitalised(of)}." for of in said)

    @property
    def numbers(self) -> dict[str, int]:
        """In how many layers each of the three numbers exceeds its noise, if any has it."""
        intact = self.counts[0]
        known = {name: intact.get(f"{name}_layers", nan) for name in WHAT}
        return {name: int(n) for name, n in known.items() if n == n}

    def single(self, *, sources: bool) -> dict[str, dict[Any, Any]]:
        """Return the counts of conditions that remove a single source, or anything else, by name.

        Of several replacements of a weight, the first counts.
        """
        rows = dict[str, dict[Any, Any]]()
        for row in self.counts:
            removed = Condition.parse(row["removed"])
            if len(removed) == 1 and (removed <= {*SOURCES}) == sources:
                rows.setdefault(row["removed"], row)
        return rows

    def makers_of(self, name: str) -> str:
        """Return the clause of what makes a number in most layers, or in how many."""
        n, what = self.numbers[name], WHAT[name]
        if not n:
            return f"{what} exceeds its noise in no layer"
        rows = self.single(sources=True).items()
        lost = {phrase(source): int(row[f"{name}_below_half"]) for source, row in rows}
        makers = {source: k for source, k in lost.items() if 2 * k > n}
        of = f"{n} layer{'s' * (n > 1)}{' where it exceeds its noise' * (n < self.n_layers)}"
        counts = [f"{k}" for k in (makers or lost).values()]
        counts[0] += f" of {of}"
        named = [f"{who} ({k})" for who, k in zip(makers or lost, counts, strict=True)]
        if not makers:
            return f"no source alone makes {what} in most layers: {listed(named)}"
        if len(makers) > 1:
            return f"{what} needs {listed(named)}"
        return f"{''.join(makers)} makes {what} ({counts[0]})"

    def ways(self) -> Iterator[str]:
        """Yield the clauses of what else numbers need in most layers: weights, written position."""
        rows = {varying_name(row): row for row in self.single(sources=False).values()}
        groups = dict[str, list[str]]()
        spared = [*rows]
        for name, n in self.numbers.items():
            needed = [x for x, row in rows.items() if n and 2 * row[f"{name}_below_half"] > n]
            spared = [x for x in spared if x not in needed]
            if needed:
                groups.setdefault(listed(needed), []).append(SHORT[name])
        for way, of in groups.items():
            yield f"{listed(of)} {'goes' if len(of) == 1 else 'go'} through {way}"
        if spared:
            yield f"none of them goes through {' or '.join(spared)} in most layers"

    def costs(self) -> Iterator[str]:
        """Yield the clause of what text costs without each source and written position."""
        rows = self.single(sources=True) | self.single(sources=False)
        costs = {name: rows[name].get("cost", nan) for name in rows}
        said = [
            f"{cost:z.2f} without {phrase(name)}"
            for name, cost in costs.items()
            if cost == cost and name in (*SOURCES, WRITTEN.name)
        ]
        if said:
            yield f"text costs more, in nats a token: {listed(said)}"

    def table(self) -> pd.DataFrame:
        """Return the values of every condition, nats, with half the width of their intervals."""
        is_layer, removed = "layer" in self.rows[0], [row["removed"] for row in self.rows]
        of = f"{self.place} (largest lead and order)" if is_layer else f"mean of {self.place}"
        names = [row_name(row["removed"], row["replacement"], removed) for row in self.rows]
        cells = {f"{of}\nat {self.seq_len:,} tokens, nats ±95%": names}
        for name, title in (NUMBERS | {"cost": "cost"}).items():
            if any(row.get(name, nan) == row.get(name, 0) for row in self.rows):
                texts = [half_width_text(row, name) for row in self.rows]
                cells["\n".join(wrap(title, 12))] = texts
        return pd.DataFrame(cells)

    def definitions(self) -> str:
        """Return what the numbers of the table are, a clause each."""
        said = (
            "Order: how much of the intact order is there; above the intact value it is amplified, "
            "below 0 reversed. Not a function of distance: what a fit by distance leaves."
        )
        loss = self.rows[0].get("loss", nan)
        cost = f" Cost: the rise of the loss from {loss:.2f}, empty with the next token in sight."
        return said + cost * (loss == loss)


def maker_section(run: Run) -> Section:
    """Return the section of which sources make each number in each layer."""
    pattern = run.tables["pattern"]
    rows = {
        layer: pattern[pattern["layer"] == layer].to_dict("records")
        for layer in run.manifest.layers
    }
    return Section(
        title="Who makes what in each layer",
        caption="A source makes a number above its noise if less than half is left without the "
        "source. Numbers are in nats.",
        table=pd.DataFrame(
            {"layer": f"L{layer}"}
            | {title: makers_text(of_layer, name) for name, title in NUMBERS.items()}
            for layer, of_layer in rows.items()
        ),
    )


def makers_text(rows: Sequence[Mapping[Any, Any]], name: str) -> str:
    """Return which sources make a number of a layer, its value, and its value without each source.

    Args:
        rows: the layer's rows of `pattern.csv`, the intact model's first.
        name: the number.

    Example:
        >>> of = [("intact", 1.0), ("mask", 0.9), ("rope", 0.1)]
        >>> rows = [{"removed": x, "kept": v, "kept_low": v, "kept_high": v} for x, v in of]
        >>> makers_text(rows, "kept")
        'RoPE: 1.00; 0.90 without mask, 0.10 without RoPE'
    """
    intact, *others = rows
    sources = {row["removed"]: row for row in others if row["removed"] in SOURCES}
    lost = {
        source: mostly_lost(interval_of(intact, name), interval_of(row, name))
        for source, row in sources.items()
    }
    if None in lost.values():
        return WITHIN
    makers = [short(source) for source, is_lost in lost.items() if is_lost]
    left = ", ".join(f"{row[name]:z.2f} without {short(source)}" for source, row in sources.items())
    return f"{listed(makers) if makers else 'no source alone'}: {intact[name]:z.2f}; {left}"


def half_width_text(row: Mapping[str, Any], name: str) -> str:
    """Return a number of a row with half the width of its interval, as text.

    Example:
        >>> half_width_text({"lead": 2.5, "lead_low": 2.25, "lead_high": 2.75}, "lead")
        '2.50±0.25'
    """
    value, low, high = interval_of(row, name)
    if name == "cost" and (value != value or row["removed"] == INTACT.name):
        return ""
    if value != value:
        return NO_PATTERN
    if name == "non_relative" and low <= 0:
        return WITHIN
    return f"{value:z.2f}±{max(value - low, high - value):.2f}"


def headline_of_intact(run: Run) -> Headline:
    """Return the layer with the strongest pattern, and the strongest layers with their keys."""
    manifest, pattern = run.manifest, run.tables["pattern"]
    best = strongest_row(pattern, manifest.fold_sizes)
    if best is None:
        return no_pattern(run)
    above = pattern[above_noise(pattern, manifest.fold_sizes)].nlargest(MOST_ROWS, "amplitude")
    lead = best["lead"]
    leads = f"the first key {'leads' if lead > 0 else 'trails'} by {abs(lead):.2g}, the others'"
    return Headline(
        sentence=f"In {manifest.model_name} ({notes.layers_of_run(manifest)}), L"
        f"{best['layer']:.0f} is strongest: {leads if lead == lead else 'its'} pattern is "
        f"{best['amplitude']:.2g} nats, for {KEYS[preferred_keys(interval_of(best, 'locality'))]}.",
        table=brief(above.sort_values("layer"), "layer", SHOWN, MEASURES),
        caption=f"Pattern: RMS among the other keys. {MEASURES['locality'].meaning}",
    )


def page_positions(run: Run) -> int:
    """Return how many positions each map may have for the page to have room for all."""
    maps = run.arrays.get("maps", {})
    n_maps = sum(name.startswith(("term/", "score")) for name in maps)
    n_heads = maps[PER_HEAD].shape[1] if PER_HEAD in maps else 0
    return positions(2 + n_maps + n_heads, len(maps["score/intact"]))


def pooled_map(run: Run, name: str) -> Pooled:
    """Return a map with as many positions as the page has room for."""
    values, queries = np.asarray(run.maps[name]), run.query_positions
    maps = RowMaps(values=values, queries=queries, skip_keys=run.manifest.skip_keys)
    pooling = pool if name.startswith("score") else pool_with_leads
    return pooling(maps, page_positions(run))


def of_figure(run: Run) -> dict[str, Any]:
    """Return what figures of maps have in common: the shown layer, all layers, the maps' noise."""
    rows = intact_rows(run.tables["pattern"])
    layers, shown = rows["layer"].tolist(), shown_layer(rows, run.manifest.fold_sizes)
    drawn: dict[str, Any] = {"layer": layers[0] if shown is None else shown, "layers": layers}
    if (errors := run.arrays.get("maps", {}).get("se/intact")) is not None:
        drawn["noise"] = [float(np.sqrt(np.nanmean(of_layer**2))) for of_layer in errors]
    return drawn


def no_pattern(run: Run) -> Headline:
    """Return the headline of a model without a pattern above the noise: the heads that have one."""
    manifest, heads = run.manifest, run.tables.get("head_pattern")
    sentence = (
        f"{manifest.model_name} shows no positional pattern in its mean over heads that exceeds "
        f"the noise{', so no source makes one' * ('over_layers' in run.tables)}."
    )
    if heads is None:
        sentence += " Single heads may have one: --per-head shows them."
        return Headline(sentence=sentence)
    heads = intact_rows(heads)
    above = heads[above_noise(heads, manifest.fold_sizes)].nlargest(MOST_ROWS, "amplitude")
    if above.empty:
        return Headline(sentence=sentence)
    named = above.assign(head=with_readers(above)["reader"])
    return Headline(
        sentence=sentence,
        table=brief(named, "head", ("amplitude",), MEASURES),
        caption="These heads have a pattern that their mean does not show.",
    )


def pattern_section(run: Run) -> Section:
    """Return the section with the maps of the intact pattern and, of an exact sum, its terms."""
    terms, has_lead = run.tables.get("terms"), run.tables["pattern"]["lead"].notna().any()
    names = [] if terms is None else terms["term"].unique().tolist()
    maps = {"intact": "pattern/intact", **{name: f"term/{name}" for name in names}}
    caption = SUM if names else PATTERN
    return Section(
        title="The pattern, and what each source makes" if names else "The positional pattern",
        figure=lambda: term_maps(
            {title: pooled_map(run, name) for title, name in maps.items()},
            title="The positional pattern" + " and what each source makes" * bool(names),
            flat={} if terms is None else flat_layers(run.tables),
            **of_figure(run),
        ),
        caption=caption + LEADS * bool(has_lead),
        table=terms,
    )


def condition_section(run: Run) -> Section:
    """Return the section with the pattern in every condition, weights by the first replacement."""
    return Section(
        title="The pattern without each part",
        figure=lambda: term_maps(
            condition_maps(run),
            title="The positional pattern without each part",
            **of_figure(run),
        ),
        caption="A part is removed in every layer. All maps of a layer are on one scale."
        + LEADS * bool(run.manifest.skip_keys),
        folded=True,
    )


def condition_maps(run: Run) -> dict[str, Pooled]:
    """Return the pattern in every condition by its name, weights by the first replacement."""
    results = run.manifest.results
    by, names = next(iter(results["replacements"]), NO_REPLACEMENT), results["conditions"]
    maps = dict[str, Pooled]()
    for name in names:
        is_plain = f"score/{name}" in run.maps
        scores = run.maps[f"score/{name}" if is_plain else f"score_{by}/{name}"]
        title = row_name(name, NO_REPLACEMENT if is_plain else by, names)
        maps[title] = pattern_of(run, np.asarray(scores))
    return maps


def pattern_of(run: Run, scores: Float[np.ndarray, "layer row key_pos"]) -> Pooled:
    """Return the pattern of score maps in the intact pattern's cells, with as many as fit."""
    cells = np.isfinite(run.maps["pattern/intact"])
    others = cells.copy()
    others[..., : run.manifest.skip_keys] = False
    sums, counts = scores.sum(-1, where=others), others.sum(-1).clip(1)
    pattern = np.where(cells, scores - (sums / counts)[..., None], nan)
    maps = RowMaps(values=pattern, queries=run.query_positions, skip_keys=run.manifest.skip_keys)
    return pool_with_leads(maps, page_positions(run))


def head_map_section(run: Run) -> Section:
    """Return the section with the positional pattern of each head of a run that removes nothing."""
    heads = np.moveaxis(run.maps[PER_HEAD], 1, 0)
    return Section(
        title="The positional pattern of each head",
        figure=lambda: term_maps(
            {f"H{head}": pattern_of(run, scores) for head, scores in enumerate(heads)},
            title="The positional pattern of each head",
            rows=-(-len(heads) // ACROSS),
            **of_figure(run),
        ),
        caption="All heads of a layer are on one scale, in nats: red is above the row's mean, blue "
        "below." + LEADS * bool(run.manifest.skip_keys),
    )


def score_section(run: Run) -> Section:
    """Return the section with the mean scores of the intact model."""
    left_out = " Colours leave out the first key." if run.manifest.skip_keys else ""
    return Section(
        title="Mean scores",
        figure=lambda: score_maps(
            pooled_map(run, "score/intact"), multiples=1, clipped=PERCENT, **of_figure(run)
        ),
        caption="The mean score that each query gives each key in the intact model, over sequences "
        "and heads. Softmax ignores the level of a row. Colours run between the 1% and the 99% "
        f"quantile.{left_out}",
        folded=True,
    )


def flat_layers(tables: Mapping[str, pd.DataFrame]) -> dict[str, list[int]]:
    """Return by map the layers in which neither its pattern nor its lead exceeds the noise."""
    intact, parts = intact_rows(tables["pattern"]), [tables["terms"]]
    for of, name in (("pattern", "amplitude"), ("lead", "lead")):
        ends = dict(zip(bound_columns(name), bound_columns("size"), strict=True))
        part = intact[["layer", *ends]].rename(columns=ends)
        parts.append(part.assign(of=of, term=INTACT.name))
    sizes = pd.concat(parts)
    is_clear = excludes_zero(sizes, "size").groupby([sizes["term"], sizes["layer"]]).any()
    flat = is_clear[~is_clear].index
    return {term: [layer for of, layer in flat if of == term] for term in sizes["term"].unique()}


def head_section(table: pd.DataFrame, columns: Columns) -> Section:
    """Return the section of each head's values, given `head_pattern.csv`."""
    return Section(
        title="Heads without each source",
        figure=partial(head_values, table),
        caption="Each point is a head; touch it for numbers and intervals. On the diagonal nothing "
        "is lost without the source, on the zero line all is.",
        table=table,
        columns=columns,
    )
