"""The headline of an ablation run, and its tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from nope_probe.analyses.shapley import player
from nope_probe.components import phrase
from nope_probe.experiments.ablation.side_by_side import (
    agreement,
    lost_table,
    of_first,
    replacements_of,
)
from nope_probe.experiments.console import PlainConsole
from nope_probe.experiments.summary import (
    narrow_table,
    nats,
    no_pattern,
    preference,
    print_closing,
    strongest,
)
from nope_probe.figures.intervals import interval_of, interval_text, percent
from nope_probe.reports.notes import CONJUNCTION
from nope_probe.runtime.folder import Run

Tables = Mapping[str, pd.DataFrame]
SHARES = {"lost": "lost without", "alone": "alone", "share": "Shapley share"}


def headline(manifest: Mapping[str, Any], tables: Tables) -> list[str]:
    """Return the result in the layer with the strongest pattern: its sources, then its players."""
    rows, name = tables["pattern"], manifest["model"]["name"]
    best = strongest(rows[rows["kept"] == manifest["conditions"][0]])
    if best is None:
        return [no_pattern(name)]
    sentences = [_source_sentence(name, best, tables["sources"])]
    if manifest["player_sets"]:
        layer, ours = int(best["layer"]), of_first(manifest, tables)["players"]
        sentences.append(_player_sentence(manifest, layer, ours))
        sentences += agreement(manifest, layer, tables["players"])
    return sentences


def _source_sentence(name: str, best: pd.Series, sources: pd.DataFrame) -> str:
    ours = sources[(sources["layer"] == best["layer"]) & (sources["term"] != "position")]
    ours = ours.dropna(subset=["share"])
    ours = ours.reindex(ours["share"].abs().sort_values(ascending=False).index)
    parts = [f"{phrase(row['term'])} {_percent(row)}" for _, row in ours.iterrows()]
    strength = interval_text(interval_of(best, "amplitude"), ".2f", " nats RMS")
    return (
        f"In L{best['layer']:.0f} of {name}, where it is strongest ({strength}), the positional "
        f"pattern of attention {preference(best)} and comes from: {', '.join(parts)}."
    )


def _player_sentence(manifest: Mapping[str, Any], layer: int, players: pd.DataFrame) -> str:
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
        text += f" Each player's Shapley share is about 1/{len(names)}: {CONJUNCTION}."
    return text


def _positional_part(players: Sequence[str]) -> str:
    """Return what the shares of some players are shares of, as the subject of a sentence."""
    sources = [phrase(name) for name in players if player(name).is_source]
    if not sources:
        return "The pattern"
    if len(sources) == 1:
        return f"The part of the pattern that {sources[0]} brings"
    return f"The part of the pattern that {', '.join(sources[:-1])} and {sources[-1]} bring"


def _percent(row: pd.Series) -> str:
    return interval_text(percent(interval_of(row, "share")), "z.0f", "%")


def _change(row: pd.Series) -> str:
    """Return what is lost without a player, or gained where the pattern grows without it."""
    value, low, high = percent(interval_of(row, "lost"))
    if value < 0:
        return f"grows by {interval_text((-value, -high, -low), 'z.0f', '%')}"
    return f"loses {interval_text((value, low, high), 'z.0f', '%')}"


def print_summary(run: Run, folder: Path) -> None:
    """Print the tables and sentences of a run to the terminal."""
    manifest, tables = run.manifest, run.tables
    console = PlainConsole()
    console.print(_sources_table(manifest, tables))
    console.print()
    console.print(_beside_table(manifest, tables))
    for player_set in reversed(manifest["player_sets"]):
        names = manifest["player_sets"][player_set]
        ours = of_first(manifest, tables)["players"]
        console.print()
        console.print(_players_table(player_set, names, ours))
        if len(replacements_of(manifest)) > 1:
            console.print()
            console.print(lost_table(manifest, player_set, tables["players"]))
    console.print()
    print_closing(console, manifest, headline(manifest, tables), folder)


def _sources_table(manifest: Mapping[str, Any], tables: Tables) -> Table:
    """Return a section per layer: the pattern, and the terms that add up to it."""
    table = narrow_table(f"{manifest['model']['name']}: the sources of the positional pattern")
    table.add_column("layer", justify="right")
    table.add_column("term")
    table.add_column("RMS, nats", justify="right")
    table.add_column("share of the pattern, %", justify="right")
    for whole in _intact_rows(manifest, tables):
        table.add_row(f"L{whole['layer']}", "pattern", nats(whole, "amplitude"), "")
        sources = tables["sources"]
        for row in sources[sources["layer"] == whole["layer"]].to_dict("records"):
            term = row["term"].replace("_x_", " x ")
            table.add_row("", term, nats(row, "rms"), _share_cell(row, "share", 1))
        table.add_section()
    return table


def _intact_rows(manifest: Mapping[str, Any], tables: Tables) -> list[dict[Any, Any]]:
    """Return the measures of the intact model's pattern, one row per layer."""
    pattern = tables["pattern"]
    return pattern[pattern["kept"] == manifest["conditions"][0]].to_dict("records")


