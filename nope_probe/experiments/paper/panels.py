"""The paper's published panels as numbers, with our maps of the same, in steps of their colours.

`PANELS.md` says how the numbers were read, and how well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.paper.settings import (
    LANGUAGE_MODELS,
    NOPE_FIGURES,
    SIMULATED,
    papers_name,
)
from nope_probe.runtime.folder import Run

COLOURS = 256
PAPERS_SAMPLES = 100_000
NOISE_MARGIN = 1.5  # differences up to this times the expected noise count as noise
HALVES = {
    "layernorm-sqrt-d": "LayerNorm, scores over sqrt(d)",
    "layernorm-d": "LayerNorm, scores over d",
}
KINDS = {"score": "scores", "normalised": "less diagonal means"}
Cells = Float[np.ndarray, "row col"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One published heat map.

    Attributes:
        key: its name, such as `figure2/alpha=0/layer1`.
        values: what its colours stand for; NaN where nothing is drawn.
        low, high: the ends of its colour bar, beyond which the paper clipped.
        kind: `score`, `normalised` (both in nats) or `gram`.
    """

    key: str
    values: Cells
    low: float
    high: float
    kind: str

    @property
    def step(self) -> float:
        """What one of the 256 colours spans."""
        return (self.high - self.low) / COLOURS


@cache
def published(figure: str) -> dict[str, Panel]:
    """Return the published panels of a figure by the rest of their name; none where none is kept.

    Example:
        >>> panel = published("figure3")["a"]
        >>> panel.values.shape, panel.kind, published("figure11")
        ((50, 50), 'gram', {})
    """
    from safetensors import safe_open

    file = resources.files("nope_probe.experiments.paper").joinpath("panels.safetensors")
    with resources.as_file(file) as path, safe_open(path, "numpy") as packed:
        about = json.loads(packed.metadata()["panels"])
        ours = [key for key in about if key.startswith(f"{figure}/")]
        return {
            key.removeprefix(f"{figure}/"): _panel(key, packed.get_tensor(key), about[key])
            for key in sorted(ours, key=_natural)
        }


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """Return a key to sort by, in which `layer10` follows `layer9`."""
    parts = key.replace("layer", "layer/").split("/")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _panel(key: str, held: np.ndarray, about: dict[str, Any]) -> Panel:
    low, high = about["low"], about["high"]
    values = held.astype(np.float64)
    if held.dtype == np.uint8:  # the numbers of colours
        values = low + (values + 0.5) * (high - low) / COLOURS
    if about["causal"]:
        values = np.where(np.tri(len(values), dtype=bool), values, np.nan)
    return Panel(key=key, values=values, low=low, high=high, kind=about["kind"])


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A published panel and our map of the same quantity.

    Attributes:
        group: the panels with which it is drawn.
        name: what it shows, in the paper's count and ours.
        published: the panel.
        ours: our map, of any size.
        comparable: whether both are of the same model, so that values may be subtracted.
        noise: the standard error that the published panel and ours have together, in the panel's
            unit; NaN if it is not known.
    """

    group: str
    name: str
    published: Panel
    ours: Cells
    comparable: bool
    noise: float = float("nan")

    @property
    def steps(self) -> Cells | None:
        """Ours less the published panel, in colour steps; None where they cannot be compared.

        Our map is clipped as the paper's is.
        """
        panel = self.published
        if not self.comparable:
            return None
        ours = resampled(self.ours, len(panel.values)).clip(panel.low, panel.high)
        return (ours - panel.values) / panel.step


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well a published panel and ours agree.

    Attributes:
        key: the panel.
        name: what it shows.
        cells: how many cells are compared.
        step: what one colour spans, in the panel's unit.
        largest: the largest difference, in steps.
        within_one: the share of the cells that differ by at most one step.
        rms: the root mean square of the differences, in steps.
        noise: what sampling noise and the rounding to colours let one expect of it, in steps.
        agrees: whether all cells are within one step, or the differences within the noise.
    """

    key: str
    name: str
    cells: int
    step: float
    largest: float
    within_one: float
    rms: float
    noise: float
    agrees: bool

    def __str__(self) -> str:
        if self.within_one == 1:
            return f"within one colour step (largest difference {self.largest:.2f} steps)"
        text = f"differs by {self.rms:.2g} steps RMS, up to {self.largest:.3g}"
        if np.isnan(self.noise):
            return text
        verdict = "as expected from noise" if self.agrees else "more than expected from noise"
        return f"{text}; {verdict}, {self.noise:.2g} steps RMS"


def agreement(pair: Pair) -> Agreement | None:
    """Return how well a pair agrees; None where it cannot be compared."""
    steps = pair.steps
    if steps is None or not np.isfinite(steps).any():
        return None
    known = np.abs(steps[np.isfinite(steps)])
    rms = float(np.sqrt(np.mean(known**2)))
    noise = float(np.hypot(pair.noise / pair.published.step, 12**-0.5))
    return Agreement(
        key=pair.published.key,
        name=f"{pair.group}, {pair.name}",
        cells=known.size,
        step=pair.published.step,
        largest=float(known.max()),
        within_one=float(np.mean(known <= 1)),
        rms=rms,
        noise=noise,
        agrees=bool((known <= 1).all() or rms <= NOISE_MARGIN * noise),
    )


