"""The ablate command's report, from what a run folder holds: no model and no torch is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figures import measures, shares
from nope_probe.figures.downsample import Pooled, pool, row_centred
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.style import WORDS, words
from nope_probe.reports.page import Section, page, positions

EQUAL = 0.1
GROUPS = ("source", "shapley_circuits", "shapley", "mean_covariance")
GAMES = {"circuits": "the circuits", "players": "single matrices"}


def ablation_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    headline: Sequence[str],
) -> str:
    """Write the report of an ablation run.

    Args:
        maps: `score/<kept>`, `source/<term>`, `mean_covariance/<term>`, `shapley/<player>` and
            `shapley_circuits/<player>`, arrays or tensors [n_layers, query_pos, key_pos] in nats;
            the first of the manifest's conditions names the intact model's map.
        tables: `sources`, `players`, `interactions`, `pattern`, `controls`, `mean_covariance`;
            those that a run does not have may be missing or empty.
        manifest: what was run; `skip_keys` says which first keys the patterns leave out.
        headline: the result, a sentence each.

    Raises:
        KeyError: if the intact model's map is missing.
    """
    model = manifest.get("model", {})
    name = model.get("name") if isinstance(model, Mapping) else model
    title = f"Where the positional pattern of {name or 'a model'} comes from"
    parts = _Parts(maps, tables, manifest)
    return page(title, headline, list(parts.sections()), manifest)


class _Parts:
    """The report's sections, each from the maps or the table that it needs."""

    def __init__(
        self,
        maps: Mapping[str, Any],
        tables: Mapping[str, pd.DataFrame],
        manifest: Mapping[str, Any],
    ) -> None:
        self.intact = str(manifest["conditions"][0])
        self.tables = {name: table for name, table in tables.items() if len(table)}
        score = np.asarray(maps[f"score/{self.intact}"])
        names = {group: [key for key in maps if key.startswith(f"{group}/")] for group in GROUPS}
        drawn = 1 + sum(len(keys) + 1 for keys in names.values())
        size, skip_keys = positions(drawn, len(score)), _skip_keys(manifest)
        self.score = pool(score, size)
        self.whole = _pattern(score, skip_keys, size)
        self.terms = {
            group: {
                key.removeprefix(f"{group}/"): _pattern(np.asarray(maps[key]), skip_keys, size)
                for key in sorted(keys, key=_order)
            }
            for group, keys in names.items()
        }
        self.layer = int(np.argmax([_spread(each) for each in self.whole.values]))

    def sections(self) -> Iterator[Section]:
        yield self.scores()
        if self.terms["source"]:
            yield self.source_maps()
        if "sources" in self.tables:
            yield self.sources()
        for game in GAMES:
            yield from self.needs(game)
        for game, group in (("circuits", "shapley_circuits"), ("players", "shapley")):
            yield from self.shapley_maps(game, group)
        yield from self.mean_covariance()
        yield from self.measures()

    def scores(self) -> Section:
        return Section(
            title="The scores of the intact model",
            figure=score_maps(self.score, layer=self.layer),
            caption="The mean score that each query gives each key, over sequences and heads. Only "
            "differences within a row matter to attention: brighter keys are attended to more.",
        )

    def source_maps(self) -> Section:
        terms = {"all": self.whole, **self.terms["source"]}
        return Section(
            title="The pattern and its sources",
            figure=self._maps(terms, "The positional pattern and what each source brings"),
            caption="The whole pattern is the sum of the maps beside it. Content is what is "
            "left without mask and position encoding; the others are what these bring.",
        )

    def sources(self) -> Section:
        table = self.tables["sources"]
        return Section(
            title="How much each source brings",
            figure=shares.source_shares(table),
            caption="Shares say how much of the pattern a source explains, and add up to 1; a "
            "negative share works against the pattern. Beside them, each source's own strength.",
            table=table,
        )

    def needs(self, game: str) -> Iterator[Section]:
        table = self._game("players", game)
        if table is None:
            return
        caption = (
            "A weight is needed (necessity) or enough (sufficiency); it is never a source. "
            + conjunction(table)
        )
        figure = shares.player_shares(table)
        shown = table.drop(columns="game")
        title = f"Which weights the pattern needs: {GAMES[game]}"
        yield Section(title=title, figure=figure, caption=caption, table=shown)
        table = self._game("interactions", game)
        if table is not None:
            yield Section(
                title=f"What only several bring together: {GAMES[game]}",
                figure=shares.interactions(table, layer=self.layer),
                caption="The part of the pattern that appears only when all of a row's players are "
                "there, beyond what fewer of them bring. Bars across zero mean: none that is sure.",
            )

    def shapley_maps(self, game: str, group: str) -> Iterator[Section]:
        terms = self.terms[group]
        if terms:
            total = np.sum([each.values for each in terms.values()], axis=0)
            together = {"difference": replace(self.whole, values=total), **terms}
            yield Section(
                title=f"Where in the map each player acts: {GAMES[game]}",
                figure=self._maps(together, "What each player adds to the pattern (Shapley maps)"),
                caption="What a player adds on average over all orders in which players can join. "
                "The maps add up to the first, the pattern that all players bring.",
            )

    def mean_covariance(self) -> Iterator[Section]:
        found = self.terms["mean_covariance"]
        terms = {f"{name}_term": found[name] for name in ("mean", "covariance") if name in found}
        if terms:
            yield Section(
                title="The mean term and the covariance term",
                figure=self._maps({"all": self.whole, **terms}, "The pattern by its two terms"),
                caption="The mean term: each position has a mean query and a mean key of its own. "
                "The covariance term: tokens that share their past are alike. Nothing is ablated.",
            )
        if "mean_covariance" in self.tables:
            table = self.tables["mean_covariance"]
            yield Section(
                title="How much each term carries",
                figure=shares.mean_covariance_shares(table),
                caption="The two shares add up to 1. The dimensions say in how many directions the "
                "positions' mean keys spread: 1 is a line.",
                table=table,
            )

    def measures(self) -> Iterator[Section]:
        if "pattern" in self.tables:
            yield Section(
                title="What the pattern is like",
                figure=measures.pattern_measures(self.tables["pattern"], self.intact),
                caption="Locality above 0 and monotonicity above 1/2 prefer near keys. A relative "
                "pattern depends on distance alone. Edge contrast: first keys against the rest.",
            )
        if "non_relative" in self.tables:
            yield Section(
                title="What the mask adds beyond distance",
                figure=measures.mask_effect(self.tables["non_relative"]),
                caption="The part of the pattern that is no function of distance, with the mask "
                "and without. Right: the paired difference; above zero, the mask adds to it.",
                table=self.tables["non_relative"],
            )
        if "controls" in self.tables:
            yield Section(
                title="Controls: shuffled tokens, and no key left out",
                figure=measures.controls(self.tables["controls"], self.intact),
                caption="What is left on shuffled tokens (open markers) does not come from the "
                "order of words. With all keys counted, a sink at the first passes for position.",
            )

    def _maps(self, terms: Mapping[str, Pooled], title: str) -> go.Figure:
        return term_maps(terms, title=title, layer=self.layer)

    def _game(self, name: str, game: str) -> pd.DataFrame | None:
        table = self.tables.get(name)
        rows = None if table is None else table[table["game"] == game]
        return rows if rows is not None and len(rows) else None


