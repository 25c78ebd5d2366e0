"""The paper's published panels as numbers, and our maps in steps of their colours.

`PANELS.md` says how the numbers were read, and with which errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float
from safetensors import safe_open

from nope_probe.run.folder import Run
from reproduce_settings import FIGURES, LANGUAGE_MODELS, papers_name

COLOURS = 256
PAPERS_SAMPLES = 100_000
NOISE_MARGIN = 1.5  # differences up to this times the expected noise count as noise
WORDS = {
    "layernorm-sqrt-d": "LayerNorm, scores over sqrt(d)",
    "layernorm-d": "LayerNorm, scores over d",
    "score": "scores",
    "normalised": "less diagonal means",
}
AGREEMENT = ("key", "name", "cells", "step", "largest", "within_one", "rms", "noise", "agrees")
SIMULATED_KEY = re.compile(r"(?:(.+)/)?alpha=([\d.]+)/layer(\d+)(?:/(.+))?")
Cells = Float[np.ndarray, "row col"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published heat map.

    Attributes:
        key: its name, such as `figure2/alpha=0/layer1`.
        values: the numbers behind its colours; NaN for blank cells.
        low, high: the ends of its colour bar, at which the paper clipped values.
        kind: `score`, `normalised` (both in nats) or `gram`.
    """

    key: str
    values: Cells
    low: float
    high: float
    kind: str

    @property
    def step(self) -> float:
        """The span of one of the 256 colours."""
        return (self.high - self.low) / COLOURS


@cache
def published(figure: str) -> dict[str, Published]:
    """Return the published panels of a figure by the rest of their name; empty if none is kept.

    Example:
        >>> panel = published("figure3")["a"]
        >>> panel.values.shape, panel.kind, published("figure11")
        ((50, 50), 'gram', {})
    """
    with safe_open(Path(__file__).with_name("panels.safetensors"), "numpy") as packed:
        about = json.loads(packed.metadata()["panels"])
        keys = [key for key in about if key.startswith(f"{figure}/")]
        return {
            key.removeprefix(f"{figure}/"): _panel(key, packed.get_tensor(key), **about[key])
            for key in sorted(keys, key=lambda key: (len(key), key))  # layer 10 follows layer 9
        }


