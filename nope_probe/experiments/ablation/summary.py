"""What a run says, in two sentences and a few tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nope_probe.runtime.folder import Run

Tables = Mapping[str, pd.DataFrame]
SOURCE_WORDS = {
    "content": "the content of the text",
    "mask": "the causal mask",
    "rope": "RoPE",
    "pos_embed": "the learned position embeddings",
    "mask_x_rope": "mask and RoPE together",
    "mask_x_pos_embed": "mask and position embeddings together",
}
PLAYER_WORDS = {
    "qk": "the query-key circuit (W_Q with W_K)",
    "ov": "the value-output circuit (W_V with W_O)",
    "mask": "the causal mask",
    "rope": "RoPE",
    "mlp": "the MLPs",
}


def headline(manifest: Mapping[str, Any], tables: Tables) -> list[str]:
    """Say what was found in the layer with the strongest pattern: sources, then weights."""
    rows = tables["pattern"]
    intact = rows[rows["kept"] == manifest["conditions"][0]]
    seen = intact[intact["amplitude_low"] > 0]
    name = manifest["model"]["name"]
    if seen.empty:
        return [f"{name} shows no positional pattern in its attention that rises above the noise."]
    best = seen.loc[seen["amplitude"].idxmax()]
    layer = int(best["layer"])
    sentences = [_source_sentence(name, layer, best, tables["sources"])]
    if manifest["player_sets"]:
        sentences.append(_need_sentence(manifest, layer, tables["players"]))
    return sentences


def _source_sentence(name: str, layer: int, best: pd.Series, sources: pd.DataFrame) -> str:
    ours = sources[(sources["layer"] == layer)].dropna(subset=["share"])
    ours = ours.reindex(ours["share"].abs().sort_values(ascending=False).index)
    parts = [f"{SOURCE_WORDS[row['term']]} {_percent(row)}" for _, row in ours.iterrows()]
    drift = "prefers near keys" if best["locality"] > 0 else "prefers far keys"
    strength = f"{best['amplitude']:.2f} nats RMS [{best['amplitude_low']:.2f}, "
    return (
        f"In L{layer} of {name}, where it is strongest ({strength}"
        f"{best['amplitude_high']:.2f}]), the positional pattern of attention {drift} (rank "
        f"correlation {best['locality']:+.2f}) and comes from: {', '.join(parts)}."
    )


def _need_sentence(manifest: Mapping[str, Any], layer: int, players: pd.DataFrame) -> str:
    game = "circuits" if "circuits" in manifest["player_sets"] else "players"
    ours = players[(players["layer"] == layer) & (players["game"] == game)]
    if ours["share"].isna().all():
        return "What the players bring together does not rise above the noise: no pattern to share."
    changes = [
        f"{_change(row)} without {PLAYER_WORDS.get(row['player'], row['player'])}"
        for _, row in ours.sort_values("necessity", ascending=False).iterrows()
    ]
    text = f"Of what its parts bring together, the pattern {', '.join(changes)}."
    if layer in manifest["conjunctions"].get(game, []):
        text += (
            f" Each part's fair share is about 1/{len(ours)}: the signature of 'all are needed', "
            "not a measurement of equal weight."
        )
    return text


def _percent(row: pd.Series) -> str:
    value, low, high = (100 * row[key] for key in ("share", "low", "high"))
    return f"{value:z.0f}% [{low:z.0f}, {high:z.0f}]"


def _change(row: pd.Series) -> str:
    """Say what is lost without a player, or gained where the pattern grows without it."""
    ends = [100 * row[key] for key in ("necessity", "necessity_low", "necessity_high")]
    verb = "loses"
    if ends[0] < 0:
        verb, ends = "grows by", [-ends[0], -ends[2], -ends[1]]
    return f"{verb} {ends[0]:z.0f}% [{ends[1]:z.0f}, {ends[2]:z.0f}]"


def print_summary(run: Run, folder: Path) -> None:
    """Print the tables and sentences of a run to the terminal."""
    manifest, tables = run.manifest, run.tables
    console = Console(highlight=False)
    console.print(_sources(manifest, tables))
    for game in reversed(manifest["player_sets"]):
        console.print(_needs(game, tables["players"]))
    for sentence in headline(manifest, tables):
        console.print(sentence, end="\n\n")
    console.print(fine_print(manifest), style="dim")
    console.print(f"{manifest['seconds']:.0f} s; open {folder / 'report.html'}")


def fine_print(manifest: Mapping[str, Any]) -> str:
    """Say what the brackets mean and which keys are left out."""
    skip = manifest["skip_keys"]
    return (
        f"Brackets are 95% intervals from {manifest['settings']['folds']} folds; "
        f"{skip} first key{'' if skip == 1 else 's'} left out; noise takes locality towards 0."
    )


def _sources(manifest: Mapping[str, Any], tables: Tables) -> Table:
    """One section per layer: the pattern, and the terms that add up to it."""
    name, intact = manifest["model"]["name"], manifest["conditions"][0]
    table = Table(title=f"{name}: where the positional pattern comes from", box=SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    table.add_column("term")
    table.add_column("RMS, nats", justify="right")
    table.add_column("share of the pattern, %", justify="right")
    pattern = tables["pattern"]
    for whole in pattern[pattern["kept"] == intact].to_dict("records"):
        layer = whole["layer"]
        table.add_row(f"L{layer}", "pattern", _nats(whole, "amplitude"), _beside(tables, whole))
        sources = tables["sources"]
        for row in sources[sources["layer"] == layer].to_dict("records"):
            table.add_row("", row["term"].replace("_x_", " x "), _nats(row, "rms"), _cell(row))
        table.add_row("", "non-relative", *_non_relative(tables["non_relative"], layer))
        table.add_section()
    return table


def _beside(tables: Tables, whole: Mapping[str, Any]) -> str:
    """Say what belongs beside an amplitude: locality, and what content and sinks pass for."""
    parts = [f"locality {whole['locality']:+.2f}"]
    controls = tables["controls"]
    if not controls.empty:
        same = (controls["layer"] == whole["layer"]) & (controls["kept"] == whole["kept"])
        for row in controls[same].to_dict("records"):
            name = "shuffled" if row["tokens"] == "shuffled" else "skip 0"
            parts.append(f"{name} {row['amplitude']:.3f}")
    return ", ".join(parts)


def _non_relative(table: pd.DataFrame, layer: int) -> tuple[str, str]:
    """Say how strong the part is that does not depend on distance alone, and what the mask adds."""
    row = table[table["layer"] == layer].iloc[0].to_dict()
    low, high = row["difference_low"], row["difference_high"]
    change = f"by the mask {row['difference']:+z.3f} [{low:z.3f}, {high:z.3f}]"
    return _nats(row, "with_mask"), change


def _needs(game: str, players: pd.DataFrame) -> Table:
    """One section per layer: what each player means for what all of them bring."""
    title = "Which circuits it needs" if game == "circuits" else "Which parts it needs"
    table = Table(title=f"{title}, % of what all bring together", box=SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    table.add_column("player")
    for column in ("lost without it", "there alone", "fair share"):
        table.add_column(column, justify="right")
    ours = players[players["game"] == game]
    for layer, rows in ours.groupby("layer"):
        for index, row in enumerate(rows.to_dict("records")):
            cells = [_cell(row, name, 0) for name in ("necessity", "sufficiency", "share")]
            table.add_row("" if index else f"L{layer}", row["player"], *cells)
        table.add_section()
    return table


def _nats(row: Mapping[Any, Any], name: str) -> str:
    return f"{row[name]:z.3f} [{row[f'{name}_low']:z.3f}, {row[f'{name}_high']:z.3f}]"


def _cell(row: Mapping[Any, Any], name: str = "share", digits: int = 1) -> str:
    prefix = "" if name == "share" else f"{name}_"
    if pd.isna(row[name]):
        return "no pattern"
    low, high = 100 * row[f"{prefix}low"], 100 * row[f"{prefix}high"]
    return f"{100 * row[name]:z.{digits}f} [{low:z.{digits}f}, {high:z.{digits}f}]"
