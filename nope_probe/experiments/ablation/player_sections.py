"""What a run of `ablate` shows of players: shares, interactions, Shapley maps, per replacement.

Findings take tables with one replacement. What has an interval around zero counts as noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.analyses.shapley import player
from nope_probe.components import TABLE, phrase, words
from nope_probe.experiments.sections import with_intervals
from nope_probe.experiments.wording import (
    NOISE,
    capitalised,
    largest,
    listed,
    noisy_layers,
    numbered_layers,
    of_layer,
    percents,
    strongest,
)
from nope_probe.figures import shares
from nope_probe.figures.intervals import interval_of, interval_text, percent
from nope_probe.figures.maps import term_maps
from nope_probe.maps.downsample import Pooled, pool
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

NEEDED = 0.1  # lost without a player that is needed, at least
NAMED = 3  # players in a heading
PLAYER_SETS = {"circuits": "shapley_circuits", "players": "shapley"}  # and their maps
SHAPLEY = tuple(PLAYER_SETS.values())
SHARES = {"lost without": "lost", "alone": "alone", "Shapley share": "share"}


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
        self.intact = str(self.manifest["conditions"][0])
        self.replacements = replacements_of(self.manifest)
        self.several = {name: table for name, table in run.tables.items() if len(table)}
        self.tables = of_first(self.manifest, self.several)

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
        return pool(cells, positions(n_drawn, len(cells)))

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
        return int(np.argmax([_spread(cells) for cells in self.pooled("pattern/all").values]))

    def intact_rows(self) -> pd.DataFrame:
        """Return the measures of the intact model's pattern, a row per layer."""
        pattern = self.tables["pattern"]
        return pattern[pattern["kept"] == self.intact]

    def rows(self, name: str, player_set: str) -> pd.DataFrame | None:
        """Return a player set's rows of a table, of all replacements."""
        table = self.several.get(name)
        rows = None if table is None else table[table["player_set"] == player_set]
        return rows if rows is not None and len(rows) else None

    def first(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a table that are of the first replacement."""
        return of_first(self.manifest, {"table": table})["table"]

    def conjunctions(self, player_set: str) -> Sequence[int]:
        """Return the layers in which all players of a set have about the same share."""
        return list(self.manifest.get("conjunctions", {}).get(player_set, []))

    def noise(self, table: pd.DataFrame, name: str, column: str) -> dict[str, list[int]]:
        """Return per map, and for all, the layers in which it does not exceed its noise."""
        rows = self.intact_rows()
        whole = rows.loc[~(rows["amplitude_low"] > 0), "layer"].astype(int).tolist()
        return {**noisy_layers(table, name, column), "all": whole}


def _order(key: str) -> tuple[int, str]:
    """Return a sort key: the order of the words, and unions last."""
    name = key.split("/")[1]
    return list(TABLE).index(name) if name in TABLE else len(TABLE), name


def _spread(cells: Float[np.ndarray, "query_pos key_pos"]) -> float:
    known = cells[np.isfinite(cells)]
    return float(known.std()) if known.size else 0.0


def of_first(
    manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """Return a run's tables with the first replacement alone."""
    first, chosen = replacements_of(manifest)[0], dict(tables)
    for name, table in tables.items():
        if "replacement" in table:
            chosen[name] = table[table["replacement"] == first].drop(columns="replacement")
    return chosen


def replacements_of(manifest: Mapping[str, Any]) -> list[str]:
    """Return the replacements of a run, the first being that of its maps and figures."""
    return manifest.get("replacements", ["identity"])


def player_sections(found: Findings) -> Iterator[Section]:
    """Yield the sections of each player set."""
    for player_set in PLAYER_SETS:
        yield from _players(found, player_set)
        yield from _interactions(found, player_set)
    for player_set, group in PLAYER_SETS.items():
        yield from _shapley_maps(found, player_set, group)


def _players(found: Findings, player_set: str) -> Iterator[Section]:
    table = found.rows("players", player_set)
    if table is None:
        return
    ours = found.first(table)
    players = list(dict.fromkeys(table["player"]))
    yield Section(
        title=player_finding(ours, found.layer, player_set) + _replaced_by(found),
        figure=partial(shares.player_shares, table),
        caption=f"{notes.POSITIONAL_PART} Lost without it: the player is needed. There alone: "
        "the source is enough. Amplification: the strength with the player, over that without, "
        "where any is left. "
        "A weight can amplify and is never a source. "
        + conjunction_note(players, found.conjunctions(player_set))
        + _rows_note(found),
        table=_blank_where_undefined(table.drop(columns="player_set")),
    )


def _replaced_by(found: Findings) -> str:
    return f" ({found.replacements[0]})" if len(found.replacements) > 1 else ""


def _rows_note(found: Findings) -> str:
    """Return what the rows of a figure are where weights were replaced in several ways."""
    if len(found.replacements) < 2:
        return ""
    return f" One row or panel per replacement of removed weights: {listed(found.replacements)}."


def _interactions(found: Findings, player_set: str) -> Iterator[Section]:
    table = found.rows("interactions", player_set)
    if table is None:
        return
    ours = found.first(table)
    finding = interaction_finding(ours, found.layer, player_set)
    yield Section(
        title=finding + _replaced_by(found),
        figure=partial(shares.interactions, table, layer=found.shown),
        caption="The share of that part that appears only when all players of a row are "
        "kept, beyond what fewer of them bring. A bar across zero may be zero. Weights "
        f"without a source have none.{_rows_note(found)}",
    )


def _shapley_maps(found: Findings, player_set: str, group: str) -> Iterator[Section]:
    table = found.rows("players", player_set)
    if table is None:
        return
    ours, conjunctions = found.first(table), found.conjunctions(player_set)
    finding = shapley_finding(ours, found.layer, player_set, conjunctions)
    yield Section(
        title=finding + _replaced_by(found),
        figure=partial(_shapley_figure, found, table, group),
        caption="What a player adds on average over all orders in which players can join. "
        "The maps of a row add up to its first, the part of the positional pattern that the "
        f"sources bring.{_rows_note(found)}",
    )


def _shapley_figure(found: Findings, table: pd.DataFrame, group: str) -> go.Figure:
    terms = _shapley_terms(found, group)
    return term_maps(
        terms,
        title="What each player adds to the positional pattern (Shapley maps)",
        layer=found.shown,
        flat=_shapley_noise(found, table),
        rows=len(terms) // (len(found.names[group]) + 1),
    )


def _shapley_terms(found: Findings, group: str) -> dict[str, Pooled]:
    """Return a player set's Shapley maps, and before them their sum, for each replacement."""
    drawn: dict[str, Pooled] = {}
    for name in found.replacements:
        maps = found.terms(group if name == found.replacements[0] else f"{group}_{name}")
        if maps:
            total = np.sum([each.values for each in maps.values()], axis=0)
            together = {"position": replace(next(iter(maps.values())), values=total), **maps}
            drawn |= {_map_name(found, name, key): each for key, each in together.items()}
    return drawn


def _map_name(found: Findings, replacement: str, name: str) -> str:
    return name if len(found.replacements) == 1 else f"{replacement}: {words(name)}"


def _shapley_noise(found: Findings, table: pd.DataFrame) -> dict[str, list[int]]:
    named = table.get("replacement", pd.Series(found.replacements[0], index=table.index))
    names = [_map_name(found, *each) for each in zip(named, table["player"], strict=True)]
    noise = noisy_layers(table.assign(map=names), "map", "share")
    for name in found.replacements:
        ours = table[named == name]
        rows = ours.groupby("layer")["share"].apply(lambda shares: shares.isna().all())
        noise[_map_name(found, name, "position")] = [int(layer) for layer in rows.index[rows]]
    return noise


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


def shapley_finding(
    players: pd.DataFrame, layer: int | None, player_set: str, conjunctions: Sequence[int]
) -> str:
    """Return which player adds most on average, or that all are needed.

    Args:
        players: one player set's rows.
        layer: the layer with the strongest pattern, if there is one.
        player_set: the set's name.
        conjunctions: layers in which all players have about the same share.
    """
    topic, rows = f"Shapley maps of the {player_set}", of_layer(players, layer)
    clear = rows[rows["share_low"] > 0]
    if clear.empty:
        return f"{topic}: {NOISE}"
    if layer in conjunctions:
        return f"{topic}: L{layer} needs all of them, so each has about 1/{len(rows)}"
    top = largest(clear, "share")
    share = percents(top["share"])
    return f"{topic}: {phrase(top['player'])} adds most to L{layer}'s positional part, {share}"


def player_sentence(manifest: Mapping[str, Any], layer: int, players: pd.DataFrame) -> str:
    """Return what the positional part loses without each player, as the headline says it."""
    player_set = "circuits" if "circuits" in manifest["player_sets"] else "players"
    ours = players[(players["layer"] == layer) & (players["player_set"] == player_set)]
    names = manifest["player_sets"][player_set]
    subject = _positional_part(names)
    if ours["share"].isna().all():
        return f"{subject} does not exceed the noise: its players have no shares."
    changes = [
        f"{_change(row)} without {phrase(row['player'])}"
        for _, row in ours.dropna(subset=["lost"]).sort_values("lost", ascending=False).iterrows()
    ]
    text = f"{subject} {', '.join(changes)}."
    if layer in manifest["conjunctions"].get(player_set, []):
        text += f" Each player's Shapley share is about 1/{len(names)}: {notes.CONJUNCTION}."
    return text


def _positional_part(players: Sequence[str]) -> str:
    """Return what the shares of some players are shares of, as the subject of a sentence."""
    sources = [phrase(name) for name in players if player(name).is_source]
    if not sources:
        return "The pattern"
    if len(sources) == 1:
        return f"The part of the pattern that {sources[0]} brings"
    return f"The part of the pattern that {', '.join(sources[:-1])} and {sources[-1]} bring"


def _change(row: pd.Series) -> str:
    """Return what is lost without a player, or gained where the pattern grows without it."""
    value, low, high = percent(interval_of(row, "lost"))
    if value < 0:
        return f"grows by {interval_text((-value, -high, -low), 'z.0f', '%')}"
    return f"loses {interval_text((value, low, high), 'z.0f', '%')}"


def agreement(manifest: Mapping[str, Any], layer: int, players: pd.DataFrame) -> Iterator[str]:
    """Yield which players one layer's positional pattern needs under all replacements.

    A player is needed where a tenth or more is lost without it, by its interval.
    """
    names = replacements_of(manifest)
    for player_set, members in manifest["player_sets"].items() if len(names) > 1 else ():
        ours = players[(players["layer"] == layer) & (players["player_set"] == player_set)]
        needed = {member: _needing(ours[ours["player"] == member], names) for member in members}
        always = [phrase(member) for member in members if len(needed[member]) == len(names)]
        never = [phrase(member) for member in members if not needed[member]]
        parts = [f"{_listed(always)} needed under {listed(names)}"] if always else []
        parts += [
            f"{phrase(member)} is needed under {listed(some)} only"
            for member, some in needed.items()
            if 0 < len(some) < len(names)
        ]
        parts += [f"{_listed(never)} needed under none of {listed(names)}"] if never else []
        text = "; ".join(parts)
        yield f"Of the {player_set} in L{layer} (needed: a tenth or more is lost without), {text}."


def _needing(rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    low = {str(row["replacement"]): row["lost_low"] for _, row in rows.iterrows()}
    return [name for name in names if low.get(name, 0) > NEEDED]


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
    columns = {heading: (column, "z.0%") for heading, column in SHARES.items()}
    names = {"layer": _layers_as_text(rows), "player": list(rows["player"])}
    table = with_intervals(names, rows, {**columns, "amplifies": ("amplification", ".1f")})
    for heading, column in (*SHARES.items(), ("amplifies", "amplification")):
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
