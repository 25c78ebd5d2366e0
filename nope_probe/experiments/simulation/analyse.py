"""From simulations to a run: maps, the table of layers, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.parameter_free.monotonicity import (
    MonotonicityTest,
    by_distance,
    mean_steps,
    monotonicity_tests,
    steps_in_j,
)
from nope_probe.analyses.parameter_free.simulation import Simulation, spec_of
from nope_probe.analyses.parameter_free.theory import theory_scores
from nope_probe.experiments.simulation.sections import report
from nope_probe.experiments.tables import columns_of
from nope_probe.maps.centred import diagonal_normalised
from nope_probe.runtime.folder import Run
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import SessionSettings

Maps = dict[str, Float[np.ndarray, "layer query_pos key_pos"]]


def analyse(session: Session[SessionSettings], simulations: Mapping[float, Simulation]) -> Run:
    """Compare simulations with theory, and return the run.

    Args:
        session: the run.
        simulations: the simulations by alpha.
    """
    model = session.loaded.model
    spec, n = spec_of(model), next(iter(simulations.values())).best.folds.shape[-1]
    alphas = torch.tensor(list(simulations), dtype=torch.float64)
    maps, layers, steps = Maps(), [], []
    for (alpha, simulation), theory in zip(
        simulations.items(), theory_scores(alphas, n, model.cfg.n_layers, spec), strict=True
    ):
        tests = monotonicity_tests(simulation.best, theory, spec.resolution)
        layers += layer_rows(alpha, simulation, theory, tests)
        steps.append(steps_table(alpha, simulation, theory, spec.resolution))
        kinds = {
            "score": simulation.best.mean,
            "se": simulation.best.se,
            "theory": theory,
            "normalised": diagonal_normalised(simulation.best.mean),
        }
        for kind, tensor in kinds.items():
            maps[f"{kind}/alpha={alpha:g}"] = tensor.float().numpy()
    manifest = {
        **session.provenance(),
        "data": {"name": "Gaussian unit vectors", "alpha": list(simulations)},
        "n_samples": {
            f"{alpha:g}": simulation.n_samples for alpha, simulation in simulations.items()
        },
    }
    tables = {"layers": pd.DataFrame(layers), "steps": pd.concat(steps)}
    run = Run(manifest=manifest, arrays={"maps": maps}, tables=tables)
    return replace(run, page=report(run).html(manifest))


def layer_rows(
    alpha: float,
    simulation: Simulation,
    theory: Float[Tensor, "layer query_pos key_pos"],
    tests: list[MonotonicityTest],
) -> list[dict[str, Any]]:
    """Return the rows of `layers.csv`: noise, gap to the theory (nats), increase in j."""
    gap = (simulation.best.mean - theory).nan_to_num()
    off = (~theory.isnan() & ~torch.eye(theory.shape[-1], dtype=torch.bool)).sum((1, 2))
    return [
        {
            "alpha": alpha,
            "layer": layer,
            "n_samples": simulation.n_samples,
            "se": simulation.best.pooled_se[layer].item(),
            "se_plain": simulation.plain.pooled_se[layer].item(),
            "variance_ratio": simulation.variance_ratio[layer].item(),
            "gap_rms": (gap[layer].square().sum() / off[layer]).sqrt().item(),
            "gap_max": gap[layer].abs().max().item(),
            "verdict": test.verdict,
            **columns_of(test, ("monotonicity", "monotonicity_lag1")),
            "distances": test.distances,
            "rises": test.rises,
            "falls": test.falls,
            "falling_cells": test.falling_cells,
            "theory_fall": test.theory_fall,
            **columns_of(test, ("fall",)),
        }
        for layer, test in enumerate(tests)
    ]


def steps_table(
    alpha: float,
    simulation: Simulation,
    theory: Float[Tensor, "layer query_pos key_pos"],
    resolution: float,
) -> pd.DataFrame:
    """Return `steps.csv`: the mean step towards the query (nats) by layer and distance."""
    steps = mean_steps(simulation.best, resolution)
    predicted = by_distance(steps_in_j(theory))
    n_layers, n_distances = steps.mean.shape
    return pd.DataFrame(
        {
            "alpha": alpha,
            "layer": np.repeat(np.arange(n_layers), n_distances),
            "distance": np.tile(np.arange(2, n_distances + 2), n_layers),
            "step": steps.mean.flatten().numpy(),
            "se": steps.se.flatten().numpy(),
            "theory": predicted.flatten().numpy(),
        }
    )
