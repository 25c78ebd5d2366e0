"""What the simulation's figures show, as headings of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.wording import numbered_layers, percents
from nope_probe.figures.theory import Curves

Maps = Float[np.ndarray, "layer query_pos key_pos"]


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
