"""The simulate command's report, from what a run folder holds: no model and no torch is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures import theory
from nope_probe.figures.maps import MAX_POSITIONS, score_maps, term_maps
from nope_probe.figures.theory import Curves
from nope_probe.reports.page import Section, page

MAP_BYTES = 8_000_000
CELL_BYTES = 16 / 3  # a float32 in base64
HOW_TO_READ = (
    "A score is what attention feeds to softmax, in nats. Each map has a row per query, downward, "
    "and a column per key, to the right; both count from 0.",
    "Theory is the mean field, which is exact as the dimension grows; its gap to the simulation "
    "shrinks as one over the dimension.",
    "Errors are two standard errors, from 32 blocks of samples.",
    "A layer increases in j if nearer keys score higher at every distance. Monotonicity is the "
    "share of pairs of keys, 8 apart, of which the nearer scores higher; noise pulls it to 1/2.",
)


def simulation_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    headline: Sequence[str],
) -> str:
    """Write the report of a simulation.

    Args:
        maps: `score/alpha=A`, `se/..`, `theory/..` and `normalised/..`, arrays [n_layers,
            query_pos, key_pos] in nats.
        tables: `layers`, one row per alpha and layer; `steps`, one per distance too.
        manifest: what was run.
        headline: the result, a sentence each.
    """
    arrays = {name: np.asarray(each) for name, each in maps.items()}
    parts = _Parts(arrays, tables["steps"], manifest)
    sections = [*parts.map_sections(), *parts.line_sections(), _numbers(tables["layers"])]
    return page("The parameter-free transformer", headline, sections, manifest, HOW_TO_READ)


class _Parts:
    """The report's sections."""

    def __init__(
        self, maps: Mapping[str, np.ndarray], steps: pd.DataFrame, manifest: Mapping[str, Any]
    ) -> None:
        self.maps, self.steps = maps, steps
        self.alphas = [name.removeprefix("score/") for name in maps if name.startswith("score/")]
        settings = manifest["settings"]
        wide = settings["norm"] == "layernorm-sqrt-d"
        self.high = settings["d_model"] ** 0.5 if wide else 1.0
        drawn = 4 * len(self.alphas) * settings["n_layers"]
        room = int((MAP_BYTES / CELL_BYTES / drawn) ** 0.5)
        self.size = max(1, min(MAX_POSITIONS, room))

    def map_sections(self) -> Iterator[Section]:
        for alpha in self.alphas:
            scores, name = self.maps[f"score/{alpha}"], alpha.replace("=", " = ")
            yield Section(
                title=f"Mean scores, {name}, on the paper's colour scale",
                figure=theory.fixed_scale_maps(
                    scores,
                    title=f"Mean scores, {name}, 0 to {self.high:g}",
                    high=self.high,
                    max_positions=self.size,
                ),
                caption="All layers on one scale, as in the paper's figures.",
            )
            yield Section(
                title=f"Mean scores, {name}, each layer on a scale of its own",
                figure=score_maps(_off_diagonal(scores), max_positions=self.size),
                caption="The same maps without their diagonal, where every key scores itself; "
                "here the differences between keys show, also small ones.",
            )
        yield self._terms(
            {alpha: self.maps[f"normalised/{alpha}"] for alpha in self.alphas},
            "Diagonal-normalised maps",
            "Each diagonal's mean is taken off: a relative pattern would leave nothing.",
        )
        gaps = {a: self.maps[f"score/{a}"] - self.maps[f"theory/{a}"] for a in self.alphas}
        yield self._terms(
            gaps, "Simulation less theory", "What the mean field misses at this dimension."
        )

    def _terms(self, terms: dict[str, np.ndarray], title: str, caption: str) -> Section:
        named = {name.replace("=", " = "): each for name, each in terms.items()}
        layer = next(iter(terms.values())).shape[0] - 1
        figure = term_maps(named, title=title, layer=layer, max_positions=self.size)
        return Section(title=title, figure=figure, caption=caption)

    def line_sections(self) -> Iterator[Section]:
        yield Section(
            title="Theory against simulation",
            figure=theory.rows_against_theory({a: self._last_row(a) for a in self.alphas}),
            caption="Scores of the last query for each key before it: dots are simulated, with two "
            "standard errors; lines are the mean field.",
        )
        yield Section(
            title="Do nearer keys score higher?",
            figure=theory.steps_by_distance({a: self._steps(a) for a in self.alphas}),
            caption="What a key gains on average, over queries, by being nearer by one. Above zero "
            "the scores increase towards the query. The lines are the mean field.",
        )

    def _last_row(self, alpha: str) -> Curves:
        score, se, theory = (self.maps[f"{kind}/{alpha}"] for kind in ("score", "se", "theory"))
        keys = slice(None, -1)
        return Curves(
            x=np.arange(score.shape[-1] - 1.0),
            values=score[:, -1, keys],
            errors=2 * se[:, -1, keys],
            theory=theory[:, -1, keys],
        )

    def _steps(self, alpha: str) -> Curves:
        rows = self.steps[self.steps["alpha"].map("alpha={:g}".format) == alpha]
        of = {
            name: rows.pivot(index="layer", columns="distance", values=name)
            for name in ("step", "se", "theory")
        }
        return Curves(
            x=of["step"].columns.to_numpy(float),
            values=of["step"].to_numpy(),
            errors=2 * of["se"].to_numpy(),
            theory=of["theory"].to_numpy(),
        )


def _numbers(table: pd.DataFrame) -> Section:
    return Section(
        title="Every layer in numbers",
        caption="Per layer: the standard error with and without the control variate, how many "
        "times less variance it leaves, the gap to the mean field, and what the steps in j show, "
        "with 95% intervals. Unfold the table.",
        table=table,
    )


def _off_diagonal(
    scores: Float[np.ndarray, "layer query_pos key_pos"],
) -> Float[np.ndarray, "layer query_pos key_pos"]:
    return np.where(np.eye(scores.shape[-1], dtype=bool), np.nan, scores)
