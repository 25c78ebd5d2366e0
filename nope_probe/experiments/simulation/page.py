"""The simulate command's report, drawn from what a run folder holds: it needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.experiments.simulation.findings import (
    gap_finding,
    layers_finding,
    order_finding,
    rest_finding,
    row_finding,
    scale_finding,
    variance_finding,
)
from nope_probe.figures.maps import term_maps
from nope_probe.figures.theory import (
    Curves,
    fixed_scale_maps,
    maps_above_noise,
    rows_against_theory,
    steps_by_distance,
)
from nope_probe.reports import notes
from nope_probe.reports.page import Section, page, positions

HOW_TO_READ = (
    notes.SCORE,
    notes.MAP_AXES,
    "Theory is the mean field, which is exact as the dimension grows; its gap to the simulation "
    "decreases as one over the dimension.",
    "Errors are two standard errors, from 32 blocks of samples.",
    "A layer increases in j if nearer keys score higher at every distance.",
    notes.measure_note("monotonicity"),
)


def simulation_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    headline: Sequence[str],
) -> str:
    """Return the report of a simulation.

    Args:
        maps: `score/alpha=A`, `se/..`, `theory/..` and `normalised/..`, arrays [n_layers,
            query_pos, key_pos] in nats.
        tables: `layers`, one row per alpha and layer; `steps`, one per distance too.
        manifest: what was run.
        headline: the result, a sentence each.
    """
    arrays = {name: np.asarray(each) for name, each in maps.items()}
    parts = _Parts(arrays, tables, manifest)
    sections = [*parts.map_sections(), *parts.line_sections(), _numbers(tables["layers"])]
    return page("The parameter-free transformer", headline, sections, manifest, HOW_TO_READ)


class _Parts:
    """The report's sections."""

    def __init__(
        self,
        maps: Mapping[str, np.ndarray],
        tables: Mapping[str, pd.DataFrame],
        manifest: Mapping[str, Any],
    ) -> None:
        self.maps, self.layers, self.steps = maps, tables["layers"], tables["steps"]
        self.alphas = [name.removeprefix("score/") for name in maps if name.startswith("score/")]
        settings = manifest["settings"]
        n_layers, n = settings["n_layers"], settings["seq_len"]
        spec = ParameterFreeSpec(d_model=settings["d_model"], norm=settings["norm"])
        self.high = spec.score_scale
        n_points = 2 * 4 * n * len(self.alphas)  # rows and steps: x, value, error and theory
        self.size = positions(4 * len(self.alphas), n_layers, n_points)
        errors = np.stack([maps[f"se/{alpha}"] for alpha in self.alphas])
        self.noise = np.sqrt(np.nanmean(errors**2, axis=(0, 2, 3))).tolist()

    def map_sections(self) -> Iterator[Section]:
        """Return the sections of maps: scores of each alpha, normalised, and less theory."""
        for alpha in self.alphas:
            yield from self._score_sections(alpha)
        normalised = {_words(a): self.maps[f"normalised/{a}"] for a in self.alphas}
        errors = {_words(a): self.maps[f"se/{a}"] for a in self.alphas}
        yield self._terms(
            normalised,
            rest_finding(normalised, errors),
            "The mean of each diagonal is subtracted: nothing would remain of a relative pattern.",
        )
        yield self._terms(
            {_words(a): self.maps[f"score/{a}"] - self.maps[f"theory/{a}"] for a in self.alphas},
            gap_finding(self.layers),
            "Simulation less theory: the error of the mean field at this dimension.",
        )

    def _score_sections(self, alpha: str) -> Iterator[Section]:
        name = _words(alpha)
        scores, errors = (self.maps[f"{kind}/{alpha}"] for kind in ("score", "se"))
        shown = _off_diagonal(scores)
        yield Section(
            title=scale_finding(name, shown, self.high),
            figure=fixed_scale_maps(
                scores,
                title=f"Mean scores, {name}, 0 to {self.high:g}",
                high=self.high,
                max_positions=self.size,
            ),
            caption="All layers on one scale, as in the paper's figures.",
        )
        yield Section(
            title=layers_finding(name, _rows_of(alpha, self.layers)),
            figure=maps_above_noise(shown, _off_diagonal(errors), max_positions=self.size),
            caption="The same maps without their diagonal, where a query meets its own key: "
            "small differences between keys are visible. A layer that shows only noise is "
            "drawn flat.",
        )

    def _terms(self, terms: dict[str, np.ndarray], title: str, caption: str) -> Section:
        layer = next(iter(terms.values())).shape[0] - 1
        size, noise = self.size, self.noise
        figure = term_maps(terms, title=title, layer=layer, max_positions=size, noise=noise)
        return Section(title=title, figure=figure, caption=caption)

    def line_sections(self) -> Iterator[Section]:
        """Return the sections of curves: the last query's scores, and the steps by distance."""
        curves = {alpha: self._last_row(alpha) for alpha in self.alphas}
        yield Section(
            title=row_finding(list(curves.values())),
            figure=rows_against_theory(curves),
            caption="Scores of the last query for each key before it: dots are simulated, with two "
            "standard errors; lines are the mean field.",
        )
        yield Section(
            title=order_finding(self.layers),
            figure=steps_by_distance({a: self._steps(a) for a in self.alphas}),
            caption="The mean gain in score, over queries, of a key that is nearer by one. Above "
            "zero the scores increase towards the query. The lines are the mean field.",
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
        rows = _rows_of(alpha, self.steps)
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
        title=variance_finding(table),
        caption="Per layer: the standard error with and without the control variate, the ratio of "
        "the variances, the gap to the mean field, and the tests of the steps in j with 95% "
        "intervals. Unfold the table.",
        table=table,
    )


def _off_diagonal(
    scores: Float[np.ndarray, "layer query_pos key_pos"],
) -> Float[np.ndarray, "layer query_pos key_pos"]:
    return np.where(np.eye(scores.shape[-1], dtype=bool), np.nan, scores)


def _rows_of(alpha: str, table: pd.DataFrame) -> pd.DataFrame:
    return table[table["alpha"].map("alpha={:g}".format) == alpha]


def _words(alpha: str) -> str:
    return alpha.replace("=", " = ")
