"""What a run of `ablate` shows of players: shares, interactions, Shapley maps, per replacement.

Findings take tables with one replacement. What has an interval around zero counts as noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.analyses.shapley import player
from nope_probe.components import TABLE, phrase, words
from nope_probe.experiments.sections import with_intervals
from nope_probe.experiments.wording import (
    NOISE,
    capitalised,
    largest,
    listed,
    noisy_layers,
    of_layer,
    percents,
    strongest,
)
from nope_probe.figures import shares
from nope_probe.figures.intervals import interval_of, interval_text, percent
from nope_probe.figures.maps import term_maps
from nope_probe.figures.words import numbered_layers
from nope_probe.maps.downsample import Pooled, pool
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

NEEDED = 0.1  # lost without a player that is needed, at least
NAMED = 3  # players in a heading
PLAYER_SETS = {"circuits": "shapley_circuits", "players": "shapley"}  # and their maps
SHAPLEY = tuple(PLAYER_SETS.values())
COLUMNS = {  # of the terminal's table
    "lost without": ("lost", "z.0%"),
    "alone": ("alone", "z.0%"),
    "Shapley share": ("share", "z.0%"),
    "amplifies": ("amplification", ".1f"),
}


class Findings:
    """The tables of a run, its maps, pooled when they are drawn, and the layer shown first.

    Attributes:
        manifest: what was run.
        maps: the run's maps by name.
        intact: what the intact model keeps.
        replacements: what removed weights were replaced by, the first being that of the headings.
        tables: the tables that have rows, with the first replacement alone,
        several: and with all replacements.
    """

    def __init__(self, run: Run) -> None:
        self.manifest, self.maps = run.manifest, run.arrays.get("maps", {})
        self.query_positions = run.query_positions
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
        return pool(cells, positions(n_drawn, len(cells)), self.query_positions)

    def terms(self, group: str) -> dict[str, Pooled]:
        """Return the maps of a group by their names within it."""
        names = self.names.get(group, [])
        return {key.removeprefix(f"{group}/"): self.pooled(key) for key in names}

    @cached_property
    def layer(self) -> int | None:
        """The layer with the strongest positional pattern; None if none exceeds the noise."""
        best = strongest(self.intact_rows())
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
        """Return the rows of a table that are of one replacement, or all where it names none."""
        if "replacement" not in table:
            return table
        return table[table["replacement"] == replacement].drop(columns="replacement")

    def first(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a table that are of the first replacement."""
        return self.of(table, self.replacements[0])

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
    parts, known = key.split("/")[1].split("_x_"), list(TABLE)
    places = [known.index(part) if part in TABLE else len(known) for part in parts]
    return len(parts), places, key


def player_sections(found: Findings) -> Iterator[Section]:
    """Yield the sections of each player set: shares, interactions, and last the Shapley maps."""
    replaced = rows_note = ""
    if len(found.replacements) > 1:
        replaced = f" ({found.replacements[0]})"
        kinds = listed(found.replacements)
        rows_note = f" One row or panel per replacement of removed weights: {kinds}."
    for player_set in PLAYER_SETS:
        table = found.rows("players", player_set)
        if table is not None:
            players = list(dict.fromkeys(table["player"]))
            yield Section(
                title=player_finding(found.first(table), found.layer, player_set) + replaced,
                figure=partial(shares.player_shares, table),
                caption=f"{notes.POSITIONAL_PART} Lost without it: the player is needed. There "
                "alone: the source is enough. Amplification: the strength with the player, over "
                "that without, where any is left. A weight can amplify and is never a source. "
                + conjunction_note(players, found.conjunctions(player_set))
                + rows_note,
                table=_blank_where_undefined(table.drop(columns="player_set")),
            )
        table = found.rows("interactions", player_set)
        if table is not None:
            yield Section(
                title=interaction_finding(found.first(table), found.layer, player_set) + replaced,
                figure=partial(shares.interactions, table, layer=found.shown),
                caption="The share of that part that appears only when all players of a row are "
                "kept, beyond what fewer of them bring. A bar across zero may be zero. Weights "
                f"without a source have none.{rows_note}",
            )
    for player_set, group in PLAYER_SETS.items():
        table = found.rows("players", player_set)
        if table is not None:
            yield Section(
                title=f"Shapley maps of the {player_set}",
                figure=partial(_shapley_figure, found, table, group),
                caption="What a player adds on average over all orders in which players can join. "
                "The maps of a row add up to its first, the part of the positional pattern that "
                f"the sources bring.{rows_note}",
            )