def _beside_table(manifest: Mapping[str, Any], tables: Tables) -> Table:
    """Return a row per layer: locality, the pattern's RMS in the controls, and what the mask adds.

    The last two columns are the RMS of the non-relative part, and how much of it the mask brings.
    """
    controls = {
        row["layer"]: _controls(manifest, tables, row) for row in _intact_rows(manifest, tables)
    }
    names = list(dict.fromkeys(name for found in controls.values() for name in found))
    table = narrow_table("Beside the sources (RMS in nats)")
    for heading in ("layer", "locality", *names, "non-relative", "by the mask"):
        table.add_column(heading, justify="right")
    effects = tables["non_relative"].drop_duplicates("layer").set_index("layer")
    for whole in _intact_rows(manifest, tables):
        layer = whole["layer"]
        cells = (
            f"{controls[layer][name]:.3f}" if name in controls[layer] else "" for name in names
        )
        effect = effects.loc[layer]
        change = interval_text(interval_of(effect, "difference"), "+z.3f")
        locality = "" if isnan(whole["locality"]) else f"{whole['locality']:+.2f}"
        table.add_row(f"L{layer}", locality, *cells, f"{effect['with_mask']:.3f}", change)
    return table


def _controls(
    manifest: Mapping[str, Any], tables: Tables, whole: Mapping[Any, Any]
) -> dict[str, float]:
    """Return the RMS of a layer's pattern with no key skipped, and on shuffled tokens."""
    controls = tables["controls"]
    same = (controls["layer"] == whole["layer"]) & (controls["kept"] == whole["kept"])
    # By the keys that are skipped: the tokens of the run itself may be shuffled ones.
    return {
        "shuffled" if row["skip_keys"] == manifest["skip_keys"] else "skip 0": row["amplitude"]
        for row in controls[same].to_dict("records")
    }


def _players_table(player_set: str, names: Sequence[str], players: pd.DataFrame) -> Table:
    """Return a section per layer: each player's part in what the sources among them bring."""
    part = _positional_part(names)
    title = f"The {player_set}, % of {part[0].lower()}{part[1:]}"
    table = narrow_table(title)
    table.add_column("layer", justify="right")
    table.add_column("player")
    for heading in (*SHARES.values(), "amplifies"):
        table.add_column(heading, justify="right")
    ours = players[players["player_set"] == player_set]
    for layer, rows in ours.groupby("layer"):
        for index, row in enumerate(rows.to_dict("records")):
            cells = list(_player_cells(row))
            table.add_row("" if index else f"L{layer}", row["player"], *cells)
        table.add_section()
    return table


def _player_cells(row: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a player's shares in % and its amplification; blank where only the share has a word."""
    for part in SHARES:
        defined = part == "share" or not pd.isna(row[part])
        yield _share_cell(row, part, 0) if defined else ""
    ratio = interval_of(row, "amplification")
    yield "" if pd.isna(ratio[0]) else interval_text(ratio, ".1f")


def _share_cell(row: Mapping[Any, Any], column: str, digits: int) -> str:
    return interval_text(percent(interval_of(row, column)), f"z.{digits}f")
