"""The report of a simulation: maps, curves and numbers against theory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.figures.words import MEASURES, layer_names
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section, how_to_read, positions
from nope_probe.run.folder import Run
from nope_probe.stages import ParameterFreeSpec
from simulated_curves import Curves, simulated_curves

NAMED = 3  # alphas in a sentence
HOW_TO_READ = (  # the first two are lines of every page
    "score",
    "axes",
    "Theory is the mean field, which is exact as the dimension grows. Its gap to the simulation "
    "decreases as one over the dimension.",
    "Errors are two standard errors, from 32 blocks of samples.",
    "A layer increases in j if nearer keys score higher at every distance.",
)
MapStack = Float[np.ndarray, "layer query_pos key_pos"]
VERDICTS = {  # by whether scores increase in j, surely: what nearer keys get
    "increasing": "score higher",
    "increasing where resolved": "score higher where resolved",
    "not increasing": "do not always score higher",
    "flat": "score the same",
}


def report(run: Run) -> Report:
    """Return the report of a simulation.

    Args:
        run: maps `score/alpha=A`, `se/..`, `theory/..` and `normalised/..`, [n_layers, query_pos,
            key_pos] in nats; tables `layers`, a row per alpha and layer, and `steps`, a row per
            distance too.
    """
    return Report(
        title="The parameter-free transformer",
        headline=headline(run.tables["layers"]),
        sections=[*_map_sections(run), *_line_sections(run)],
        how_to_read=[*how_to_read(HOW_TO_READ), MEASURES["monotonicity"].note],
    )


def headline(layers: pd.DataFrame) -> Headline:
    """Return the layers in which nearer keys score higher at each alpha, and a table of them.

    Args:
        layers: `layers.csv`.
    """
    table: dict[str, list[str]] = {"nearer keys": []}
    parts = []
    for alpha, rows in layers.groupby("alpha", sort=False):
        rising = layer_names(rows[rows["verdict"].str.startswith("increasing")]["layer"])
        parts.append(f"{rising or 'no layer'} at alpha = {alpha:g}")
        table["nearer keys"] = [f"in L{layer}" for layer in rows["layer"]][:MOST_ROWS]
        table[f"alpha = {alpha:g}"] = [VERDICTS[verdict] for verdict in rows["verdict"]][:MOST_ROWS]
    return Headline(
        sentence=f"Nearer keys score higher in {', '.join(parts[:NAMED])}.",
        table=pd.DataFrame(table),
        caption="Of the parameter-free transformer, at every distance between query and key. "
        "“Do not always”: at some distance they surely score lower, or the noise leaves it open.",
    )


def _map_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of maps: scores of each alpha, normalised, and less theory."""
    settings, alphas = run.manifest.settings, _alphas(run)
    spec = ParameterFreeSpec(d_model=settings["d_model"], norm=settings["norm"])
    n_points = 2 * 4 * settings["seq_len"] * len(alphas)  # rows, steps: x, value, error, theory
    size = positions(4 * len(alphas), settings["n_layers"], n_points)
    scores, errors, theory, normalised = (
        {words: run.maps[f"{kind}/{alpha}"] for alpha, words in alphas.items()}
        for kind in ("score", "se", "theory", "normalised")
    )
    for words in alphas.values():
        shown, high = _off_diagonal(scores[words]), spec.score_scale
        noise = [float(np.nanmedian(layer)) for layer in _off_diagonal(errors[words])]
        yield Section(
            title="Scores, with a colour scale for each layer",
            figure=partial(score_maps, shown, noise=noise, max_positions=size),
            caption=f"Scores at {words}, without the diagonal, where query and key are one token. "
            "Scales differ between layers, so colours cannot be compared between layers. A layer "
            "of noise is drawn flat.",
        )
        title = f"Mean scores, {words}, 0 to {high:g}"
        yield Section(
            title="Scores, on the paper's scale",
            figure=partial(score_maps, scores[words], title=title, high=high, max_positions=size),
            caption=f"Scores at {words}, all layers on one scale, as in the paper's figures. The "
            "first layers look dark because their scores off the diagonal are small.",
            folded=True,
        )
    squares, title = np.stack(list(errors.values())) ** 2, "Scores less the mean of each diagonal"
    noise = np.sqrt(np.nanmean(squares, axis=(0, 2, 3))).tolist()
    drawn = partial(term_maps, layer=settings["n_layers"] - 1, max_positions=size, noise=noise)
    yield Section(
        title=title,
        figure=partial(drawn, normalised, title=title),
        caption="The mean of each diagonal is subtracted: nothing would remain of a relative "
        "pattern.",
    )
    gaps, title = (
        {words: scores[words] - theory[words] for words in scores},
        "Simulation less theory",
    )
    yield Section(
        title=title,
        figure=partial(drawn, gaps, title=title),
        caption="Simulation less theory: the error of the mean field at this dimension.",
    )


def _line_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of curves, the last query's scores and the steps, and of numbers."""
    layers, alphas = run.tables["layers"], _alphas(run)
    curves = {alpha: _last_row(run, alpha) for alpha in alphas}
    yield Section(
        title="The last query's scores",
        figure=partial(
            simulated_curves,
            curves,
            title="The last query's scores: simulation (dots) and mean field (lines)",
            x_title="key position",
            y_title="score, nats",
        ),
        caption="Scores of the last query for each key before it: dots are simulated, with two "
        "standard errors; lines are theory, the mean field. The error of the theory shrinks as "
        "one over the dimension.",
    )
    steps = {alpha: _steps(_rows_of(alpha, run.tables["steps"])) for alpha in alphas}
    yield Section(
        title="The mean step towards the query, by distance",
        figure=partial(
            simulated_curves,
            steps,
            title="Mean step of the score towards the query",
            x_title="distance i - j",
            y_title="step, nats",
        ),
        caption="The mean gain in score, over queries, of a key that is nearer by one. Above "
        "zero the scores increase towards the query. The lines are the mean field.",
    )
    yield Section(
        title="The numbers of every layer",
        caption="The standard error with and without the control variate, and the ratio of the "
        "variances. Then the gap to the mean field, and the tests of the steps in j.",
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


def _off_diagonal(scores: MapStack) -> MapStack:
    return np.where(np.eye(scores.shape[-1], dtype=bool), np.nan, scores)


def _rows_of(alpha: str, table: pd.DataFrame) -> pd.DataFrame:
    return table[table["alpha"].map("alpha={:g}".format) == alpha]
