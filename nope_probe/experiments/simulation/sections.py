"""The report of a simulation: maps, curves and numbers against theory, with sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.experiments.sections import Report, largest, percents
from nope_probe.figures.curves import Curves, rows_against_theory, steps_by_distance
from nope_probe.figures.maps import fixed_scale_maps, score_maps, term_maps
from nope_probe.figures.words import numbered_layers
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
    """Return the report of a simulation.

    Args:
        run: maps `score/alpha=A`, `se/..`, `theory/..` and `normalised/..`, [n_layers, query_pos,
            key_pos] in nats; tables `layers`, a row per alpha and layer, and `steps`, a row per
            distance too.
    """
    return Report(
        title="The parameter-free transformer",
        headline=run.manifest["headline"],
        sections=[*_map_sections(run), *_line_sections(run)],
        how_to_read=HOW_TO_READ,
    )


def _map_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of maps: scores of each alpha, normalised, and less theory."""
    settings, layers, alphas = run.manifest["settings"], run.tables["layers"], _alphas(run)
    spec = ParameterFreeSpec(d_model=settings["d_model"], norm=settings["norm"])
    n_points = 2 * 4 * settings["seq_len"] * len(alphas)  # rows, steps: x, value, error, theory
    size = positions(4 * len(alphas), settings["n_layers"], n_points)
    scores, errors, theory, normalised = (
        {words: run.maps[f"{kind}/{alpha}"] for alpha, words in alphas.items()}
        for kind in ("score", "se", "theory", "normalised")
    )
    for alpha, words in alphas.items():
        shown, high = _off_diagonal(scores[words]), spec.score_scale
        noise = [float(np.nanmedian(layer)) for layer in _off_diagonal(errors[words])]
        yield Section(
            title=layers_finding(words, _rows_of(alpha, layers)),
            figure=partial(score_maps, shown, noise=noise, max_positions=size),
            caption="Mean scores without the diagonal, where a query meets its own key. Each layer "
            "has its own scale, so colours cannot be compared between layers. A layer that shows "
            "only noise is drawn flat.",
        )
        title = f"Mean scores, {words}, 0 to {high:g}"
        yield Section(
            title=f"Scores at {words}, on the paper's scale, 0 to {high:g}",
            figure=partial(
                fixed_scale_maps, scores[words], title=title, high=high, max_positions=size
            ),
            caption="All layers share one scale, as in the paper's figures. The first layers look "
            "dark because their scores off the diagonal are small; the figure before shows their "
            "pattern.",
            folded=True,
        )
    squares, title = np.stack(list(errors.values())) ** 2, rest_finding(normalised, errors)
    noise = np.sqrt(np.nanmean(squares, axis=(0, 2, 3))).tolist()
    drawn = partial(term_maps, layer=settings["n_layers"] - 1, max_positions=size, noise=noise)
    yield Section(
        title=title,
        figure=partial(drawn, normalised, title=title),
        caption="The mean of each diagonal is subtracted: nothing would remain of a relative "
        "pattern.",
    )
    gaps, title = {words: scores[words] - theory[words] for words in scores}, gap_finding(layers)
    yield Section(
        title=title,
        figure=partial(drawn, gaps, title=title),
        caption="Simulation less theory: the error of the mean field at this dimension.",
    )


def _line_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of curves, the last query's scores and the steps, and of numbers."""
    layers, alphas = run.tables["layers"], _alphas(run)
    curves = {alpha: _last_row(run, alpha) for alpha in alphas}
    rows, dimension = list(curves.values()), int(run.manifest["settings"]["d_model"])
    yield Section(
        title=row_finding(rows),
        figure=partial(rows_against_theory, curves),
        caption="Scores of the last query for each key before it: dots are simulated, with two "
        f"standard errors; lines are theory, the mean field. {expected_agreement(rows, dimension)}",
    )
    steps = {alpha: _steps(_rows_of(alpha, run.tables["steps"])) for alpha in alphas}
    yield Section(
        title="The mean step towards the query, at each distance",
        figure=partial(steps_by_distance, steps),
        caption="The mean gain in score, over queries, of a key that is nearer by one. Above "
        "zero the scores increase towards the query. The lines are the mean field.",
    )
    yield Section(
        title="The numbers of every layer",
        caption="The standard error with and without the control variate, the ratio of "
        "the variances, the gap to the mean field, and the tests of the steps in j with 95% "
        "intervals. Unfold the table.",
        table=layers,
    )


