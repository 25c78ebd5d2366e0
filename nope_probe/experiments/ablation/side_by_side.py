"""Several replacements side by side: their tables as one, and the statements they agree on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from nope_probe.components import Replacement, phrase
from nope_probe.figures.intervals import interval_of, interval_text, percent

NEEDED = 0.1  # the part of the pattern that is lost, at least, without a player that is needed


def side_by_side(tables: Mapping[Replacement, pd.DataFrame]) -> pd.DataFrame:
    """Return tables of players or interactions as one, with a column `replacement`.

    Args:
        tables: per replacement, its table; columns that only the first has are empty in the others.
    """
    first = next(iter(tables.values()))
    named = [each.assign(replacement=name) for name, each in tables.items() if len(each)]
    columns = [*first.columns[:3], "replacement", *first.columns[3:]]
    return pd.concat(named or [first.assign(replacement=[])], ignore_index=True)[columns]


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
        parts = [f"{_listed(always)} needed under {_words(names)}"] if always else []
        parts += [
            f"{phrase(member)} is needed under {_words(some)} only"
            for member, some in needed.items()
            if 0 < len(some) < len(names)
        ]
        parts += [f"{_listed(never)} needed under none of {_words(names)}"] if never else []
        text = "; ".join(parts)
        yield f"Of the {player_set} in L{layer} (needed: a tenth or more is lost without), {text}."


def _needing(rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    low = {str(row["replacement"]): row["lost_low"] for _, row in rows.iterrows()}
    return [name for name in names if low.get(name, 0) > NEEDED]


def _listed(names: Sequence[str]) -> str:
    return f"{_words(names)} {'is' if len(names) == 1 else 'are'}"


def _words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def lost_table(manifest: Mapping[str, Any], player_set: str, players: pd.DataFrame) -> Table:
    """Return a table for the terminal: what is lost without each player, per replacement."""
    names = replacements_of(manifest)
    title = f"The {player_set}: lost without, %, when removed weights are replaced by"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    table.add_column("player")
    for name in names:
        table.add_column(name, justify="right")
    ours = players[players["player_set"] == player_set]
    for layer, rows in ours.groupby("layer"):
        for index, member in enumerate(manifest["player_sets"][player_set]):
            of_member = rows[rows["player"] == member]
            cells = {row["replacement"]: _cell(row) for _, row in of_member.iterrows()}
            table.add_row("" if index else f"L{layer}", member, *(cells.get(n, "") for n in names))
        table.add_section()
    return table


def _cell(row: pd.Series) -> str:
    return interval_text(percent(interval_of(row, "lost")), "z.0f")
