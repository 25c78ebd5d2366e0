"""From simulations to what a run holds: maps, the table of layers, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.parameter_free.critical_alpha import theory_scores
from nope_probe.analyses.parameter_free.mean_field import spec_of
from nope_probe.analyses.parameter_free.monotonicity import (
    MonotonicityTest,
    by_distance,
    mean_steps,
    monotonicity_tests,
    steps_in_j,
)
from nope_probe.analyses.parameter_free.simulation import Simulation, finest_target
from nope_probe.analyses.pattern import diagonal_normalised
from nope_probe.experiments.simulation.page import simulation_page
from nope_probe.experiments.simulation.summary import headline
from nope_probe.experiments.tables import interval_columns
from nope_probe.hooks.protocols import HookedModel
from nope_probe.runtime.folder import Run
from nope_probe.runtime.session import Session, SessionSettings

Maps = dict[str, Float[np.ndarray, "layer query_pos key_pos"]]


def analyse(session: Session[SessionSettings], found: Mapping[float, Simulation]) -> Run:
    """Compare simulations with theory, and put the run together."""
    model = session.loaded.model
    theory = theory_of(model, found)
    resolution = finest_target(model)
    verdicts = {
        alpha: monotonicity_tests(each.best, theory[alpha], resolution)
        for alpha, each in found.items()
    }
    tables = {
        "layers": pd.DataFrame(
            row
            for alpha, each in found.items()
            for row in layer_rows(alpha, each, theory[alpha], verdicts[alpha])
        ),
        "steps": pd.concat(
            steps_table(alpha, each, theory[alpha], resolution) for alpha, each in found.items()
        ),
    }
    sentences = [headline(alpha, verdicts[alpha], found[alpha]) for alpha in found]
    manifest = {
        **session.provenance(),
        "data": {"name": "Gaussian unit vectors", "alpha": list(found)},
        "n_samples": {f"{alpha:g}": each.n_samples for alpha, each in found.items()},
        "headline": sentences,
    }
    maps = _maps(found, theory)
    page = simulation_page(maps, tables, manifest, sentences)
    return Run(manifest=manifest, arrays={"maps": maps}, tables=tables, page=page)


def theory_of(
    model: HookedModel, found: Mapping[float, Simulation]
) -> dict[float, Float[Tensor, "layer query_pos key_pos"]]:
    """Give the mean field's score maps at each simulated alpha."""
    n = next(iter(found.values())).best.folds.shape[-1]
    alphas = torch.tensor(list(found), dtype=torch.float64)
    maps = theory_scores(alphas, n, model.cfg.n_layers, spec_of(model))
    return dict(zip(found, maps, strict=True))


def _maps(found: Mapping[float, Simulation], theory: Mapping[float, Tensor]) -> Maps:
    maps = {}
    for alpha, each in found.items():
        mean = each.best.mean
        kinds = {
            "score": mean,
            "se": each.best.se,
            "theory": theory[alpha],
            "normalised": diagonal_normalised(mean),
        }
        for kind, tensor in kinds.items():
            maps[f"{kind}/alpha={alpha:g}"] = tensor.float().numpy()
    return maps


def layer_rows(
    alpha: float,
    found: Simulation,
    theory: Float[Tensor, "layer query_pos key_pos"],
    verdicts: list[MonotonicityTest],
) -> list[dict[str, Any]]:
    """Tabulate what was found in each layer: noise, gap to the theory (nats), increase in j."""
    gap = (found.best.mean - theory).nan_to_num()
    off = (~theory.isnan() & ~torch.eye(theory.shape[-1], dtype=torch.bool)).sum((1, 2))
    rows = []
    for layer, rise in enumerate(verdicts):
        row = {
            "alpha": alpha,
            "layer": layer,
            "n_samples": found.n_samples,
            "se": found.best.pooled_se[layer].item(),
            "se_plain": found.plain.pooled_se[layer].item(),
            "variance_ratio": found.variance_ratio[layer].item(),
            "gap_rms": (gap[layer].square().sum() / off[layer]).sqrt().item(),
            "gap_max": gap[layer].abs().max().item(),
            "verdict": rise.verdict,
            **interval_columns(rise.monotonicity, "monotonicity"),
            **interval_columns(rise.monotonicity_lag1, "monotonicity_lag1"),
            "distances": rise.distances,
            "rises": rise.rises,
            "falls": rise.falls,
            "falling_cells": rise.falling_cells,
            "theory_fall": rise.theory_fall,
            **interval_columns(rise.fall, "fall"),
        }
        rows.append(row)
    return rows


def steps_table(
    alpha: float,
    found: Simulation,
    theory: Float[Tensor, "layer query_pos key_pos"],
    resolution: float,
) -> pd.DataFrame:
    """Tabulate the mean step towards the query (nats) by layer and distance."""
    steps = mean_steps(found.best, resolution)
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