def _panel(
    key: str, packed: np.ndarray, *, low: float, high: float, kind: str, causal: bool
) -> Published:
    values = packed.astype(np.float64)
    if packed.dtype == np.uint8:  # the numbers of colours
        values = low + (values + 0.5) * (high - low) / COLOURS
    if causal:
        values = np.where(np.tri(len(values), dtype=bool), values, np.nan)
    return Published(key=key, values=values, low=low, high=high, kind=kind)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A published panel and a reproduced map of the same quantity.

    Attributes:
        group: the panels with which it is drawn.
        name: its title, with the layer as the paper and as this package count it.
        published: the panel.
        reproduced: the map of the run, of any size.
        comparable: whether both belong to the same model, so that values may be subtracted.
        noise: the standard error of their difference, in the panel's unit; NaN if not known.
    """

    group: str
    name: str
    published: Published
    reproduced: Cells
    comparable: bool
    noise: float = float("nan")

    @property
    def steps(self) -> Cells | None:
        """Our map less the published panel, in colour steps; None if they are not comparable.

        Our map is clipped as the paper's map is.
        """
        panel = self.published
        if not self.comparable:
            return None
        reproduced = resampled(self.reproduced, len(panel.values)).clip(panel.low, panel.high)
        return (reproduced - panel.values) / panel.step


def agreements(pairs: Sequence[Pair]) -> pd.DataFrame:
    """Return the agreement of published and reproduced panels, a row per comparable pair.

    Columns are the panel's `key` and `name`; the number of compared `cells`; the `step` of a
    colour, in the panel's unit; the `largest` difference in steps; the share of cells `within_one`
    step; the `rms` of the differences in steps; the `noise`, the RMS expected from sampling and
    from rounding to colours; and whether the panel `agrees`: all cells within one step, or the
    differences within the noise.
    """
    rows = []
    for pair in pairs:
        steps = np.array([]) if pair.steps is None else np.abs(pair.steps)
        known = steps[np.isfinite(steps)]
        if known.size:
            rms, step = float(np.sqrt(np.mean(known**2))), pair.published.step
            noise = float(np.hypot(pair.noise / step, 12**-0.5))
            within_one = float(np.mean(known <= 1))
            agrees = within_one == 1 or rms <= NOISE_MARGIN * noise
            name, largest = f"{pair.group}, {pair.name}", float(known.max())
            measured = (known.size, step, largest, within_one, rms, noise, agrees)
            rows.append((pair.published.key, name, *measured))
    return pd.DataFrame(rows, columns=list(AGREEMENT))


def verdict(agreement: pd.DataFrame) -> str:
    """Return a sentence on the number of panels that agree, from the table of `agreements`."""
    is_exact = agreement["within_one"] == 1
    exact, rest = agreement[is_exact], agreement[~is_exact]
    sentence = (
        f"{len(exact)} of {len(agreement)} published panels agree within one 8-bit colour step"
    )
    if len(exact):
        sentence += f" (largest difference {exact['largest'].max():.2f} steps)"
    if len(rest):
        noisy = rest["agrees"].sum()
        sentence += f"; of the other {len(rest)}, {noisy} agree within sampling noise"
    return sentence + "."


def resampled(
    values: Float[np.ndarray, "pos pos"], size: int
) -> Float[np.ndarray, "{size} {size}"]:
    """Return a map on `size` pixels: a pixel is the mean of the cells that it covers, by area.

    A mean leaves out cells without a number; a pixel without numbers is NaN.

    Example:
        >>> resampled(np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan], [1.0, 1.0, 1.0]]), 1)
        array([[2.]])
    """
    n = len(values)
    if n == size:
        return np.asarray(values, np.float64)
    edges = np.arange(size + 1) * n / size
    low, high = edges[:-1, None], edges[1:, None]
    cells = np.arange(n)[None]
    cover = (np.minimum(high, cells + 1) - np.maximum(low, cells)).clip(0)
    known = np.isfinite(values)
    sums, weights = (cover @ grid @ cover.T for grid in (np.where(known, values, 0.0), known * 1.0))
    return np.where(weights > 0, sums / np.where(weights > 0, weights, 1), np.nan)


def pairs_of(figure: str, runs: Mapping[str, Run]) -> list[Pair]:
    """Return the published panels of a figure, with our maps.

    Args:
        figure: the figure.
        runs: its finished experiments by name: a model, or a half of the figure.
    """
    if FIGURES[figure].simulations:
        pairs = [_simulated(key, panel, runs) for key, panel in published(figure).items()]
        return sorted(pairs, key=lambda pair: pair.published.kind == "normalised")
    return [pair for model, run in runs.items() for pair in _trained(figure, model, run)]


def _simulated(key: str, panel: Published, runs: Mapping[str, Run]) -> Pair:
    """Return a simulated panel, whose key is [half/]alpha=A/layerN[/kind], with our map."""
    matched = SIMULATED_KEY.fullmatch(key)
    assert matched is not None
    half, alpha, number, kind = matched.groups(default="")
    run, layer = runs[half], int(number) - 1
    rows = run.tables["layers"]
    row = rows[(rows["alpha"] == float(alpha)) & (rows["layer"] == layer)].iloc[0]
    theirs = row["se_plain"] * (run.manifest.results["n_samples"][alpha] / PAPERS_SAMPLES) ** 0.5
    return Pair(
        group=", ".join(filter(None, (WORDS.get(half), f"alpha = {alpha}", WORDS.get(kind)))),
        name=f"layer {number}",
        published=panel,
        reproduced=run.maps[f"{panel.kind}/alpha={alpha}"][layer].astype(np.float64),
        comparable=True,
        noise=float(np.hypot(row["se"], theirs)),
    )


def _trained(figure: str, model: str, run: Run) -> Iterator[Pair]:
    """Yield the panels of a trained model, with our maps.

    Language models that the paper did not run are shown next to the panels of its first model.
    """
    papers, prefix = papers_name(figure, model), ""
    if figure == "figure3":
        group, stages = "stages (a) to (i)", [name for name in run.maps if name.startswith("gram/")]
        maps = {name.removeprefix("gram/"): run.maps[name] for name in stages}
    else:
        group, kind = "scores of each layer", "score" if figure == "figure8" else "normalised"
        of_layers = run.maps[f"{kind}/intact"]
        numbers = run.manifest.layers or range(len(of_layers))
        maps = {f"layer{n + 1}": of_layers[place] for place, n in enumerate(numbers)}
    if FIGURES[figure].maps:
        shown = papers or LANGUAGE_MODELS[0]
        group, prefix = shown if papers else f"{shown} next to {model}", f"{shown}/"
    for key, panel in published(figure).items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name in maps:
            yield Pair(
                group=group,
                name=name.replace("layer", "layer ") if "layer" in name else f"({name})",
                published=panel,
                reproduced=_where_drawn(maps[name], panel),
                comparable=papers is not None,
            )


def _where_drawn(values: Cells, panel: Published) -> Cells:
    """Return a map without the cells that are blank in a published panel of the same size."""
    if values.shape != panel.values.shape:
        return values.astype(np.float64)
    return np.where(np.isfinite(panel.values), values, np.nan).astype(np.float64)
