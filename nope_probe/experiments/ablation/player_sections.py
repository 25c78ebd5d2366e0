"""The players of a run of `ablate`: shares, interactions, Shapley maps, per replacement.

Statements on a weight hold under all replacements, or name them. Estimates with an interval around
zero count as noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.analyses.shapley import player
from nope_probe.components import CIRCUITS
from nope_probe.conditions import weights_of
from nope_probe.experiments.replaced import stand_in
from nope_probe.experiments.sections import (
    NOISE,
    capitalised,
    fold_sizes_of,
    largest,
    lengths_of,
    listed,
    noisy_layers,
    of_layer,
    percents,
    strongest,
)
from nope_probe.experiments.verdicts import SETTLED, Verdict, verdict_of
from nope_probe.figures import measures
from nope_probe.figures.intervals import ValueAndBounds, interval_of, interval_text, percent
from nope_probe.figures.maps import term_maps
from nope_probe.figures.names import TABLE, phrase, words
from nope_probe.figures.panels import Pooled, RowMaps, pool
from nope_probe.figures.words import numbered_layers
from nope_probe.hooks.removing.stand_ins import STAND_INS, Replacement
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

CLEARLY = 0.05  # of the pattern: by how much more a weight takes than its circuit
NAMED = 3  # players in a heading
PLAYER_SETS = {"circuits": "shapley_circuits", "players": "shapley"}  # and their maps
SHAPLEY = tuple(PLAYER_SETS.values())


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

    def topic(self, player_set: str) -> str:
        """Return a player set's name, and what stands in for removed weights in its figures."""
        if not self.weights(player_set):
            return player_set
        return f"{player_set} (removed weights: {self.replacements[0]})"

    def conjunctions(self, player_set: str) -> Sequence[int]:
        """Return the layers in which all players of a set have about the same share."""
        return list(self.manifest.get("conjunctions", {}).get(player_set, []))

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


def player_sections(findings: Findings) -> Iterator[Section]:
    """Yield the sections of each player set: shares, interactions, and last the Shapley maps."""
    for player_set in PLAYER_SETS:
        table = findings.rows("players", player_set)
        if table is not None:
            players = list(dict.fromkeys(table["player"]))
            yield Section(
                title=player_finding(table, findings.layer, player_set),
                figure=partial(measures.player_shares, table),
                caption=f"{notes.POSITIONAL_PART} Lost without it: the player is needed. There "
                "alone: the source is enough. Amplification: the pattern's strength with the "
                "player, over its strength without the player. A weight can amplify and is never "
                "a source. "
                + conjunction_note(players, findings.conjunctions(player_set))
                + _rows_note(findings, table),
                table=_blank_where_undefined(table.drop(columns="player_set")),
            )
        table = findings.rows("interactions", player_set)
        if table is not None:
            yield Section(
                title=interaction_finding(
                    findings.first(table), findings.layer, findings.topic(player_set)
                ),
                figure=partial(measures.interactions, table, layer=findings.shown),
                caption="The share of that part that appears only when all players of a row are "
                "kept, beyond what fewer of them bring. A bar across zero may be zero. Weights "
                f"without a source have none.{_rows_note(findings, table)}",
            )
    for player_set, group in PLAYER_SETS.items():
        table = findings.rows("players", player_set)
        if table is not None:
            yield Section(
                title=f"Shapley maps of the {findings.topic(player_set)}",
                figure=partial(_shapley_figure, findings, table, group),
                caption="What a player adds on average over all orders in which players can join. "
                "The maps of a row add up to its first, the part of the positional pattern that "
                f"the sources bring.{_rows_note(findings, table.dropna(subset=['share']))}",
            )


def _rows_note(findings: Findings, table: pd.DataFrame) -> str:
    """Return what stands in for removed weights in a figure of players."""
    kinds = [kind for kind in findings.replaced if kind in set(table.get("replacement", ()))]
    if len(kinds) > 1:
        return f" One row or panel per replacement of removed weights: {listed(kinds)}."
    return f" Removed weights are replaced by {kinds[0]}." if kinds else ""


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


def conjunction_note(players: Sequence[str], layers: Sequence[int]) -> str:
    """Return the layers in which all players have about the same share, and its meaning.

    Args:
        players: the players of one set.
        layers: the layers, as the manifest's `conjunctions` names them.
    """
    if not layers:
        return "Shapley shares of all players add up to 1."
    named = ", ".join(words(player) for player in players)
    return (
        f"In {numbered_layers(layers)} each of {named} has a Shapley share of about "
        f"1/{len(players)}: {notes.CONJUNCTION}."
    )


