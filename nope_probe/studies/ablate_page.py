"""The page of `ablate`: its sentence and first table, its sections, maps and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.analyses.verdicts import mostly_lost
from nope_probe.figures.attention import head_values
from nope_probe.figures.intervals import excludes_zero, interval_of
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
    row_maps,
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
    answer = Answer(run)
    if answer.place:
        table, caption = answer.table(), answer.definitions()
        return Headline(sentence=answer.sentence(), table=table, caption=caption)
    result = no_pattern(run)
    if 2 * answer.numbers.get("lead", 0) > answer.n_layers:
        sentence = f"{result.sentence} {capitalised(answer.makers_of('lead'))}."
        result = replace(result, sentence=sentence)
    return result


class Answer:
    """Who makes each of the three numbers, and their values in every condition.

    A source makes a number in a layer where the number exceeds its noise and, without the source,
    less than half of it is left (`mostly_lost`). Sentences name what does so in most layers. The
    values are of the shown layer, or over all layers of a run of `--layers all`.

    Args:
        run: with `pattern`, and `over_layers`, whose rows count layers.

    Attributes:
        place: of which layer the values are, such as `L3`, or `30 layers`; empty where no layer has
            a pattern that exceeds the noise.
        rows: a row per condition and replacement, the intact model first: `removed`,
            `replacement`, the three numbers with their bounds, and `loss` and `cost` where the
            model was run to its end (nats).
        counts: the rows that count layers, by what is removed; of several replacements of a weight,
            the first counts.
    """

    def __init__(self, run: Run) -> None:
        self.manifest, pattern = run.manifest, run.tables["pattern"]
        means = run.tables["over_layers"]
        layer = shown_layer(intact_rows(pattern), self.manifest.fold_sizes)
        self.n_layers, self.place = len(self.manifest.layers), "" if layer is None else f"L{layer}"
        self.rows: list[dict[Any, Any]] = means.to_dict("records")
        first: list[dict[Any, Any]] = means.drop_duplicates("removed").to_dict("records")
        self.counts = {str(row["removed"]): row for row in first}
        if self.place and self.manifest.settings.get("layers") == "all" and self.n_layers > 1:
            self.place = f"{self.n_layers} layers"
        elif self.place:
            costs = means.filter(regex="^(removed|replacement|(loss|cost)(_low|_high)?)$")
            self.rows = pattern[pattern["layer"] == layer].merge(costs).to_dict("records")

    def sentence(self) -> str:
        """Return who makes each number, which weights it goes through, and what removal costs."""
        said = [*map(self.makers_of, self.numbers), *self.ways(), *self.costs()]
        return " ".join(f"{capitalised(of)}." for of in said)

    @property
    def numbers(self) -> dict[str, int]:
        """In how many layers each of the three numbers exceeds its noise, if any has it."""
        known = {name: self.counts[INTACT.name].get(f"{name}_layers", nan) for name in WHAT}
        return {name: int(n) for name, n in known.items() if n == n}

    def makers_of(self, name: str) -> str:
        """Return the clause of what makes a number in most layers, or in how many."""
        n, what = self.numbers[name], WHAT[name]
        if not n:
            return f"{what} exceeds its noise in no layer"
        sources = [source for source in SOURCES if source in self.counts]
        lost = {phrase(x): int(self.counts[x][f"{name}_below_half"]) for x in sources}
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
        rows, groups = dict[str, dict[Any, Any]](), dict[str, list[str]]()
        for removed, row in self.counts.items():
            if removed not in SOURCES and len(Condition.parse(removed)) == 1:
                rows[varying_name(row)] = row
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
        removed = [name for name in (*SOURCES, WRITTEN.name) if name in self.counts]
        costs = {name: self.counts[name].get("cost", nan) for name in removed}
        said = [f"{cost:z.2f} without {phrase(x)}" for x, cost in costs.items() if cost == cost]
        if said:
            yield f"text costs more, in nats a token: {listed(said)}"

    def table(self) -> pd.DataFrame:
        """Return the values of every condition, nats, with half the width of their intervals."""
        is_layer, removed = "layer" in self.rows[0], [row["removed"] for row in self.rows]
        of = f"{self.place} (largest lead and order)" if is_layer else f"mean of {self.place}"
        names = [row_name(row["removed"], row["replacement"], removed) for row in self.rows]
        cells = {f"{of}\nat {self.manifest.seq_len:,} tokens, nats ±95%": names}
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
    return Section(
        title="Who makes what in each layer",
        caption="A source makes a number above its noise if less than half is left without the "
        "source. Numbers are in nats.",
        table=pd.DataFrame(
            {"layer": f"L{layer}"}
            | {title: makers_text(rows.to_dict("records"), name) for name, title in NUMBERS.items()}
            for layer, rows in run.tables["pattern"].groupby("layer")
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
    whole = interval_of(intact, name)
    lost = {source: mostly_lost(whole, interval_of(row, name)) for source, row in sources.items()}
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


def pooled(
    run: Run,
    values: Float[np.ndarray, "layer row key_pos"],
    pooling: Callable[[RowMaps, int], Pooled] = pool_with_leads,
) -> Pooled:
    """Return maps with as many positions as the page has room for, of all its maps alike."""
    n_maps = sum(name.startswith(("term/", "score")) for name in run.maps)
    n_heads = run.maps[PER_HEAD].shape[1] if PER_HEAD in run.maps else 0
    return pooling(row_maps(run, values), positions(2 + n_maps + n_heads, len(values)))


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
        return Headline(sentence=f"{sentence} Single heads may have one: --per-head shows them.")
    heads = with_readers(intact_rows(heads))
    above = heads[above_noise(heads, manifest.fold_sizes)].nlargest(MOST_ROWS, "amplitude")
    if above.empty:
        return Headline(sentence=sentence)
    table = brief(above.assign(head=above["reader"]), "head", ("amplitude",), MEASURES)
    caption = "These heads have a pattern that their mean does not show."
    return Headline(sentence=sentence, table=table, caption=caption)


def pattern_section(run: Run) -> Section:
    """Return the section with the maps of the intact pattern and, of an exact sum, its terms."""
    terms = run.tables.get("terms")
    names = [] if terms is None else terms["term"].unique().tolist()
    title = "The pattern, and what each source makes" if names else "The positional pattern"
    maps = {"intact": "pattern/intact", **{name: f"term/{name}" for name in names}}
    flat = {} if terms is None else flat_layers(run.tables)
    section = maps_section(
        run,
        title,
        lambda: {name: pooled(run, run.maps[of]) for name, of in maps.items()},
        SUM if names else PATTERN,
        flat=flat,
    )
    return replace(section, table=terms)


def maps_section(
    run: Run, title: str, maps: Callable[[], dict[str, Pooled]], caption: str, **options: Any
) -> Section:
    """Return a section with patterns by their names; see `term_maps` for its options."""
    return Section(
        title=title,
        figure=lambda: term_maps(maps(), title=title, **options, **of_figure(run)),
        caption=caption + LEADS * bool(run.manifest.skip_keys),
    )


def condition_section(run: Run) -> Section:
    """Return the section with the pattern in every condition, weights by the first replacement."""
    return maps_section(
        run,
        "The pattern without each part",
        partial(condition_maps, run),
        "A part is removed in every layer. All maps of a layer are on one scale.",
    )


def condition_maps(run: Run) -> dict[str, Pooled]:
    """Return the pattern in every condition by its name, weights by the first replacement."""
    results, maps = run.manifest.results, dict[str, Pooled]()
    by, names = next(iter(results["replacements"]), NO_REPLACEMENT), results["conditions"]
    for name in names:
        is_plain = f"score/{name}" in run.maps
        title = row_name(name, NO_REPLACEMENT if is_plain else by, names)
        scores = run.maps[f"score/{name}" if is_plain else f"score_{by}/{name}"]
        maps[title] = pattern_of(run, np.asarray(scores))
    return maps


def pattern_of(run: Run, scores: Float[np.ndarray, "layer row key_pos"]) -> Pooled:
    """Return the pattern of score maps in the intact pattern's cells, with as many as fit."""
    cells = np.isfinite(run.maps["pattern/intact"])
    others = cells.copy()
    others[..., : run.manifest.skip_keys] = False
    means = scores.sum(-1, where=others) / others.sum(-1).clip(1)
    return pooled(run, np.where(cells, scores - means[..., None], nan))


