"""The report of `ablate`: sources, players, terms and controls, with a sentence for each.

Findings take tables with one replacement. Estimates with an interval around 0 count as noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isnan, nan

import pandas as pd

from nope_probe.experiments.ablation.player_sections import (
    Findings,
    player_sections,
    player_sentences,
    positional_part,
)
from nope_probe.experiments.replaced import replaced_weights
from nope_probe.experiments.sections import (
    NO_PATTERN,
    NOISE,
    Report,
    capitalised,
    closing_of,
    hidden_heads,
    largest,
    listed,
    measure_finding,
    nats,
    of_layer,
    percents,
    preference,
    split_sections,
    strongest,
    with_intervals,
)
from nope_probe.experiments.verdicts import most_of
from nope_probe.figures import measures
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import ValueAndBounds, interval_of, interval_text, percent
from nope_probe.figures.maps import score_maps
from nope_probe.figures.names import phrase, words
from nope_probe.figures.words import numbered_layers
from nope_probe.reports import notes
from nope_probe.reports.page import Section, explorer_section
from nope_probe.runtime.folder import Run

FIRST = 0.05  # of the pattern: the headline tells of the first keys from this part on
BARS = (
    " Full colour: its part at the first key; faint colour: its part among the other keys, exactly "
    "the rest. Parts against the pattern hang below 0."
)
OTHER_KEYS = " Maps are of the other keys: the first key has no colour."
AGREES = 0.05  # of the pattern: two shares that differ by less
COLUMNS = {  # of the terminal's table
    "lost without": ("lost", "z.0%"),
    "alone": ("alone", "z.0%"),
    "Shapley share": ("share", "z.0%"),
    "amplifies": ("amplification", ".1f"),
}


def report(run: Run, explorer: Explorer | None = None) -> Report:
    """Return a run's report.

    Args:
        run: maps [n_layers, query_pos, key_pos] in nats, as `RunMaps` names them, of which
            `score/<kept>` of the intact model and the patterns are drawn; the tables `sources`,
            `players`, `interactions`, `pattern`, `non_relative`, `controls`, `mean_covariance`,
            `offsets`; on the page, tables that a run lacks may be missing or empty.
        explorer: the patterns of all conditions behind switches, if the page shows them.
    """
    findings = Findings(run)
    name = run.manifest["model"]["name"]
    return Report(
        title=f"The sources of the positional pattern of {name}",
        headline=headline(findings),
        sections=[
            *explorer_section(explorer),
            *_answer(findings),
            *(replace(section, folded=True) for section in _details(findings)),
        ],
        how_to_read=[*notes.HOW_TO_READ, *replaced_weights(findings.replaced)],
        terminal={
            f"{name}: the sources of the positional pattern": _sources_as_text(findings),
            "Beside the sources (RMS in nats)": _controls_as_text(findings),
            **_player_tables(findings),
        },
        closing=closing_of(run.manifest),
    )


def headline(findings: Findings) -> list[str]:
    """Return the result in the layer with the strongest pattern: its sources, then its players."""
    rows, name = findings.intact_rows(), findings.manifest["model"]["name"]
    best = strongest(rows, findings.fold_sizes)
    if best is None:
        layers = f"{len(rows)} layers" if len(rows) > 1 else "its layer"
        mean = "in its attention, the mean over heads, that exceeds the noise of"
        return [f"{name} shows no positional pattern {mean} {layers}.", *_heads_instead(findings)]
    among = f" of {len(rows)} layers" if len(rows) > 1 else ""
    sources = findings.tables["sources"]
    sentences = [
        _source_sentence(name, best, sources, among),
        *first_key_sentence(of_layer(sources, findings.layer), findings.manifest["skip_keys"]),
    ]
    if findings.manifest["player_sets"]:
        sentences += player_sentences(findings)
    return sentences


def _heads_instead(findings: Findings) -> list[str]:
    """Return a sentence on heads whose patterns the mean over heads hides, if there are any."""
    heads = findings.tables.get("heads")
    if heads is None:
        return []
    hidden = hidden_heads(findings.intact_rows(), heads, findings.fold_sizes)
    return [f"{sentence}." for sentence in hidden]


def _source_sentence(name: str, best: pd.Series, sources: pd.DataFrame, among: str) -> str:
    rows = _terms(of_layer(sources, int(best["layer"]))).dropna(subset=["share"])
    rows = rows.sort_values("share", key=abs, ascending=False)
    parts = [
        f"{phrase(row['term'])} {interval_text(percent(interval_of(row, 'share')), 'z.0f', '%')}"
        for _, row in rows.iterrows()
    ]
    strength = interval_text(interval_of(best, "amplitude"), ".2f", " nats RMS")
    return (
        f"In L{best['layer']:.0f} of {name}, where it is strongest{among} ({strength}), the "
        f"positional pattern of attention {preference(best)} and comes from: {', '.join(parts)}."
    )


def first_key_sentence(sources: pd.DataFrame, skip_keys: int) -> list[str]:
    """Return what the first keys hold of a layer's pattern, and the other keys; empty if little.

    Args:
        sources: the layer's rows of `sources.csv`.
        skip_keys: how many keys count as first.
    """
    if "share_first" not in sources:
        return []
    rows = _terms(sources)
    whole = {part: rows[part].sum() for part in ("share_first", "share_others")}
    if not whole["share_first"] >= FIRST:
        return []
    parts = {}
    for part, total in whole.items():
        large = rows[rows[part] > total / 4].sort_values(part, ascending=False)
        terms = [f"{words(row['term'])} {percents(row[part])}" for _, row in large.iterrows()]
        of_it = " of it" if part == "share_first" else ""
        parts[part] = f"{percents(total)}{of_it}" + (f" ({', '.join(terms)})" if terms else "")
    holders = "first key holds" if skip_keys == 1 else f"first {skip_keys} keys hold"
    return [f"The {holders} {parts['share_first']}, the other keys {parts['share_others']}."]


def _sources_as_text(findings: Findings) -> pd.DataFrame:
    """Return rows per layer: the pattern, and the terms that add up to it."""
    parts = {"first key": "share_first", "others": "share_others"}
    rows = []
    for whole in findings.intact_rows().to_dict("records"):
        pattern = {"layer": f"L{whole['layer']}", "term": "pattern"}
        rows.append({**pattern, "RMS, nats": nats(whole, "amplitude")})
        for row in of_layer(findings.tables["sources"], whole["layer"]).to_dict("records"):
            term = {"layer": "", "term": row["term"].replace("_x_", " x ")}
            share = interval_text(percent(interval_of(row, "share")), "z.1f")
            shares = {"share, %": share}
            if findings.manifest["skip_keys"]:
                known = {head: row[of] for head, of in parts.items() if not isnan(row.get(of, nan))}
                shares |= {heading: f"{100 * value:z.1f}" for heading, value in known.items()}
            rows.append({**term, "RMS, nats": nats(row, "rms"), **shares})
    return pd.DataFrame(rows).fillna("")


def _controls_as_text(findings: Findings) -> pd.DataFrame:
    """Return a row per layer: locality, the pattern's RMS on shuffled tokens, what the mask adds.

    The last two columns are the RMS of the non-relative part, and how much of it the mask brings.
    """
    effects = findings.tables["non_relative"].drop_duplicates("layer").set_index("layer")
    controls = findings.tables.get("controls", pd.DataFrame(columns=["layer", "kept"]))
    rows = []
    for whole in findings.intact_rows().to_dict("records"):
        row = {"layer": f"L{whole['layer']}", "locality": ""}
        if not isnan(whole["locality"]):
            row["locality"] = f"{whole['locality']:+.2f}"
        of_intact = of_layer(controls, whole["layer"]).query("kept == @findings.intact")
        for control in of_intact.to_dict("records"):
            # The tokens of the run itself may be shuffled ones.
            if control["skip_keys"] == findings.manifest["skip_keys"]:
                row["shuffled"] = f"{control['amplitude']:.3f}"
        rows.append(row)
    table = pd.DataFrame(rows).fillna("")
    table["non-relative"] = [f"{value:.3f}" for value in effects["with_mask"]]
    table["by the mask"] = [
        interval_text(interval_of(effect, "difference"), "+z.3f")
        for effect in effects.to_dict("records")
    ]
    return table


def _player_tables(findings: Findings) -> dict[str, pd.DataFrame]:
    """Return tables of text for the terminal: each player's part in what the sources bring."""
    tables = {}
    for player_set in reversed(findings.manifest["player_sets"]):
        rows = findings.rows("players", player_set)
        if rows is None:
            continue
        members = findings.manifest["player_sets"][player_set]
        part = positional_part(members)
        title = f"The {findings.topic(player_set)}, % of {part[0].lower()}{part[1:]}"
        tables[title] = _players_as_text(findings.first(rows))
        if weights := findings.weights(player_set) if len(findings.replacements) > 1 else []:
            title = f"The {player_set}: lost without, %, when removed weights are replaced by"
            tables[title] = _lost_as_text(findings.replacements, weights, rows)
    return tables