def _alphas(run: Run) -> dict[str, str]:
    """Return the simulations' names in maps (`alpha=0`) and in words, in order of alpha."""
    # A folder's maps come back in the order of their names.
    alphas = dict.fromkeys(run.tables["layers"]["alpha"])
    return {f"alpha={alpha:g}": f"alpha = {alpha:g}" for alpha in alphas}


def _last_row(run: Run, alpha: str) -> Curves:
    score, se, theory = (
        run.maps[f"{kind}/{alpha}"][:, -1, :-1] for kind in ("score", "se", "theory")
    )
    x = np.arange(score.shape[-1], dtype=float)
    return Curves(x=x, values=score, errors=2 * se, theory=theory)


def _steps(rows: pd.DataFrame) -> Curves:
    table = rows.pivot(index="layer", columns="distance")
    step, se, theory = (table[name].to_numpy() for name in ("step", "se", "theory"))
    x = table["step"].columns.to_numpy(float)
    return Curves(x=x, values=step, errors=2 * se, theory=theory)


def _off_diagonal(scores: Maps) -> Maps:
    return np.where(np.eye(scores.shape[-1], dtype=bool), np.nan, scores)


def _rows_of(alpha: str, table: pd.DataFrame) -> pd.DataFrame:
    return table[table["alpha"].map("alpha={:g}".format) == alpha]


def layers_finding(name: str, rows: pd.DataFrame) -> str:
    """Return a sentence on the layers whose scores depend on distance beyond the noise.

    Args:
        name: the setting's name, such as `alpha = 0`.
        rows: its rows of `layers.csv`.
    """
    clear = numbered_layers(rows[rows["verdict"] != "flat"]["layer"])
    dependence = f"scores of {clear} depend" if clear else "no score depends"
    return f"Scores at {name}, each layer on its own colours: {dependence} on distance"


def rest_finding(normalised: Mapping[str, Maps], errors: Mapping[str, Maps]) -> str:
    """Return a sentence on the largest part of scores that is no function of the distance.

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
    """Return a sentence on the gap between theory and simulation in the worst layer.

    Args:
        layers: `layers.csv`.
    """
    worst = largest(layers, "gap_rms")
    where = f"L{worst['layer']:.0f} at alpha = {worst['alpha']:g}"
    return f"Theory and simulation differ by {worst['gap_rms']:.1g} nats RMS at most, in {where}"


def row_finding(rows: Sequence[Curves]) -> str:
    """Return a sentence on the gap between the last query's scores and theory.

    Args:
        rows: the last query's scores with their errors and the theory, per setting.
    """
    gaps = np.concatenate([row.values - row.theory for row in rows], axis=None)
    rms = float(np.sqrt(np.mean(gaps**2)))
    return f"The last query's scores: theory and simulation differ by {rms:.1g} nats RMS"


def expected_agreement(rows: Sequence[Curves], dimension: int) -> str:
    """Return sentences on the scores within two standard errors of theory, and the expected number.

    Args:
        rows: the last query's scores with their errors and the theory, per setting.
        dimension: the dimension of the simulated vectors.
    """
    near = np.concatenate([np.abs(row.values - row.theory) <= row.errors for row in rows])
    n, chance = near.size, round(0.95 * near.size)
    text = (
        f"{near.sum()} of {n} scores ({percents(near.mean())}) are within two standard errors of "
        f"theory; about {chance} (95%) would be if theory were exact at this dimension."
    )
    if near.sum() >= chance:
        return text
    return (
        f"{text} It is exact only as the dimension d grows: at d = {dimension} its own error, "
        "which shrinks as 1/d, exceeds the noise of so many samples."
    )
