"""What a simulation shows: maps, curves and numbers against theory, with a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.experiments.sections import Report
from nope_probe.experiments.wording import numbered_layers, percents
from nope_probe.figures.maps import fixed_scale_maps, score_maps, term_maps
from nope_probe.figures.theory import Curves, rows_against_theory, steps_by_distance
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

Maps = Float[np.ndarray, "layer query_pos key_pos"]
HOW_TO_READ = (
    notes.SCORE,
    notes.MAP_AXES,
    "Theory is the mean field, which is exact as the dimension grows; its gap to the simulation "
    "decreases as one over the dimension.",
    "Errors are two standard errors, from 32 blocks of samples.",
    "A layer increases in j if nearer keys score higher at every distance.",
    notes.measure_note("monotonicity"),
)


def report(run: Run) -> Report:
    """Return what a simulation shows.

    Args:
        run: maps `score/alpha=A`, `se/..`, `theory/..` and `normalised/..`, [n_layers, query_pos,
            key_pos] in nats; tables `layers`, a row per alpha and layer, and `steps`, a row per
            distance too.
    """
    parts = _Sections(run)
    return Report(
        title="The parameter-free transformer",
        headline=run.manifest["headline"],
        sections=[*parts.map_sections(), *parts.line_sections(), _numbers(run.tables["layers"])],
        how_to_read=HOW_TO_READ,
    )


class _Sections:
    """The sections of a simulation's report."""

    def __init__(self, run: Run) -> None:
        maps, settings = run.maps, run.manifest["settings"]
        self.maps, self.layers, self.steps = maps, run.tables["layers"], run.tables["steps"]
        # By alpha: a folder's maps come back in the order of their names.
        self.alphas = [f"alpha={alpha:g}" for alpha in dict.fromkeys(self.layers["alpha"])]
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
        noise = [float(np.nanmedian(layer)) for layer in _off_diagonal(errors)]
        yield Section(
            title=scale_finding(name, shown, self.high),
            figure=partial(
                fixed_scale_maps,
                scores,
                title=f"Mean scores, {name}, 0 to {self.high:g}",
                high=self.high,
                max_positions=self.size,
            ),
            caption="All layers on one scale, as in the paper's figures.",
        )
        yield Section(
            title=layers_finding(name, _rows_of(alpha, self.layers)),
            figure=partial(score_maps, shown, noise=noise, max_positions=self.size),
            caption="The same maps without their diagonal, where a query meets its own key: "
            "small differences between keys are visible. A layer that shows only noise is "
            "drawn flat.",
        )

    def _terms(self, terms: dict[str, np.ndarray], title: str, caption: str) -> Section:
        layer = next(iter(terms.values())).shape[0] - 1
        size, noise = self.size, self.noise
        figure = partial(
            term_maps, terms, title=title, layer=layer, max_positions=size, noise=noise
        )
        return Section(title=title, figure=figure, caption=caption)

    def line_sections(self) -> Iterator[Section]:
        """Return the sections of curves: the last query's scores, and the steps by distance."""
        curves = {alpha: self._last_row(alpha) for alpha in self.alphas}
        yield Section(
            title=row_finding(list(curves.values())),
            figure=partial(rows_against_theory, curves),
            caption="Scores of the last query for each key before it: dots are simulated, with two "
            "standard errors; lines are the mean field.",
        )
        yield Section(
            title=order_finding(self.layers),
            figure=partial(steps_by_distance, {a: self._steps(a) for a in self.alphas}),
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


def scale_finding(name: str, scores: Maps, high: float) -> str:
    """Return how little of the paper's colour scale the scores of a layer take up.

    Args:
        name: of the setting: `alpha = 0`.
        scores: mean scores without their diagonal, nats; NaN where there is none.
        high: the upper end of the paper's scale, nats.
    """
    spread = float(np.max(np.nanmax(scores, axis=(1, 2)) - np.nanmin(scores, axis=(1, 2))))
    scale = f"0 to {high:g} nat{'' if high == 1 else 's'}"
    return f"Scores at {name}, on the paper's scale of {scale}: a layer's span {spread:.2g} at most"


def layers_finding(name: str, rows: pd.DataFrame) -> str:
    """Return in which layers scores depend on the distance from the query beyond the noise.

    Args:
        name: of the setting: `alpha = 0`.
        rows: its rows of `layers.csv`.
    """
    clear = numbered_layers(rows[rows["verdict"] != "flat"]["layer"])
    found = f"those of {clear} depend on distance" if clear else "none depend on distance"
    return f"Scores at {name}, each layer on its own colours: {found}"


def rest_finding(normalised: Mapping[str, Maps], errors: Mapping[str, Maps]) -> str:
    """Return how much of a layer's scores is no function of the distance, where it is most.

    Args:
        normalised: diagonal-normalised maps by the setting's name, nats.
        errors: the standard errors of their cells.
    """
    best, where = 0.0, ""
    for name, maps in normalised.items():
        noise = np.nanmean(errors[name] ** 2, axis=(1, 2))
        squares = np.nanmean(maps**2, axis=(1, 2)) - noise
        layer = int(np.argmax(squares))
        if squares[layer] > max(best, noise[layer]):
            best, where = float(squares[layer]), f"in L{layer} at {name}"
    if not where:
        return "Diagonal-normalised scores: nothing but distance matters beyond the noise"
    rms = f"{best**0.5:.2g} nats RMS"
    return f"Diagonal-normalised scores: {rms} are no function of distance {where}"


def gap_finding(layers: pd.DataFrame) -> str:
    """Return how far theory is from the simulation in the worst layer.

    Args:
        layers: `layers.csv`.
    """
    worst = layers.iloc[int(layers["gap_rms"].to_numpy(float).argmax())]
    where = f"L{worst['layer']:.0f} at alpha = {worst['alpha']:g}"
    return f"Theory and simulation differ by {worst['gap_rms']:.1g} nats RMS at most, in {where}"


def row_finding(rows: Sequence[Curves]) -> str:
    """Return how many of the last query's scores agree with theory within two standard errors.

    Args:
        rows: the last query's scores with their errors and the theory, per setting.
    """
    near = [np.abs(each.values - each.theory) <= each.errors for each in rows]
    share = percents(float(np.mean(near)))
    return f"The last query's scores: {share} are within two standard errors of theory"


def order_finding(layers: pd.DataFrame) -> str:
    """Return in which layers nearer keys score higher at every distance, for each alpha.

    Args:
        layers: `layers.csv`.
    """
    parts = []
    for alpha, rows in layers.groupby("alpha", sort=False):
        at = rows[rows["verdict"] == "increasing"]["layer"]
        parts.append(f"{numbered_layers(at) or 'none'} at alpha = {alpha:g}")
    return f"Layers in which nearer keys score higher: {'; '.join(parts)}"


def variance_finding(layers: pd.DataFrame) -> str:
    """Return by how much the control variate divides the variance, where there is any.

    Args:
        layers: `layers.csv`.
    """
    ratios = layers[layers["layer"] > 0]["variance_ratio"].to_numpy(float)  # L0 is exact
    topic = "The numbers of every layer"
    if not np.isfinite(ratios).any():
        return topic
    low, high = np.nanmin(ratios), np.nanmax(ratios)
    return f"{topic}: the control variate divides the variance by {low:.0f} to {high:.0f} after L0"