def agreements(pairs: Sequence[Pair]) -> list[Agreement]:
    """Return how well the pairs agree that can be compared."""
    return [found for found in map(agreement, pairs) if found is not None]


def verdict(found: Sequence[Agreement]) -> str:
    """Return how many panels agree, in one sentence."""
    exact = [each for each in found if each.within_one == 1]
    rest = [each for each in found if each.within_one < 1]
    sentence = f"{len(exact)} of {len(found)} published panels agree within one 8-bit colour step"
    if exact:
        sentence += f" (largest difference {max(each.largest for each in exact):.2f} steps)"
    if rest:
        noisy = sum(each.agrees for each in rest)
        sentence += f"; of the other {len(rest)}, {noisy} agree within sampling noise"
    return sentence + "."


def agreement_table(found: Sequence[Agreement]) -> pd.DataFrame:
    """Return the table of panels, one row each; empty for none."""
    columns = list(Agreement.__dataclass_fields__)
    return pd.DataFrame([vars(each) for each in found], columns=columns)


def resampled(
    values: Float[np.ndarray, "pos pos"], size: int
) -> Float[np.ndarray, "{size} {size}"]:
    """Return a map drawn on `size` pixels: means over the part of each cell that a pixel covers.

    A mean leaves out cells without a number; a pixel without any is NaN.

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
    sums, weights = (cover @ each @ cover.T for each in (np.where(known, values, 0.0), known * 1.0))
    return np.where(weights > 0, sums / np.where(weights > 0, weights, 1), np.nan)


def pairs_of(figure: str, runs: Mapping[str, Run]) -> list[Pair]:
    """Return the published panels of a figure, each with our map.

    Args:
        figure: the figure.
        runs: its finished experiments by name: a model, or which half of the figure.
    """
    if figure in SIMULATED:
        pairs = [_simulated(key, panel, runs) for key, panel in published(figure).items()]
        return sorted(pairs, key=lambda pair: pair.published.kind == "normalised")
    if figure in NOPE_FIGURES:
        ((model, run),) = runs.items()
        same = papers_name(figure, model) is not None
        return list((_stages if figure == "figure3" else _layers)(figure, run, same))
    return list(_language_models(figure, runs))


def _simulated(key: str, panel: Panel, runs: Mapping[str, Run]) -> Pair:
    """Return a simulated panel, whose key is [half/]alpha=A/layerN[/kind]."""
    half, alpha, number, kind = _parts(key, panel.kind)
    run, layer = runs[half], int(number) - 1
    n_samples = run.manifest["n_samples"][alpha]
    rows: pd.DataFrame = run.tables["layers"]
    row = rows[(rows["alpha"] == float(alpha)) & (rows["layer"] == layer)].iloc[0]
    theirs = row["se_plain"] * (n_samples / PAPERS_SAMPLES) ** 0.5
    groups = [HALVES.get(half, ""), f"alpha = {alpha}"]
    if "/score" in key or "/normalised" in key:
        groups.append(KINDS[kind])
    return Pair(
        group=", ".join(filter(None, groups)),
        name=_layer_name(layer),
        published=panel,
        ours=run.maps[f"{kind}/alpha={alpha}"][layer].astype(np.float64),
        comparable=True,
        noise=float(np.hypot(row["se"], theirs)),
    )


def _parts(key: str, kind: str) -> tuple[str, str, str, str]:
    parts = key.split("/")
    half = "" if parts[0].startswith("alpha") else parts.pop(0)
    return half, parts[0].removeprefix("alpha="), parts[1].removeprefix("layer"), kind


def _stages(figure: str, run: Run, same: bool) -> Iterator[Pair]:
    for letter, panel in published(figure).items():
        if f"gram/{letter}" in run.maps:
            yield Pair(
                group="stages (a) to (i)",
                name=f"({letter})",
                published=panel,
                ours=_causal(run.maps[f"gram/{letter}"], panel),
                comparable=same,
            )


def _causal(values: Cells, panel: Panel) -> Cells:
    """Return a map without the cells that the published one leaves blank."""
    if values.shape != panel.values.shape:
        return values.astype(np.float64)
    return np.where(np.isfinite(panel.values), values, np.nan)


def _layers(figure: str, run: Run, same: bool) -> Iterator[Pair]:
    scores = run.maps["score"]
    for index, panel in enumerate(published(figure).values()):
        if index < len(scores):
            yield Pair(
                group="scores of each layer",
                name=_layer_name(index),
                published=panel,
                ours=scores[index].astype(np.float64),
                comparable=same,
            )


def _language_models(figure: str, runs: Mapping[str, Run]) -> Iterator[Pair]:
    """Return a run of a paper's model with its own panels, of another with the first model's."""
    panels = published(figure)
    for model, run in runs.items():
        papers = papers_name(figure, model)
        shown = papers or LANGUAGE_MODELS[0]
        group = shown if papers else f"{shown} beside {model}"
        for layer, values in enumerate(run.maps["normalised"]):
            if f"{shown}/layer{layer + 1}" in panels:
                yield Pair(
                    group=group,
                    name=_layer_name(layer),
                    published=panels[f"{shown}/layer{layer + 1}"],
                    ours=values.astype(np.float64),
                    comparable=papers is not None,
                )


def _layer_name(layer: int) -> str:
    return f"layer {layer + 1}"


def groups_of(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Return the pairs by the group in which they are drawn."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(pair.group, []).append(pair)
    return found