def player_finding(players: pd.DataFrame, layer: int | None, player_set: str) -> str:
    """Return losses of the strongest layer's positional part without players, needed ones first.

    A weight that is needed under all replacements is named with its loss under each.

    Args:
        players: `players.csv` of one player set.
        layer: the layer with the strongest pattern, if there is one.
        player_set: its name.
    """
    topic, losses = capitalised(player_set), losses_of(of_layer(players, layer))
    if not losses:
        return f"{topic}: what the positional part needs is {NOISE}"
    needed = [loss for loss in losses if loss.verdict == "needed"]
    needed.sort(key=lambda loss: -round(min(loss.values), 2))
    texts = [
        f"{' or '.join(loss.percents())} without {phrase(loss.player)}" for loss in needed[:NAMED]
    ]
    part = f"L{layer}'s positional part"
    parts = [f"{part} loses {', '.join(texts)}"] if needed else []
    disputed = [loss for loss in losses if loss.verdict not in (*SETTLED, "unclear")]
    if disputed:
        names = listed([phrase(loss.player) for loss in disputed])
        parts.append(f"{listed(disputed[0].kinds)} disagree on {names}")
    unclear = [phrase(loss.player) for loss in losses if loss.verdict == "unclear"]
    if unclear:
        parts.append(f"whether L{layer} needs {listed(unclear)} is unclear")
    return f"{topic}: {'; '.join(parts) if parts else f'{part} needs none of them'}"


def interaction_finding(interactions: pd.DataFrame, layer: int | None, topic: str) -> str:
    """Return what players of the strongest layer bring only together, or take away.

    Args:
        interactions: `interactions.csv` of one player set and replacement.
        layer: the layer with the strongest pattern, if there is one.
        topic: the player set, with what stands in for removed weights.
    """
    topic = f"Interactions of the {topic}"
    rows = of_layer(interactions, layer)
    clear = rows[(rows["share_low"] > 0) | (rows["share_high"] < 0)]
    if clear.empty:
        return f"{topic}: {NOISE}"
    top = largest(clear, "share")
    name, share = words(top["players"]), percents(abs(top["share"]))
    if top["share"] > 0:
        return f"{topic}: {name} bring {share} of L{layer}'s positional part only together"
    return f"{topic}: {name} together take {share} off L{layer}'s positional part"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a layer's positional part without a player, by replacement.

    Attributes:
        player: its name.
        by_kind: per replacement of removed weights, the share that is lost with its bounds; one
            entry, under None, for a player that holds no weight.
    """

    player: str
    by_kind: Mapping[Replacement | None, ValueAndBounds]

    @property
    def kinds(self) -> list[str]:
        """The replacements of removed weights."""
        return [kind for kind in self.by_kind if kind is not None]

    @property
    def values(self) -> list[float]:
        """The share that is lost by each replacement."""
        return [value for value, _, _ in self.by_kind.values()]

    @property
    def verdict(self) -> Verdict:
        """The replacements' joint verdict."""
        return verdict_of(self.by_kind)

    def percents(self) -> list[str]:
        """Return the loss under each replacement, by name."""
        return [
            percents(value) + (f" ({kind})" if kind else "")
            for kind, (value, _, _) in self.by_kind.items()
        ]

    def changes(self) -> str:
        """Return the loss without the player, with the stand-in for its weights."""
        first, *others = (
            _change(interval) + (f" with {stand_in(self.player, kind)}" if kind else "")
            for kind, interval in self.by_kind.items()
        )
        verb = first.partition(" ")[0]
        return listed([first, *(other.removeprefix(f"{verb} ") for other in others)])


def weight_sentences(losses: Sequence[Loss], subject: str) -> Iterator[str]:
    """Yield a layer's losses without weights, a sentence for all weights of a verdict.

    Args:
        losses: of players that hold weights.
        subject: of the sentences.
    """
    for verdict in dict.fromkeys(loss.verdict for loss in losses):
        alike = [loss for loss in losses if loss.verdict == verdict]
        parts = [
            f"without {phrase(loss.player)}, {who} {loss.changes()}"
            for loss, who in zip(alike, [subject, *["it"] * len(alike)], strict=False)
        ]
        yield f"{capitalised('; '.join(parts))}{_conclusion(verdict, alike)}."


