"""Which of our maps shows the same quantity as a published panel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from nope_probe.experiments.paper.agreement import PAPERS_SAMPLES, Pair
from nope_probe.experiments.paper.panels import Cells, Panel, published
from nope_probe.experiments.paper.settings import (
    LANGUAGE_MODELS,
    NOPE_FIGURES,
    SIMULATED,
    papers_name,
)
from nope_probe.runtime.folder import Run

HALVES = {
    "layernorm-sqrt-d": "LayerNorm, scores over sqrt(d)",
    "layernorm-d": "LayerNorm, scores over d",
}
KINDS = {"score": "scores", "normalised": "less diagonal means"}


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