def _shapley_figure(found: Findings, table: pd.DataFrame, group: str) -> go.Figure:
    """Draw a player set's Shapley maps, and before them their sum, a row per replacement."""
    drawn: dict[str, Pooled] = {}
    flat: dict[str, list[int]] = {}
    n_rows = 0
    for kind in found.replacements:
        maps = found.terms(group if kind == found.replacements[0] else f"{group}_{kind}")
        if not maps:
            continue
        rows, n_rows = found.of(table, kind), n_rows + 1
        noise = noisy_layers(rows, "player", "share")
        known = {*rows.dropna(subset=["share"])["layer"]}
        noise["position"] = [int(layer) for layer in {*rows["layer"]} - known]
        total = np.sum([each.values for each in maps.values()], axis=0)
        maps = {"position": replace(next(iter(maps.values())), values=total), **maps}
        for name, values in maps.items():
            shown = f"{kind}: {words(name)}" if len(found.replacements) > 1 else name
            drawn[shown], flat[shown] = values, noise.get(name, [])
    return term_maps(
        drawn,
        title="What each player adds to the positional pattern (Shapley maps)",
        layer=found.shown,
        layers=found.layers,
        flat=flat,
        rows=n_rows,
    )


def _blank_where_undefined(players: pd.DataFrame) -> pd.DataFrame:
    """Return the table of players with blanks where a number is undefined though there is a share.

    The other empty cells are those of a layer without pattern.
    """
    blank = players.isna() & players["share"].notna().to_numpy()[:, None]
    return players.astype(object).mask(blank, "")


def conjunction_note(players: Sequence[str], layers: Sequence[int]) -> str:
    """Return the layers in which all players have about the same share, and what that means.

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
    """Return without which players the strongest layer keeps how much of its positional part."""
    topic = capitalised(player_set)
    if layer is None or of_layer(players, layer)["lost"].isna().all():
        return f"{topic}: what the positional part needs is {NOISE}"
    rows = of_layer(players, layer)
    # Of players without which nothing is kept, the first are the sources.
    lost = rows["lost"].clip(upper=1).round(2).sort_values(ascending=False, kind="stable")
    needed = rows.loc[lost.index][lambda each: each["lost_low"] > NEEDED]
    if needed.empty:
        return f"{topic}: L{layer}'s positional part needs none of them"
    first, *others = [
        (phrase(row["player"]), percents(max(0.0, 1 - row["lost"])))
        for _, row in needed[:NAMED].iterrows()
    ]
    text = f"{topic}: without {first[0]} L{layer} keeps {first[1]} of its positional part"
    return text + "".join(f", without {name} {kept}" for name, kept in others)


def interaction_finding(interactions: pd.DataFrame, layer: int | None, player_set: str) -> str:
    """Return what players of the strongest layer bring only together, or take away."""
    topic = f"Interactions of the {player_set}"
    rows = of_layer(interactions, layer)
    clear = rows[(rows["share_low"] > 0) | (rows["share_high"] < 0)]
    if clear.empty:
        return f"{topic}: {NOISE}"
    top = largest(clear, "share")
    name, share = words(top["players"]), percents(abs(top["share"]))
    if top["share"] > 0:
        return f"{topic}: {name} bring {share} of L{layer}'s positional part only together"
    return f"{topic}: {name} together take {share} off L{layer}'s positional part"


def player_sentence(found: Findings) -> str:
    """Return what the strongest layer's positional part loses without each player."""
    sets = found.manifest["player_sets"]
    player_set = "circuits" if "circuits" in sets else "players"
    rows = of_layer(found.tables["players"], found.layer).query("player_set == @player_set")
    subject = _positional_part(sets[player_set])
    if rows["share"].isna().all():
        return f"{subject} does not exceed the noise: its players have no shares."
    changes = [
        f"{_change(row)} without {phrase(row['player'])}"
        for _, row in rows.dropna(subset=["lost"]).sort_values("lost", ascending=False).iterrows()
    ]
    text = f"{subject} {', '.join(changes)}."
    if found.layer in found.conjunctions(player_set):
        text += (
            f" Each player's Shapley share is about 1/{len(sets[player_set])}: {notes.CONJUNCTION}."
        )
    return text


