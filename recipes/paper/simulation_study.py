"""The study of `simulate`: its passes and its run; and `theory`, which prints."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from critical_alphas import critical_alphas, n_rounds, smallest_steps
from monotonicity import (
    MonotonicityTest,
    by_distance,
    mean_steps,
    monotonicity_tests,
    steps_in_j,
)
from nope_probe.analyses.simulation import Simulation, simulate_scores, spec_of
from nope_probe.analyses.theory import theory_scores
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.maps.folds import State
from nope_probe.maps.rows import diagonal_normalised
from nope_probe.models.info import LoadedModel
from nope_probe.models.load import describe
from nope_probe.run.folder import Run
from nope_probe.run.manifest import RunData
from nope_probe.run.processes import progress, status, validate_memory
from nope_probe.run.session import Session
from nope_probe.stages import ParameterFreeSpec
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import Pass, Results, Study, captured
from nope_probe.studies.tables import TableRow, columns_of
from simulation_page import report
from simulation_settings import Settings, TheorySettings

MapsByName = dict[str, Float[np.ndarray, "layer query_pos key_pos"]]
N_ALPHAS = 17  # alphas of the grid
N_LIVE = 11  # maps of each alpha in memory at a time, as measured


class Simulate(Study[Settings]):
    """The mean scores of the parameter-free transformer at each alpha, next to the theory's."""

    @staticmethod
    def load(settings: Settings, device: str) -> LoadedModel:
        """Build the parameter-free transformer."""
        with status("loading TransformerLens"):
            # It takes seconds to import, and `theory` does without it.
            from nope_probe.models.parameter_free import build, parameter_free

            model = build(
                parameter_free(
                    settings.n_layers,
                    settings.d_model,
                    settings.norm,
                    settings.rope,
                    settings.causal,
                )
            )
        info = describe(model, str(model.cfg.model_name))
        return LoadedModel(model=model, tokenizer=None, info=info)

    def passes(self) -> Iterator[Pass]:
        """Yield the pass that simulates each alpha, on samples that are drawn meanwhile."""
        session, samples = self.session, self.settings.samples
        shape = torch.empty(1, 1).expand(samples or 0, self.settings.seq_len)
        engine = Engine(model=session.loaded.model, inputs=shape, checkpoint=session.checkpoint)
        runs = None if samples is None else 1  # else the standard errors decide
        for alpha in self.settings.alpha:
            read = partial(captured, partial(self._simulate, alpha))
            yield Pass(key=key_of(alpha), engine=engine, read=read, runs=runs)

    def _simulate(self, alpha: float, engine: Engine, stream: Stream | None) -> State:
        settings = self.settings
        return simulate_scores(
            engine.model,
            alpha=alpha,
            seq_len=settings.seq_len,
            n_samples=settings.samples,
            target_se=settings.target_se,
            control_variate=settings.control_variate,
            seed=settings.seed,
            checkpoint=stream,
        ).to_tensors()

    def analyse(self, results: Results) -> Run:
        """Compare the simulations with the theory, and return the run."""
        alphas = self.settings.alpha
        simulations = {alpha: Simulation.from_tensors(results[key_of(alpha)]) for alpha in alphas}
        return analyse(self.session, simulations)


def key_of(alpha: float) -> str:
    """Return the name of the simulation at an alpha."""
    return f"alpha={alpha:g}"


def analyse(session: Session[Settings], simulations: Mapping[float, Simulation]) -> Run:
    """Compare simulations with theory, and return the run.

    Args:
        session: the run.
        simulations: the simulations by alpha.
    """
    model = session.loaded.model
    spec, n = spec_of(model), next(iter(simulations.values())).best.folds.shape[-1]
    alphas = torch.tensor(list(simulations), dtype=torch.float64)
    maps, layers, steps = MapsByName(), [], []
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
            maps[f"{kind}/{key_of(alpha)}"] = tensor.float().numpy()
    n_samples = {f"{alpha:g}": of_alpha.n_samples for alpha, of_alpha in simulations.items()}
    manifest = replace(
        session.manifest(),
        data=RunData(name="Gaussian unit vectors", alpha=tuple(simulations)),
        results={"n_samples": n_samples},
    )
    tables = {"layers": pd.DataFrame(layers), "steps": pd.concat(steps)}
    run = Run(manifest=manifest, arrays={"maps": maps}, tables=tables)
    return replace(run, page=report(run).html(manifest))


def layer_rows(
    alpha: float,
    simulation: Simulation,
    theory: Float[Tensor, "layer query_pos key_pos"],
    tests: list[MonotonicityTest],
) -> list[TableRow]:
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
            **columns_of(test, ("monotonicity",)),
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


def print_critical_alphas(settings: TheorySettings) -> None:
    """Print each layer's critical alpha, and its smallest step at the given alphas.

    Raises:
        UserError: for settings that are not possible.
    """
    spec = ParameterFreeSpec(d_model=settings.d_model, norm=settings.norm, rope=settings.rope)
    n_maps = N_LIVE * max(N_ALPHAS, len(settings.alpha))
    validate_memory(8 * n_maps * settings.seq_len**2, "--seq-len")
    n, n_layers = settings.seq_len, settings.n_layers
    with progress(total=n_rounds(1e-5), desc="alphas", leave=False) as bar:
        critical = critical_alphas(n, n_layers, spec, on_round=bar.update).tolist()
    alphas = torch.tensor(settings.alpha, dtype=torch.float64)
    steps = smallest_steps(alphas, n, n_layers, spec).T.tolist() if settings.alpha else []
    for layer, value in enumerate(critical):
        sys.stdout.write(f"L{layer}: {_in_words(value)}\n")
        for alpha, step in zip(settings.alpha, steps[layer] if steps else [], strict=True):
            sys.stdout.write(f"  alpha = {alpha:g}: smallest step {step:+.2e}\n")
    sys.stdout.write(_summary(critical, n) + "\n")


def _in_words(critical: float) -> str:
    if math.isnan(critical):
        return "does not increase in j at any alpha"
    if critical == 0:
        return "increases in j at every alpha"
    return f"increases in j above alpha = {critical:.4f}, not below"


def _summary(critical: list[float], n: int) -> str:
    later = critical[1:]
    if not later:
        return f"n = {n}: L0 is flat; the pattern begins in L1"
    if any(map(math.isnan, later)):
        return f"n = {n}: a layer after the first does not increase in j at any alpha"
    return f"n = {n}: L1 to L{len(critical) - 1} all increase in j above alpha = {max(later):.4f}"