def _skip_keys(manifest: Mapping[str, Any]) -> int:
    skip = manifest.get("skip_keys", manifest.get("settings", {}).get("skip_keys", 0))
    return skip if isinstance(skip, int) else 0


def _order(key: str) -> tuple[int, str]:
    """Order terms as the words stand, and not as a file lists them; unions come last."""
    name = key.split("/")[1]
    return list(WORDS).index(name) if name in WORDS else len(WORDS), name


def _pattern(
    maps: Float[np.ndarray, "layer query_pos key_pos"], skip_keys: int, size: int
) -> Pooled:
    """Take each row's mean, which a sum of score maps may still have, and pool."""
    return pool(row_centred(maps, skip_keys), size)


def _spread(cells: Float[np.ndarray, "query_pos key_pos"]) -> float:
    known = cells[np.isfinite(cells)]
    return float(known.std()) if known.size else 0.0


def conjunction(table: pd.DataFrame) -> str:
    """Say in which layers all players of a game get about the same share, and what it means.

    Args:
        table: the rows of `players.csv` that belong to one game.
    """
    players = list(dict.fromkeys(table["player"]))
    wide = table.pivot(index="layer", columns="player", values="share")
    equal = (wide.sub(1 / len(players)).abs() < EQUAL).all(axis=1)
    layers = [int(layer) for layer in wide.index[equal]]
    if len(players) < 2 or not layers:
        return "Shares of all players add up to 1."
    named = ", ".join(words(player) for player in players)
    where = _runs(layers)
    return (
        f"In {where} each of {named} has a share of about 1/{len(players)}: all are needed at "
        "once, which is no measurement of equal weight."
    )


def _runs(numbers: Sequence[int]) -> str:
    """Write 1, 2, 3, 7 as `L1 to L3, L7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"L{run[0]} to L{run[-1]}" if len(run) > 2 else ", ".join(f"L{each}" for each in run)
        for run in runs
    )