def _positional_part(players: Sequence[str]) -> str:
    """Return what the shares of some players are shares of, as the subject of a sentence."""
    sources = [phrase(name) for name in players if player(name).is_source]
    if not sources:
        return "The pattern"
    verb = "brings" if len(sources) == 1 else "bring"
    return f"The part of the pattern that {listed(sources)} {verb}"


def _change(row: pd.Series) -> str:
    """Return what is lost without a player, or gained where the pattern grows without it."""
    value, low, high = percent(interval_of(row, "lost"))
    if value < 0:
        return f"grows by {interval_text((-value, -high, -low), 'z.0f', '%')}"
    return f"loses {interval_text((value, low, high), 'z.0f', '%')}"


def agreement(found: Findings) -> Iterator[str]:
    """Yield which players the strongest layer's pattern needs under all replacements.

    A player is needed where a tenth or more is lost without it, by its interval.
    """
    kinds = found.replacements
    for player_set, members in found.manifest["player_sets"].items() if len(kinds) > 1 else ():
        rows = of_layer(found.several["players"], found.layer)
        of_set = rows.query("player_set == @player_set").set_index(["player", "replacement"])
        low = of_set["lost_low"].to_dict()
        needed = {
            member: [kind for kind in kinds if low.get((member, kind), 0) > NEEDED]
            for member in members
        }
        always = [phrase(member) for member in members if len(needed[member]) == len(kinds)]
        never = [phrase(member) for member in members if not needed[member]]
        parts = [f"{_listed(always)} needed under {listed(kinds)}"] if always else []
        parts += [
            f"{phrase(member)} is needed under {listed(some)} only"
            for member, some in needed.items()
            if 0 < len(some) < len(kinds)
        ]
        parts += [f"{_listed(never)} needed under none of {listed(kinds)}"] if never else []
        text = "; ".join(parts)
        where = f"Of the {player_set} in L{found.layer}"
        yield f"{where} (needed: a tenth or more is lost without), {text}."


def _listed(names: Sequence[str]) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


def player_tables(found: Findings) -> dict[str, pd.DataFrame]:
    """Return tables of text for the terminal: each player's part in what the sources bring."""
    tables = {}
    for player_set in reversed(found.manifest["player_sets"]):
        rows = found.rows("players", player_set)
        if rows is None:
            continue
        members = found.manifest["player_sets"][player_set]
        part = _positional_part(members)
        title = f"The {player_set}, % of {part[0].lower()}{part[1:]}"
        tables[title] = _players_as_text(found.first(rows))
        if len(found.replacements) > 1:
            title = f"The {player_set}: lost without, %, when removed weights are replaced by"
            tables[title] = _lost_as_text(found.replacements, members, rows)
    return tables


def _players_as_text(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per layer and player; blank where a number is undefined though a share is."""
    names = {"layer": _layers_as_text(rows), "player": list(rows["player"])}
    table = with_intervals(names, rows, COLUMNS)
    for heading, (column, _) in COLUMNS.items():
        if column != "share":
            table[heading] = table[heading].where(rows[column].notna().to_numpy(), "")
    return table


def _lost_as_text(names: Sequence[str], members: Sequence[str], rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per layer and player: what is lost without it under each replacement."""
    first = rows[(rows["replacement"] == names[0]) & rows["player"].isin(members)]
    table = {"layer": _layers_as_text(first), "player": list(first["player"])}
    for name in names:
        lost = rows[rows["replacement"] == name].set_index(["layer", "player"])
        table[name] = [
            interval_text(percent(interval_of(lost.loc[place], "lost")), "z.0f")
            if place in lost.index
            else ""
            for place in zip(first["layer"], first["player"], strict=True)
        ]
    return pd.DataFrame(table)


def _layers_as_text(rows: pd.DataFrame) -> list[str]:
    """Return the layer of each row, blank where the row before has it."""
    is_first = rows["layer"] != rows["layer"].shift()
    return [f"L{layer}" if new else "" for layer, new in zip(rows["layer"], is_first, strict=True)]
