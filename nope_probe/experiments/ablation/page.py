"""The ablate command's report, drawn from what a run folder holds: it needs no model, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.split_page import split_sections
from nope_probe.figures import measures, shares
from nope_probe.figures.downsample import pool
from nope_probe.figures.explorer import Explorer
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.words import TERMS, words
from nope_probe.reports import notes
from nope_probe.reports.explorer import explorer_section
from nope_probe.reports.page import Section, page, positions

PLAYER_SETS = {"circuits": "shapley_circuits", "players": "shapley"}  # and their maps
GROUPS = ("pattern", "source", *PLAYER_SETS.values())


def ablation_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    headline: Sequence[str],
    explorer: Explorer | None = None,
) -> str:
    """Return the report of an ablation run.

    Args:
        maps: arrays or tensors [n_layers, query_pos, key_pos] in nats: `score/<kept>` of the intact
            model, the first of the manifest's conditions, and patterns: `pattern/all`,
            `pattern/mean_term`, `pattern/covariance_term`, `source/<term>`, `shapley/<player>` and
            `shapley_circuits/<player>`.
        tables: `sources`, `players`, `interactions`, `pattern`, `non_relative`, `controls`,
            `mean_covariance`; those that a run does not have may be missing or empty.
        manifest: what was run.
        headline: the result, a sentence each.
        explorer: the patterns of all conditions behind switches.

    Raises:
        KeyError: if the intact model's map or pattern is missing.
    """
    model = manifest.get("model", {})
    name = model.get("name") if isinstance(model, Mapping) else model
    title = f"The sources of the positional pattern of {name or 'a model'}"
    parts = _Parts(maps, tables, manifest)
    return page(title, headline, [*explorer_section(explorer), *parts.sections()], manifest)


class _Parts:
    """The report's sections, each from the maps or the table that it needs."""

    def __init__(
        self,
        maps: Mapping[str, Any],
        tables: Mapping[str, pd.DataFrame],
        manifest: Mapping[str, Any],
    ) -> None:
        self.intact = str(manifest["conditions"][0])
        self.conjunctions = manifest.get("conjunctions", {})
        self.tables = {name: table for name, table in tables.items() if len(table)}
        score = np.asarray(maps[f"score/{self.intact}"])
        names = {group: [key for key in maps if key.startswith(f"{group}/")] for group in GROUPS}
        n_drawn = sum(len(keys) + 1 for keys in names.values())  # a whole beside its terms
        size = positions(n_drawn, len(score))
        self.score = pool(score, size)
        self.terms = {
            group: {
                key.removeprefix(f"{group}/"): pool(np.asarray(maps[key]), size)
                for key in sorted(keys, key=_order)
            }
            for group, keys in names.items()
        }
        self.whole = self.terms["pattern"]["all"]
        self.layer = int(np.argmax([_spread(each) for each in self.whole.values]))

    def sections(self) -> Iterator[Section]:
        yield self.scores()
        yield from self.sources()
        yield from split_sections(self.tables)
        for player_set in PLAYER_SETS:
            yield from self.players(player_set)
            yield from self.interactions(player_set)
        for player_set, group in PLAYER_SETS.items():
            yield from self.shapley_maps(player_set, group)
        yield from self.mean_covariance()
        yield from self.measures()
        yield from self.controls()

    def scores(self) -> Section:
        return Section(
            title="The scores of the intact model",
            figure=score_maps(self.score, layer=self.layer),
            caption="The mean score that each query gives each key, over sequences and heads. Only "
            "differences within a row matter to attention: brighter keys are attended to more.",
        )

    def sources(self) -> Iterator[Section]:
        if self.terms["source"]:
            terms = {"all": self.whole, **self.terms["source"]}
            title = "The positional pattern and what each source brings"
            yield Section(
                title="The positional pattern and its sources",
                figure=term_maps(terms, title=title, layer=self.layer),
                caption="The whole pattern is the sum of the maps beside it. Content is what is "
                "left without mask and position encoding; the others are what these bring.",
            )
        if "sources" in self.tables:
            yield Section(
                title="The shares of the sources",
                figure=shares.source_shares(self.tables["sources"]),
                caption="A share says how much of the positional pattern a source explains; shares "
                "add up to 1, and a negative one works against the pattern. RMS: each source's own "
                "strength. In the table, “position” is the sum of all but content.",
                table=self.tables["sources"],
            )

    def players(self, player_set: str) -> Iterator[Section]:
        table = self._rows("players", player_set)
        if table is None:
            return
        players = list(dict.fromkeys(table["player"]))
        yield Section(
            title=f"What the positional pattern needs: {player_set}",
            figure=shares.player_shares(table),
            caption=f"{notes.POSITION_GAME} Lost without it: the player is needed. There alone: "
            "the source is enough. Amplification: the strength with the player, over that without. "
            "A weight can amplify and is never a source. "
            + conjunction_note(players, self.conjunctions.get(player_set, [])),
            table=_blank_where_undefined(table.drop(columns="game")),
        )

    def interactions(self, player_set: str) -> Iterator[Section]:
        table = self._rows("interactions", player_set)
        if table is not None:
            yield Section(
                title=f"Interactions: {player_set}",
                figure=shares.interactions(table, layer=self.layer),
                caption="The share of that part that appears only when all players of a row are "
                "kept, beyond what fewer of them bring. A bar across zero may be zero. Weights "
                "without a source have none.",
            )

    def shapley_maps(self, player_set: str, group: str) -> Iterator[Section]:
        terms = self.terms[group]
        if terms:
            total = np.sum([each.values for each in terms.values()], axis=0)
            together = {"position": replace(self.whole, values=total), **terms}
            title = "What each player adds to the positional pattern (Shapley maps)"
            yield Section(
                title=f"Shapley maps: {player_set}",
                figure=term_maps(together, title=title, layer=self.layer),
                caption="What a player adds on average over all orders in which players can join. "
                "The maps add up to the first, the part of the pattern that the sources bring.",
            )

    def mean_covariance(self) -> Iterator[Section]:
        terms = self.terms["pattern"]
        if len(terms) > 1:
            title = "The positional pattern by its mean and covariance terms"
            yield Section(
                title="The mean term and the covariance term",
                figure=term_maps(terms, title=title, layer=self.layer),
                caption="The mean term: each position has a mean query and a mean key of its own. "
                "The covariance term: tokens that share their past are alike. Nothing is ablated.",
            )
        if "mean_covariance" in self.tables:
            table = self.tables["mean_covariance"]
            yield Section(
                title="The shares of the mean and covariance terms",
                figure=shares.mean_covariance_shares(table),
                caption="The two shares add up to 1. Dimensions: the number of directions in which "
                "the positions' mean keys spread; 1 is a line.",
                table=table,
            )

    def measures(self) -> Iterator[Section]:
        if "pattern" in self.tables:
            yield Section(
                title="Measures of the positional pattern",
                figure=measures.pattern_measures(self.tables["pattern"], self.intact),
                caption=notes.MEASURES,
            )
        if "non_relative" in self.tables:
            yield Section(
                title="The mask's effect on the non-relative part",
                figure=measures.mask_effect(self.tables["non_relative"]),
                caption="The part of the positional pattern that is no function of distance, with "
                "the mask and without. Right: the paired difference; above zero, the mask adds.",
                table=self.tables["non_relative"],
            )

    def controls(self) -> Iterator[Section]:
        if "controls" in self.tables:
            yield Section(
                title="Controls: shuffled tokens, and no skipped keys",
                figure=measures.controls(self.tables["controls"], self.intact),
                caption="A pattern that remains on shuffled tokens (open markers) does not come "
                "from word order. With no key skipped, an attention sink at the first key counts "
                "as positional pattern.",
            )

    def _rows(self, name: str, player_set: str) -> pd.DataFrame | None:
        table = self.tables.get(name)
        rows = None if table is None else table[table["game"] == player_set]
        return rows if rows is not None and len(rows) else None


def _order(key: str) -> tuple[int, str]:
    """Return a sort key: the order of the words, and unions last."""
    name = key.split("/")[1]
    return list(TERMS).index(name) if name in TERMS else len(TERMS), name


def _spread(cells: Float[np.ndarray, "query_pos key_pos"]) -> float:
    known = cells[np.isfinite(cells)]
    return float(known.std()) if known.size else 0.0


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
        f"In {_runs(layers)} each of {named} has a Shapley share of about 1/{len(players)}: "
        f"{notes.CONJUNCTION}."
    )


def _runs(numbers: Sequence[int]) -> str:
    """Return 1, 2, 3, 7 as `L1 to L3, L7`."""
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