def _players_as_text(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per layer and player; blank where only a share is defined."""
    table = with_intervals(_names_as_text(rows), rows, COLUMNS)
    for heading, (column, _) in COLUMNS.items():
        if column != "share":
            table[heading] = table[heading].where(rows[column].notna().to_numpy(), "")
    return table


def _lost_as_text(names: Sequence[str], members: Sequence[str], rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per layer and player: what is lost without it under each replacement."""
    first = rows[(rows["replacement"] == names[0]) & rows["player"].isin(members)]
    table = _names_as_text(first)
    for name in names:
        lost = rows[rows["replacement"] == name].set_index(["layer", "player"])
        table[name] = [
            interval_text(percent(interval_of(lost.loc[place], "lost")), "z.0f")
            if place in lost.index
            else ""
            for place in zip(first["layer"], first["player"], strict=True)
        ]
    return pd.DataFrame(table)


def _names_as_text(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Return the layer of each row, blank where it repeats, and its player."""
    layers = [f"L{layer}" for layer in rows["layer"]]
    new = rows["layer"] != rows["layer"].shift()
    return {
        "layer": [layer if first else "" for layer, first in zip(layers, new, strict=True)],
        "player": rows["player"].tolist(),
    }


def _answer(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page shows open: the sources, and the exact terms."""
    sources = findings.tables["sources"]
    yield Section(
        title=source_finding(sources, findings.layer),
        figure=lambda: findings.drawn(
            {"all": findings.pooled("pattern/all"), **findings.terms("source")},
            title="The positional pattern and what each source brings",
            flat=findings.noise(sources, "term", "rms"),
        ),
        caption="The whole positional pattern is the sum of the maps beside it. Content is "
        "what is left without mask, window and position encoding, as far as the model has them; "
        f"the others are what these bring.{OTHER_KEYS if findings.manifest['skip_keys'] else ''}",
    )
    yield Section(
        title=layers_finding(sources),
        figure=partial(measures.source_shares, sources),
        caption="A share says how much of the positional pattern a source explains; shares add up "
        "to 1, and a negative one works against the pattern."
        + (BARS if findings.manifest["skip_keys"] else "")
        + " In the table, “position” is the sum of all but content.",
        table=sources,
    )
    if "mean_covariance" in findings.tables:
        terms = findings.tables["mean_covariance"]
        yield Section(
            title=mean_covariance_finding(terms, findings.layer),
            figure=partial(measures.mean_covariance_shares, terms),
            caption="No removal is needed for these terms. The mean and the covariance term add up "
            "to 1. The mean term is the sum of rotation (RoPE on vectors that know nothing of "
            "position) and of position that was written into keys, queries or both. Dimensions: "
            "the number of directions in which the positions' mean keys spread; 1 is a line. "
            f"{exact_and_removed(findings)}",
            table=terms,
        )


def _details(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page folds."""
    yield from player_sections(findings)
    if "mean_covariance" in findings.tables:
        yield _mean_covariance_maps(findings)
    pattern, effects = findings.tables["pattern"], findings.tables["non_relative"]
    yield Section(
        title=measure_finding(findings.intact_rows()),
        figure=partial(measures.pattern_measures, pattern, findings.intact),
        caption=notes.MEASURES,
    )
    yield Section(
        title=mask_effect_finding(effects),
        figure=partial(measures.mask_effect, effects),
        caption="The part of the positional pattern that is no function of distance, with "
        "the mask and without. Right: the paired difference; above zero, the mask adds.",
        table=effects,
    )
    if "controls" in findings.tables:
        table = findings.tables["controls"]
        yield Section(
            title=control_finding(table, findings.intact_rows(), findings.layer, findings.intact),
            figure=partial(measures.controls, table, findings.intact),
            caption="A pattern that remains on shuffled tokens (open markers) does not come "
            "from word order. With all keys, locality and the non-relative part count the first "
            "key too.",
        )
    yield from split_sections(findings.tables, findings.lengths)
    skip_keys = findings.manifest["skip_keys"]
    yield Section(
        title="Scores of the intact model",
        figure=lambda: score_maps(
            findings.pooled(f"score/{findings.intact}"),
            layer=findings.shown,
            layers=findings.layers,
            skip_keys=skip_keys,
        ),
        caption="The mean score that each query gives each key, over sequences and heads. Only "
        "differences within a row matter to attention: brighter keys are attended to more."
        + (" Colours leave the first key out, as the measures do." if skip_keys else ""),
    )


def _mean_covariance_maps(findings: Findings) -> Section:
    terms = findings.tables["mean_covariance"]
    rows = terms[terms["term"].isin(("mean", "covariance"))]
    maps = rows.assign(map=rows["term"] + "_term")
    return Section(
        title="Maps of the mean and the covariance term",
        figure=lambda: findings.drawn(
            findings.terms("pattern"),
            title="The mean term and the covariance term",
            flat=findings.noise(maps, "map", "rms"),
        ),
        caption="The mean term: each position has a mean query and a mean key of its own. "
        "The covariance term: tokens that share their past are alike. Nothing is ablated.",
    )


def source_finding(sources: pd.DataFrame, layer: int | None) -> str:
    """Return which source brings most of the strongest layer's positional pattern."""
    if layer is None:
        return NO_PATTERN
    rows = _terms(of_layer(sources, layer)).sort_values("share", ascending=False)
    shares = shares_of(rows)
    most = most_of(shares)
    if most is not None:
        share = percents(shares[most][0])
        return f"{capitalised(phrase(most))} brings {share} of L{layer}'s positional pattern"
    parts = [f"{phrase(row['term'])} {percents(row['share'])}" for _, row in rows[:2].iterrows()]
    return f"No source alone brings most of L{layer}'s positional pattern: {', '.join(parts)}"


def layers_finding(sources: pd.DataFrame) -> str:
    """Return in which layers each source brings most of the positional pattern."""
    terms = _terms(sources)
    numbers = dict.fromkeys(terms["layer"].tolist())
    most = {layer: most_of(shares_of(of_layer(terms, layer))) for layer in numbers}
    known = {int(layer) for layer in terms.dropna(subset=["share"])["layer"]}
    empty = sorted({*most} - known)
    rest = sorted(layer for layer in known if most[layer] is None)
    parts = [
        f"{phrase(term)} in {numbered_layers(layer for layer in most if most[layer] == term)}"
        for term in dict.fromkeys(most.values())
        if term is not None
    ]
    parts += [f"no source alone in {numbered_layers(rest)}"] if rest else []
    text = f"Most of the positional pattern comes from {'; '.join(parts)}" if parts else ""
    if empty:
        noise = f"{numbered_layers(empty)} {'has' if len(empty) == 1 else 'have'} no pattern"
        text = f"{text}; {noise} above the noise" if text else NO_PATTERN
    return text


def mean_covariance_finding(table: pd.DataFrame, layer: int | None) -> str:
    """Return which of the exact terms carries the strongest layer's positional pattern."""
    rows = of_layer(table, layer).set_index("term")
    if rows.empty or rows["share"].isna().all():
        return f"Mean and covariance terms: {NOISE}"
    every, both = shares_of(rows.reset_index()), ("mean", "covariance")
    of_mean = {name: share for name, share in every.items() if name != "mean"}
    for shares in (of_mean, {name: every[name] for name in both}):  # the mean term is a sum
        if most := most_of(shares):
            share, term = percents(shares[most][0]), phrase(measures.term_entry(most))
            return f"{capitalised(term)} carries {share} of L{layer}'s positional pattern"
    rows = rows.loc[[*both]]
    parts = [f"{name} term {percents(row['share'])}" for name, row in rows.iterrows()]
    return f"No term alone carries L{layer}'s positional pattern: {', '.join(parts)}"


def exact_and_removed(findings: Findings) -> str:
    """Return how the exact split of the strongest layer differs from its losses by removals."""
    table, sources = findings.tables["mean_covariance"], findings.tables["sources"]
    if findings.layer is None or "rotation" not in set(table["term"]):
        return ""
    exact, removed = (
        _among_others(of_layer(rows, findings.layer).set_index("term")) for rows in (table, sources)
    )
    if exact.isna().all():
        return ""
    source, term, share = "mask", "what was written", exact.filter(like="written").sum()
    if "rope" in removed:
        source, term, share = "rope", "its rotation", exact["rotation"]
    lost = removed.filter(regex=rf"(^|_){source}(_|$)").sum()
    numbers = (
        f"in L{findings.layer}: {term} is {percents(share)} of the pattern, and {percents(lost)} "
        f"of it goes without {phrase(source)}."
    )
    if abs(lost - share) < AGREES:
        return f"The exact split and the removal agree {numbers}"
    return (
        f"The exact split and the removal differ {numbers} A removal takes the model off the text "
        "that it was trained on, and takes what other blocks write because of the source; the "
        "split changes nothing."
    )


def _among_others(rows: pd.DataFrame) -> pd.Series[float]:
    """Return the shares of one layer's terms in the pattern among the other keys."""
    if "share_others" not in rows:
        return rows["share"]
    return rows["share_others"] / rows["share_others"].drop("position").sum()


def mask_effect_finding(non_relative: pd.DataFrame) -> str:
    """Return where the mask adds to the part of the pattern that is no function of distance."""
    topic = "Non-relative part"
    rows = non_relative[non_relative["tokens"] == non_relative["tokens"].iloc[0]]
    more, less = rows[rows["difference_low"] > 0], rows[rows["difference_high"] < 0]
    parts = []
    for verb, some in (("adds to it", more), ("takes from it", less)):
        if len(some):
            top = largest(some, "difference")
            size = f"{top['difference']:+.2g} nats in L{top['layer']:.0f}"
            parts.append(f"{verb} in {numbered_layers(some['layer'])} (at most {size})")
    if not parts:
        return f"{topic}: the mask's effect is {NOISE}"
    return f"{topic}: the mask {listed(parts)}"


def control_finding(
    controls: pd.DataFrame, pattern: pd.DataFrame, layer: int | None, intact: str
) -> str:
    """Return how strong the strongest layer's pattern is on shuffled tokens, or how local.

    Args:
        controls: `controls.csv`.
        pattern: the measures of the intact model, a row per layer.
        layer: the layer with the strongest pattern, if there is one.
        intact: what the intact model keeps.
    """
    if layer is None:
        return f"Controls: the positional pattern is {NOISE} in any layer"
    of_intact = of_layer(pattern, layer)
    whole = float(of_intact.iloc[0]["amplitude"])
    rows = of_layer(controls[controls["kept"] == intact], layer)
    shuffled = rows[rows["tokens"] == "shuffled"]
    if shuffled.empty:
        all_keys, others = (float(of.iloc[0]["locality"]) for of in (rows, of_intact))
        return f"Controls: with all keys L{layer}'s locality is {all_keys:+.2g}, not {others:+.2g}"
    row = shuffled.iloc[0]
    if not row["amplitude_low"] > 0:
        return f"Controls: on shuffled tokens L{layer}'s positional pattern is {NOISE}"
    kept = percents(row["amplitude"] / whole)
    return f"Controls: on shuffled tokens L{layer}'s positional pattern is {kept} as strong"


def shares_of(rows: pd.DataFrame) -> dict[str, ValueAndBounds]:
    """Return the shares of one layer's terms with their bounds."""
    return {row["term"]: interval_of(row, "share") for row in rows.to_dict("records")}


def _terms(sources: pd.DataFrame) -> pd.DataFrame:
    return sources[sources["term"] != "position"]
