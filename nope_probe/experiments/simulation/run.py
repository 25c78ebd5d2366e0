"""The runs of `simulate`, from settings to a folder, and of `theory`, which prints."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

from nope_probe.analyses.parameter_free.simulation import Simulation, simulate_scores
from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.analyses.parameter_free.theory import critical_alphas, n_rounds, smallest_steps
from nope_probe.experiments.simulation.analyse import analyse
from nope_probe.experiments.simulation.settings import Settings, TheorySettings
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.folds import State
from nope_probe.models.info import LoadedModel
from nope_probe.models.parity import describe
from nope_probe.runtime.places import validate_memory
from nope_probe.runtime.processes import Progress, status
from nope_probe.runtime.session import Session

N_ALPHAS = 17  # alphas of the grid
N_LIVE = 11  # maps of each alpha in memory at a time, as measured


def run(settings: Settings) -> Path:
    """Run a simulation unless it is finished, and return its folder.

    Raises:
        UserError: for settings that cannot be run.
    """
    with Session("simulate", settings, load=build_model) as session:
        if not session.finished:
            simulated = simulations(session)
            with status("analysing and writing", in_logs=True):
                session.write(analyse(session, simulated))
    return session.folder


def build_model(settings: Settings, device: str) -> LoadedModel:
    """Build the parameter-free transformer."""
    with status("loading TransformerLens"):
        # It takes seconds to import, and `theory` does without it.
        from nope_probe.models.parameter_free import build, parameter_free

        model = build(
            parameter_free(
                settings.n_layers, settings.d_model, settings.norm, settings.rope, settings.causal
            )
        )
    return LoadedModel(model=model, tokenizer=None, info=describe(model, str(model.cfg.model_name)))


def simulations(session: Session[Settings]) -> dict[float, Simulation]:
    """Return the simulation at each alpha, from the checkpoint or run and saved."""
    settings, checkpoint, simulated = session.settings, session.checkpoint, {}
    keys = {alpha: f"alpha={alpha:g}" for alpha in settings.alpha}
    with checkpoint.progress(list(keys.values()), settings.samples or 0, unit="sample"):
        for alpha, key in keys.items():

            def simulate(stream: StreamCheckpoint, alpha: float = alpha) -> State:
                return simulate_scores(
                    session.loaded.model,
                    alpha=alpha,
                    seq_len=settings.seq_len,
                    n_samples=settings.samples,
                    target_se=settings.target_se,
                    control_variate=settings.control_variate,
                    seed=settings.seed,
                    checkpoint=stream,
                ).to_tensors()

            simulated[alpha] = Simulation.from_tensors(checkpoint.once(key, simulate))
    return simulated


def print_critical_alphas(settings: TheorySettings) -> None:
    """Print each layer's critical alpha, and its smallest step at the given alphas.

    Raises:
        UserError: for settings that are not possible.
    """
    spec = ParameterFreeSpec(d_model=settings.d_model, norm=settings.norm, rope=settings.rope)
    n_maps = N_LIVE * max(N_ALPHAS, len(settings.alpha))
    validate_memory(8 * n_maps * settings.seq_len**2, "--seq-len")
    n, n_layers = settings.seq_len, settings.n_layers
    with Progress(total=n_rounds(1e-5), desc="alphas", leave=False) as bar:
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