def _conclusion(verdict: Verdict, alike: Sequence[Loss]) -> str:
    """Return the words of a verdict on players; empty where there is one replacement."""
    kinds = alike[0].kinds
    if len(kinds) < 2:
        return ""
    weights = list(dict.fromkeys(weight for loss in alike for weight in weights_of(loss.player)))
    players = [
        f"the {words(loss.player)}" if loss.player in CIRCUITS else words(loss.player)
        for loss in alike
    ]
    several = len(weights) > 1
    own, reads = ("their", "they read") if several else ("its", "it reads")
    names = listed([words(weight) for weight in weights])
    pronoun, verb = ("it", "is") if len(alike) == 1 else ("they", "are")
    says = {
        "needed": f"{listed(players)} {verb} needed, by {listed(kinds)}",
        "not needed": f"{listed(players)} {verb} not needed, by {listed(kinds)}",
        "direction": f"of {names} the direction of {own} mean matters, not what {reads}",
        "content": f"what passes through {names} matters, not {own} own directions",
        "against": f"{listed(players)} {verb} against the pattern, by {listed(kinds)}",
        "unclear": f"the intervals of {listed(kinds)} do not tell whether {pronoun} {verb} needed",
        "replacement": "that depends on the replacement",
    }
    return f": {says[verdict]}"


def losses_of(rows: pd.DataFrame) -> list[Loss]:
    """Return what is lost without each player of one layer and set, in the table's order.

    A player that holds no weight is the same under all replacements.
    """
    losses: dict[str, dict[Replacement | None, ValueAndBounds]] = {}
    for row in rows.dropna(subset=["lost"]).to_dict("records"):
        kind = row["replacement"] if player(row["player"]).has_weight else None
        losses.setdefault(row["player"], {}).setdefault(kind, interval_of(row, "lost"))
    return [Loss(player=name, by_kind=by_kind) for name, by_kind in losses.items()]


def player_sentences(findings: Findings) -> Iterator[str]:
    """Yield losses of the strongest layer's positional part without players.

    Every weight of the main player set has a sentence. A weight of the other set has a sentence if
    replacements disagree on it, or if it takes more alone than in its circuit.
    """
    sets = findings.manifest["player_sets"]
    main = "circuits" if "circuits" in sets else "players"
    rows = of_layer(findings.several["players"], findings.layer)
    of_main = rows[rows["player_set"] == main]
    subject = positional_part(sets[main])
    losses = sorted(losses_of(of_main), key=lambda loss: -max(loss.values))
    if not losses:
        yield f"{subject} does not exceed the noise: its players have no shares."
        return
    sources = [loss for loss in losses if not player(loss.player).has_weight]
    weights = [loss for loss in losses if player(loss.player).has_weight]
    if sources:
        changes = [f"{loss.changes()} without {phrase(loss.player)}" for loss in sources]
        yield f"{subject} {listed(changes)}."
        subject = "this part"
    subject = f"{subject[0].lower()}{subject[1:]}"
    yield from weight_sentences(weights, subject)
    if main == "circuits":
        singles = losses_of(rows[rows["player_set"] == "players"])
        several = [loss for loss in singles if len(loss.kinds) > 1]
        differing = [loss for loss in several if loss.verdict not in SETTLED]
        yield from weight_sentences(differing, subject)
        for circuit in weights:
            yield from _more_than_the_circuit(circuit, singles, subject)
    if findings.layer in findings.conjunctions(main):
        named = f" with {findings.replacements[0]}" if weights else ""
        yield (
            f"Each player's Shapley share is about 1/{len(sets[main])}{named}: {notes.CONJUNCTION}."
        )


def _more_than_the_circuit(circuit: Loss, singles: Sequence[Loss], subject: str) -> Iterator[str]:
    """Yield which weights take more alone than in their circuit, by intervals, and why."""
    parts = [loss for loss in singles if loss.player in CIRCUITS.get(circuit.player, ())]
    for kind, (whole, _, high) in circuit.by_kind.items():
        lost = {
            loss.player: loss.by_kind[kind][0]
            for loss in parts
            if kind in loss.by_kind
            and loss.by_kind[kind][1] > high
            and loss.by_kind[kind][0] > whole + CLEARLY
        }
        if lost and kind is not None:
            alone = [f"{percents(value)} without {words(name)}" for name, value in lost.items()]
            both = " and ".join(words(name) for name in CIRCUITS[circuit.player])
            yield (
                f"With {kind}, {subject} loses more without one weight ({', '.join(alone)}) than "
                f"without {both} together ({percents(whole)}): {STAND_INS[kind].alone} Judge "
                f"{both} together."
            )


def positional_part(players: Sequence[str]) -> str:
    """Return the whole of some players' shares, as the subject of a sentence."""
    sources = [phrase(name) for name in players if player(name).is_source]
    if not sources:
        return "The pattern"
    verb = "brings" if len(sources) == 1 else "bring"
    return f"The part of the pattern that {listed(sources)} {verb}"


def _change(interval: ValueAndBounds) -> str:
    """Return the loss without a player, or the gain where the pattern grows without it."""
    value, low, high = percent(interval)
    if value < 0:
        return f"grows by {interval_text((-value, -high, -low), 'z.0f', '%')}"
    return f"loses {interval_text((value, low, high), 'z.0f', '%')}"
