"""The sections about players: their shares, interactions and Shapley maps, per replacement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from nope_probe.components import words
from nope_probe.experiments.ablation import findings
from nope_probe.experiments.ablation.parts import PLAYER_SETS, Parts
from nope_probe.experiments.ablation.side_by_side import of_first
from nope_probe.experiments.wording import listed, numbered_layers
from nope_probe.figures import shares
from nope_probe.figures.maps import term_maps
from nope_probe.maps.downsample import Pooled
from nope_probe.reports import notes
from nope_probe.reports.page import Section


def player_sections(parts: Parts) -> Iterator[Section]:
    """Yield the sections of each player set."""
    for player_set in PLAYER_SETS:
        yield from _players(parts, player_set)
        yield from _interactions(parts, player_set)
    for player_set, group in PLAYER_SETS.items():
        yield from _shapley_maps(parts, player_set, group)


def _players(parts: Parts, player_set: str) -> Iterator[Section]:
    table = parts.rows("players", player_set)
    if table is None:
        return
    ours = of_first(parts.manifest, {"players": table})["players"]
    players = list(dict.fromkeys(table["player"]))
    yield Section(
        title=findings.player_finding(ours, parts.layer, player_set) + _replaced_by(parts),
        figure=shares.player_shares(table),
        caption=f"{notes.POSITIONAL_PART} Lost without it: the player is needed. There alone: "
        "the source is enough. Amplification: the strength with the player, over that without, "
        "where any is left. "
        "A weight can amplify and is never a source. "
        + conjunction_note(players, parts.conjunctions(player_set))
        + _rows_note(parts),
        table=_blank_where_undefined(table.drop(columns="player_set")),
    )


def _replaced_by(parts: Parts) -> str:
    return f" ({parts.replacements[0]})" if len(parts.replacements) > 1 else ""


def _rows_note(parts: Parts) -> str:
    """Return what the rows of a figure are where weights were replaced in several ways."""
    if len(parts.replacements) < 2:
        return ""
    return f" One row or panel per replacement of removed weights: {listed(parts.replacements)}."


def _interactions(parts: Parts, player_set: str) -> Iterator[Section]:
    table = parts.rows("interactions", player_set)
    if table is None:
        return
    ours = of_first(parts.manifest, {"interactions": table})["interactions"]
    finding = findings.interaction_finding(ours, parts.layer, player_set)
    yield Section(
        title=finding + _replaced_by(parts),
        figure=shares.interactions(table, layer=parts.shown),
        caption="The share of that part that appears only when all players of a row are "
        "kept, beyond what fewer of them bring. A bar across zero may be zero. Weights "
        f"without a source have none.{_rows_note(parts)}",
    )


def _shapley_maps(parts: Parts, player_set: str, group: str) -> Iterator[Section]:
    if not parts.terms[group]:
        return
    table, title = parts.rows("players", player_set), f"Shapley maps: {player_set}"
    noise = None
    if table is not None:
        ours = of_first(parts.manifest, {"players": table})["players"]
        conjunctions = parts.conjunctions(player_set)
        title = findings.shapley_finding(ours, parts.layer, player_set, conjunctions)
        title += _replaced_by(parts)
        noise = _shapley_noise(parts, table)
    terms = _shapley_terms(parts, group)
    yield Section(
        title=title,
        figure=term_maps(
            terms,
            title="What each player adds to the positional pattern (Shapley maps)",
            layer=parts.shown,
            flat=noise,
            rows=len(terms) // (len(parts.terms[group]) + 1),
        ),
        caption="What a player adds on average over all orders in which players can join. "
        "The maps of a row add up to its first, the part of the positional pattern that the "
        f"sources bring.{_rows_note(parts)}",
    )


def _shapley_terms(parts: Parts, group: str) -> dict[str, Pooled]:
    """Return a player set's Shapley maps, and before them their sum, for each replacement."""
    found: dict[str, Pooled] = {}
    for name in parts.replacements:
        maps = parts.terms.get(group if name == parts.replacements[0] else f"{group}_{name}", {})
        if maps:
            total = np.sum([each.values for each in maps.values()], axis=0)
            together = {"position": replace(parts.whole, values=total), **maps}
            found |= {_map_name(parts, name, key): each for key, each in together.items()}
    return found


def _map_name(parts: Parts, replacement: str, name: str) -> str:
    return name if len(parts.replacements) == 1 else f"{replacement}: {words(name)}"


def _shapley_noise(parts: Parts, table: pd.DataFrame) -> dict[str, list[int]]:
    named = table.get("replacement", pd.Series(parts.replacements[0], index=table.index))
    names = [_map_name(parts, *each) for each in zip(named, table["player"], strict=True)]
    noise = findings.noisy_layers(table.assign(map=names), "map", "share")
    for name in parts.replacements:
        ours = table[named == name]
        rows = ours.groupby("layer")["share"].apply(lambda shares: shares.isna().all())
        noise[_map_name(parts, name, "position")] = [int(layer) for layer in rows.index[rows]]
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
