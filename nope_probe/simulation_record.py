"""From simulations to what a run holds: maps, the table of layers, manifest and page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.mean_field import field_of
from nope_probe.analyses.monotone import Rise, by_distance, mean_steps, rises, steps_in_j
from nope_probe.analyses.pattern import diagonal_normalised
from nope_probe.analyses.simulation import Simulation, finest_target
from nope_probe.analyses.theory import theory_scores
from nope_probe.contract import describe
from nope_probe.provenance import command_line
from nope_probe.report_simulate import simulation_page
from nope_probe.results import Run, versions
from nope_probe.tables import spread

Maps = dict[str, Float[np.ndarray, "layer query_pos key_pos"]]


def assemble(
    model: Any, found: Mapping[float, Simulation], settings: Mapping[str, Any], started: float
) -> Run:
    """Compare simulations with theory and put a run together."""
    theory = theory_of(model, found)
    resolution = finest_target(model)
    verdicts = {a: rises(each.best, theory[a], resolution) for a, each in found.items()}
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
    answer = [_sentence(alpha, verdicts[alpha], found[alpha]) for alpha in found]
    manifest = {
        "command": command_line(),
        "settings": dict(settings),
        "model": describe(model, str(model.cfg.model_name)).to_dict(),
        "data": {"name": "Gaussian unit vectors", "alpha": list(found)},
        "n_samples": {f"{alpha:g}": each.n_samples for alpha, each in found.items()},
        "answer": answer,
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 3),
    }
    maps = _maps(found, theory)
    page = simulation_page(maps, tables, manifest, answer)
    return Run(manifest=manifest, arrays={"maps": maps}, tables=tables, page=page)


def theory_of(
    model: Any, found: Mapping[float, Simulation]
) -> dict[float, Float[Tensor, "layer query_pos key_pos"]]:
    """Give the mean field's score maps at each simulated alpha."""
    n = next(iter(found.values())).best.folds.shape[-1]
    alphas = torch.tensor(list(found), dtype=torch.float64)
    maps = theory_scores(alphas, n, model.cfg.n_layers, field_of(model))
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
    verdicts: list[Rise],
) -> list[dict[str, Any]]:
    """Tabulate what was found in each layer: noise, gap to the theory (nats), increase in j."""
    gap = (found.best.mean - theory).nan_to_num()
    off = (~theory.isnan() & ~torch.eye(theory.shape[-1], dtype=torch.bool)).sum((1, 2))
    rows = []
    for layer, rise in enumerate(verdicts):
        row = {
            "alpha": alpha,
            "layer": layer + 1,
            "n_samples": found.n_samples,
            "se": found.best.pooled_se[layer].item(),
            "se_plain": found.plain.pooled_se[layer].item(),
            "variance_ratio": found.variance_ratio[layer].item(),
            "gap_rms": (gap[layer].square().sum() / off[layer]).sqrt().item(),
            "gap_max": gap[layer].abs().max().item(),
            "verdict": rise.verdict,
            **spread(rise.monotonicity, "monotonicity"),
            **spread(rise.monotonicity_lag1, "monotonicity_lag1"),
            "distances": rise.distances,
            "rises": rise.rises,
            "falls": rise.falls,
            "falling_cells": rise.falling_cells,
            "theory_fall": rise.theory_fall,
            **spread(rise.fall, "fall"),
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
            "layer": np.repeat(np.arange(1, n_layers + 1), n_distances),
            "distance": np.tile(np.arange(2, n_distances + 2), n_layers),
            "step": steps.mean.flatten().numpy(),
            "se": steps.se.flatten().numpy(),
            "theory": predicted.flatten().numpy(),
        }
    )


def _sentence(alpha: float, verdicts: list[Rise], found: Simulation) -> str:
    said = "; ".join(f"layer {rise.layer} {_said(rise)}" for rise in verdicts)
    worst = float(found.best.pooled_se.max())
    return (
        f"alpha = {alpha:g}, in j: {said}. {found.n_samples} samples, "
        f"standard error {worst:.1e} nats in the worst layer."
    )


def _said(rise: Rise) -> str:
    fall = rise.fall
    if fall.high < 0:
        half = (fall.high - fall.low) / 2
        return (
            f"{rise.verdict} (where theory falls, by {fall.value:.1e} ± {half:.0e} nats a step, "
            f"theory {rise.theory_fall:.1e})"
        )
    return rise.verdict
