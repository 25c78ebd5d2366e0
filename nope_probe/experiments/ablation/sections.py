"""The report of `ablate`: sources, players, terms and controls.

The lead is of the layer with the strongest pattern; figures and tables are of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.analyses.shapley import player
from nope_probe.experiments.sections import (
    MOST_ROWS,
    Report,
    fold_sizes_of,
    lengths_of,
    makers,
    no_pattern,
    noisy_layers,
    of_layer,
    split_sections,
    strongest,
    terms_of,
    together,
)
from nope_probe.experiments.verdicts import summed, verdict_of
from nope_probe.figures import measures, shares
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.intervals import (
    ValueAndBounds,
    interval_of,
    interval_text,
    percent,
)
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.names import TABLE, words
from nope_probe.figures.panels import Pooled, RowMaps, pool
from nope_probe.figures.words import capitalised
from nope_probe.hooks.removing.stand_ins import STAND_INS, Replacement
from nope_probe.reports import notes
from nope_probe.reports.page import Lead, Section, explorer_section, positions
from nope_probe.runtime.folder import Run

FIRST = 0.05  # of the pattern: the sentence tells of the first keys from this part on
PARTS = {"share": "all keys", "share_first": "first key", "share_others": "other keys"}
MAKES = {  # by the parts of the pattern that its makers differ in
    "whole": "{who} {makes} the positional pattern of L{layer}: {share} of its {amplitude} nats "
    "at {length:,} tokens.",
    "first": "{who} {makes} L{layer}'s preference for the first key: {share} of its {amplitude} "
    "nats at {length:,} tokens.",
    "both": "{who} {makes} L{layer}'s pattern among the other keys, {others} its preference for "
    "the first key: {share} of {amplitude} nats at {length:,} tokens.",
}
OF_SOURCES = (
    "Content is what remains without any source. All keys add up to 100%, and are the sum of the "
    "two parts. A share above 100% is offset by shares below 0%."
)
OF_WEIGHTS = "A column names what replaces a removed weight. Below 0%, the pattern grows."
OF_MEANS = (
    f"{OF_WEIGHTS} Lost by identity but not with its mean kept: the weight is needed for its mean "
    "direction, not for what it reads."
)
COMPONENT = {"qk": "W_Q and W_K", "ov": "W_V and W_O"}  # rows of the lead's table
SETS = {"circuits": "Circuits", "players": "Players"}
PLAYER_SETS = {"circuits": "shapley_circuits", "players": "shapley"}  # and their maps
SHAPLEY = tuple(PLAYER_SETS.values())


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
    name = notes.model_name(run.manifest)
    return Report(
        title=f"The sources of the positional pattern of {name}",
        lead=lead(findings),
        sections=[
            *explorer_section(explorer),
            *_answer(findings),
            *(replace(section, folded=True) for section in _details(findings)),
        ],
        how_to_read=[
            *notes.how_to_read("scores"),
            *(f"Replaced by {kind}: {STAND_INS[kind].note}." for kind in findings.replaced),
        ],
    )


class Findings:
    """The tables of a run, its maps, pooled when they are drawn, and the layer shown first.

    Attributes:
        manifest: the run's.
        maps: the run's maps by name.
        intact: the intact model's name.
        replacements: of removed weights, the first being that of the headings.
        tables: the tables that have rows, with the first replacement alone.
        several: the same with all replacements.
    """

    def __init__(self, run: Run) -> None:
        self.manifest, self.maps = run.manifest, run.arrays.get("maps", {})
        self.query_positions, self.lengths = run.query_positions, lengths_of(run)
        self.intact = str(self.manifest["conditions"][0])
        self.replacements = self.manifest.get("replacements", ["identity"])
        self.several = {name: table for name, table in run.tables.items() if len(table)}
        self.tables = {name: self.first(table) for name, table in self.several.items()}

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """The names of the patterns' maps by group, those of further replacements too."""
        others = [f"{group}_{name}" for group in SHAPLEY for name in self.replacements[1:]]
        return {
            group: sorted((key for key in self.maps if key.startswith(f"{group}/")), key=_order)
            for group in ("pattern", "source", *SHAPLEY, *others)
        }

    def pooled(self, key: str) -> Pooled:
        """Return a map with as many positions as the page has room for."""
        n_drawn = sum(len(keys) + 1 for keys in self.names.values())  # a whole beside its terms
        cells = np.asarray(self.maps[key])
        maps = RowMaps(values=cells, queries=self.query_positions)
        return pool(maps, positions(n_drawn, len(cells)))

    def drawn(self, maps: Mapping[str, Pooled], **about: Any) -> go.Figure:
        """Draw maps of all layers, the shown layer first; see `term_maps`."""
        return term_maps(maps, layer=self.shown, layers=self.layers, **about)

    def terms(self, group: str) -> dict[str, Pooled]:
        """Return the maps of a group by their names within it."""
        names = self.names.get(group, [])
        return {key.removeprefix(f"{group}/"): self.pooled(key) for key in names}

    @property
    def fold_sizes(self) -> Sequence[int]:
        """Sequences per fold."""
        return fold_sizes_of(self.manifest)

    @cached_property
    def layer(self) -> int | None:
        """The layer with the strongest positional pattern; None if none exceeds the noise."""
        best = strongest(self.intact_rows(), self.fold_sizes)
        return None if best is None else int(best["layer"])

    @cached_property
    def shown(self) -> int:
        """The layer that figures show first."""
        if self.layer is not None:
            return self.layer
        rows = self.intact_rows().fillna({"amplitude": 0.0}).sort_values("amplitude")
        return int(rows.iloc[-1]["layer"])

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers, in the order of the maps."""
        return self.intact_rows()["layer"].tolist()

    def intact_rows(self) -> pd.DataFrame:
        """Return the measures of the intact model's pattern, a row per layer."""
        pattern = self.tables["pattern"]
        return pattern[pattern["kept"] == self.intact]

    def rows(self, name: str, player_set: str) -> pd.DataFrame | None:
        """Return a player set's rows of a table, of all replacements."""
        table = self.several.get(name)
        rows = None if table is None else table[table["player_set"] == player_set]
        return rows if rows is not None and len(rows) else None

    def of(self, table: pd.DataFrame, replacement: str) -> pd.DataFrame:
        """Return a table's rows of a replacement, or all rows of a table without replacements."""
        if "replacement" not in table:
            return table
        return table[table["replacement"] == replacement].drop(columns="replacement")

    def first(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a table that are of the first replacement."""
        return self.of(table, self.replacements[0])

    @property
    def replaced(self) -> list[Replacement]:
        """The replacements of removed weights; none where no weight plays."""
        plays = any(self.weights(name) for name in self.manifest["player_sets"])
        return list(self.replacements) if plays else []

    def weights(self, player_set: str) -> list[str]:
        """Return the players of a set that hold a weight."""
        members = self.manifest["player_sets"].get(player_set, [])
        return [name for name in members if player(name).has_weight]

    def noise(self, table: pd.DataFrame, name: str, column: str) -> dict[str, list[int]]:
        """Return per map, and for all, the layers in which it does not exceed its noise."""
        rows = self.intact_rows()
        whole = rows.loc[~(rows["amplitude_low"] > 0), "layer"].astype(int).tolist()
        return {**noisy_layers(table, name, column), "all": whole}


def _order(key: str) -> tuple[int, list[int], str]:
    """Return a sort key: the order of the words, unions after these, interactions last."""
    parts = key.split("/")[1].split("_x_")
    places = {name: place for place, name in enumerate(TABLE)}
    return len(parts), [places.get(part, len(TABLE)) for part in parts], key


def lead(findings: Findings) -> Lead:
    """Return who makes the strongest layer's pattern, and what is lost without each component."""
    layer, sources = findings.layer, findings.tables["sources"]
    rows = terms_of(of_layer(sources, layer)).dropna(subset=["share"])
    if layer is None or rows.empty:
        heads = findings.tables.get("heads")
        name = notes.model_name(findings.manifest)
        return no_pattern(name, findings.intact_rows(), heads, findings.fold_sizes)
    kind, who, others = _makers(rows)
    amplitude, lost = of_layer(findings.intact_rows(), layer).iloc[0]["amplitude"], None
    if kind == "both":
        share = f"{100 * rows['share_first'].sum():.0f}%"
    else:
        lost = _lost(findings, layer)
        made = rows.query("term in @who").to_dict("records")
        column = {"whole": "share", "first": "share_first"}[kind]
        whole = summed(interval_of(row, column) for row in made)
        share = interval_text(percent(whole), "z.0f", "%")
    sentence = MAKES[kind].format(
        who=capitalised(together(who)),
        makes="makes" if len(who) == 1 and "_x_" not in who[0] else "make",
        others=together(others) if others else "",
        layer=layer,
        share=share,
        amplitude=f"{amplitude:.2g}",
        length=notes.run_size(findings.manifest)["seq_len"],
    )
    if lost is not None:
        caption = OF_MEANS if {"identity", "mean kept"} <= {*lost} else OF_WEIGHTS
        return Lead(sentence=sentence, table=lost, caption=caption)
    return Lead(sentence=sentence, table=_sources(rows, layer), caption=OF_SOURCES)


def _makers(rows: pd.DataFrame) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return who makes a layer's pattern: which part of it, the makers, and the first key's."""
    whole = makers(rows, "share")
    if "share_first" not in rows or not rows["share_first"].sum() >= FIRST:
        return "whole", whole, ()
    first = makers(rows, "share_first")
    if not rows["share_others"].sum() >= FIRST:
        return "first", first, ()
    others = makers(rows, "share_others")
    return ("both", others, first) if others != first else ("whole", whole, ())


def _sources(rows: pd.DataFrame, layer: int) -> pd.DataFrame:
    """Return the shares of a layer's sources, at the first key and among the others."""
    rows = rows.sort_values("share", key=abs, ascending=False)[:MOST_ROWS]
    table = {f"L{layer}, share of the pattern": [words(term) for term in rows["term"]]}
    for column, heading in PARTS.items():
        if column in rows and rows[column].notna().all():
            table[heading] = [f"{100 * share:z.0f}%" for share in rows[column]]
    return pd.DataFrame(table)


def _lost(findings: Findings, layer: int) -> pd.DataFrame | None:
    """Return what a layer loses without each source and weight; None where no weight plays."""
    sets = findings.manifest["player_sets"]
    main = "circuits" if "circuits" in sets else "players"
    rows = findings.rows("players", main) if findings.weights(main) else None
    losses = {} if rows is None else losses_of(of_layer(rows, layer))
    if not losses:
        return None
    table = []
    for name, by_kind in losses.items():
        row = {f"L{layer}, what is lost without": COMPONENT.get(name, words(name))}
        for kind in findings.replacements:
            first = kind == findings.replacements[0]
            interval = by_kind.get(kind, by_kind.get(None) if first else None)
            row[STAND_INS[kind].column] = f"{100 * interval[0]:z.0f}%" if interval else ""
        table.append(row | {"verdict": verdict_of(by_kind)})
    return pd.DataFrame(table[:MOST_ROWS])


def losses_of(rows: pd.DataFrame) -> dict[str, dict[Replacement | None, ValueAndBounds]]:
    """Return the share that is lost without each player of a layer and set, by replacement.

    A player that holds no weight is the same under all replacements, and has one entry, None.
    """
    losses: dict[str, dict[Replacement | None, ValueAndBounds]] = {}
    for row in rows.dropna(subset=["lost"]).to_dict("records"):
        kind = row["replacement"] if player(row["player"]).has_weight else None
        losses.setdefault(row["player"], {}).setdefault(kind, interval_of(row, "lost"))
    return losses


def _answer(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page shows open: the sources, and the exact terms."""
    sources = findings.tables["sources"]
    yield Section(
        title="The pattern, and what each source brings",
        figure=lambda: findings.drawn(
            {"all": findings.pooled("pattern/all"), **findings.terms("source")},
            title="The positional pattern and what each source brings",
            flat=findings.noise(sources, "term", "rms"),
        ),
        caption="The whole positional pattern is the sum of the maps beside it. Content is what "
        "is left without mask, window and position encoding. "
        + ("The first key has no colour." if findings.manifest["skip_keys"] else ""),
    )
    yield Section(
        title="Shares of the sources in every layer",
        figure=partial(shares.source_shares, sources),
        caption="Full colour: a source's share at the first key. Faint colour: its share among "
        "the other keys, exactly the rest. Parts that work against the pattern hang below 0. In "
        "the table, “position” is all but content.",
        table=sources,
    )
    if "mean_covariance" in findings.tables:
        terms = findings.tables["mean_covariance"]
        yield Section(
            title="The same without removals: exact terms",
            figure=partial(shares.mean_covariance_shares, terms),
            caption="Mean and covariance term add up to 100%; rotation (RoPE alone) and written "
            "position are parts of the mean term. A removal differs: it also takes what other "
            "blocks write because of the source.",
            table=terms,
        )


def _details(findings: Findings) -> Iterator[Section]:
    """Yield the sections that the page folds."""
    yield from _player_sections(findings)
    if "mean_covariance" in findings.tables:
        yield _mean_covariance_maps(findings)
    pattern, effects = findings.tables["pattern"], findings.tables["non_relative"]
    yield Section(
        title="Measures of the pattern's shape",
        figure=partial(measures.pattern_measures, pattern, findings.intact),
        caption=notes.MEASURES,
    )
    yield Section(
        title="What the mask adds beyond distance",
        figure=partial(measures.mask_effect, effects),
        caption="The part of the positional pattern that is no function of distance, with "
        "the mask and without. Right: the paired difference; above zero, the mask adds.",
        table=effects,
    )
    if "controls" in findings.tables:
        yield Section(
            title="Controls: shuffled tokens, and all keys",
            figure=partial(measures.controls, findings.tables["controls"], findings.intact),
            caption="A pattern that remains on shuffled tokens (open markers) does not come "
            "from word order. With all keys, locality and the non-relative part count the first "
            "key too.",
            table=findings.tables["controls"],
        )
    yield from split_sections(findings.tables, findings.lengths)
    yield Section(
        title="Scores of the intact model",
        figure=lambda: score_maps(
            findings.pooled(f"score/{findings.intact}"),
            layer=findings.shown,
            layers=findings.layers,
            skip_keys=findings.manifest["skip_keys"],
        ),
        caption="The mean score that each query gives each key, over sequences and heads. "
        "Brighter keys of a row are attended to more. Colours leave the first key out, as the "
        "measures do.",
    )


def _player_sections(findings: Findings) -> Iterator[Section]:
    """Yield the sections of each player set: shares, interactions, and last the Shapley maps."""
    for player_set, name in SETS.items():
        table = findings.rows("players", player_set)
        if table is not None:
            yield Section(
                title=f"{name}: lost without each, and Shapley shares",
                figure=partial(shares.player_shares, table),
                caption="Lost without: needed. In the table, alone: enough; amplification: the "
                "pattern's strength with the player over that without. Equal Shapley shares mean "
                "“all are needed”, not equal weight. A weight is never a source.",
                table=_blank_where_undefined(table.drop(columns="player_set")),
            )
        table = findings.rows("interactions", player_set)
        if table is not None:
            yield Section(
                title=f"{name}: interactions",
                figure=partial(shares.interactions, table, layer=findings.shown),
                caption="The share that appears only when all players of a row are kept, beyond "
                "what fewer bring. Interactions within noise are counted, not drawn. Weights "
                "without a source have none.",
            )
    for player_set, group in PLAYER_SETS.items():
        table = findings.rows("players", player_set)
        if table is not None:
            yield Section(
                title=f"{SETS[player_set]}: Shapley maps",
                figure=partial(_shapley_figure, findings, table, group),
                caption="What a player adds on average over all orders in which players can join. "
                "The maps of a row add up to its first: the part of the pattern that the sources "
                "bring.",
            )


def _shapley_figure(findings: Findings, table: pd.DataFrame, group: str) -> go.Figure:
    """Draw a player set's Shapley maps, and before them their sum, a row per replacement."""
    drawn: dict[str, Pooled] = {}
    flat: dict[str, list[int]] = {}
    first, *others = findings.replacements
    groups = {first: group} | {kind: f"{group}_{kind}" for kind in others}
    by_kind = {kind: maps for kind, name in groups.items() if (maps := findings.terms(name))}
    for kind, maps in by_kind.items():
        rows = findings.of(table, kind)
        noise = noisy_layers(rows, "player", "share")
        known = {*rows.dropna(subset=["share"])["layer"]}
        noise["position"] = [int(layer) for layer in {*rows["layer"]} - known]
        total = np.sum([shapley_map.values for shapley_map in maps.values()], axis=0)
        whole = replace(next(iter(maps.values())), values=total)
        for name, values in {"position": whole, **maps}.items():
            shown = f"{kind}: {words(name)}" if len(by_kind) > 1 else name
            drawn[shown], flat[shown] = values, noise.get(name, [])
    title = "What each player adds to the positional pattern (Shapley maps)"
    return findings.drawn(drawn, title=title, flat=flat, rows=len(by_kind))


def _blank_where_undefined(players: pd.DataFrame) -> pd.DataFrame:
    """Return the table of players with blanks where a number is undefined, or was not measured.

    Other empty cells belong to layers without pattern.
    """
    known = players[["share", "lost"]].notna().any(axis=1)
    blank = players.isna() & known.to_numpy()[:, None]
    return players.astype(object).mask(blank, "")


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