def head_map_section(run: Run) -> Section:
    """Return the section with the positional pattern of each head of a run that removes nothing."""
    heads = np.moveaxis(run.maps[PER_HEAD], 1, 0)
    return maps_section(
        run,
        "The positional pattern of each head",
        lambda: {f"H{head}": pattern_of(run, scores) for head, scores in enumerate(heads)},
        "All heads of a layer are on one scale, in nats: red is above the row's mean, blue below.",
        rows=-(-len(heads) // ACROSS),
    )


def score_section(run: Run) -> Section:
    """Return the section with the mean scores of the intact model."""
    left_out = " Colours leave out the first key." if run.manifest.skip_keys else ""
    return Section(
        title="Mean scores",
        figure=lambda: score_maps(
            pooled(run, run.maps["score/intact"], pool),
            multiples=1,
            clipped=PERCENT,
            **of_figure(run),
        ),
        caption="The mean score that each query gives each key in the intact model, over sequences "
        "and heads. Softmax ignores the level of a row. Colours run between the 1% and the 99% "
        f"quantile.{left_out}",
    )


def flat_layers(tables: Mapping[str, pd.DataFrame]) -> dict[str, list[int]]:
    """Return by map the layers in which neither its pattern nor its lead exceeds the noise."""
    intact, terms = intact_rows(tables["pattern"]), tables["terms"]
    is_clear = excludes_zero(intact, "amplitude") | excludes_zero(intact, "lead")
    flat = {INTACT.name: intact["layer"][~is_clear].tolist()}
    for term, rows in terms.groupby("term"):
        is_clear = excludes_zero(rows, "size").groupby(rows["layer"]).any()
        flat[str(term)] = is_clear.index[~is_clear].tolist()
    return flat


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
