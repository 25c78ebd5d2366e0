"""A simulation from its settings to its folder, for the commands `simulate` and `reproduce`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from nope_probe.command import refuse_processes
from nope_probe.errors import UserError

if TYPE_CHECKING:
    from nope_probe.analyses.simulation import Simulation

_arg = tyro.conf.arg
Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
CONTEXT = 4096


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Simulate the parameter-free transformer (eq. 1 of the paper) and compare it with theory.

    Writes manifest.json, maps.safetensors, layers.csv and report.html into a folder.
    """

    alpha: Annotated[
        tuple[float, ...], _arg(help="Expected inner products of the inputs, 0 <= alpha < 1.")
    ] = (0.0, 0.2)
    n_layers: Annotated[int, _arg(help="Layers.")] = 4
    n_samples: Annotated[
        int | None, _arg(help="Samples per alpha [2000, unless --target-se is given].")
    ] = None
    target_se: Annotated[
        float | None, _arg(help="Go on until every layer's pooled standard error is this, nats.")
    ] = None
    seq_len: Annotated[int, _arg(help="Positions.")] = 50
    d_model: Annotated[int, _arg(help="Dimension.")] = 64
    norm: Annotated[Norm, _arg(help="L2, or LayerNorm with scores over sqrt(d) or d.")] = "l2"
    rope: Annotated[bool, _arg(help="Rotate queries and keys.")] = False
    causal: Annotated[bool, _arg(help="Mask keys after the query.")] = True
    control_variate: Annotated[
        bool, _arg(help="Take off the noise that the inputs' own Gram matrix brings.")
    ] = True
    seed: Annotated[int, _arg(help="Seed of the samples.")] = 0
    out: Annotated[Path | None, _arg(help="Folder of the run [runs/simulate-HASH].")] = None


def run(settings: Settings) -> Path:
    """Run a simulation unless it is finished already, and return its folder.

    Raises:
        UserError: for settings that cannot be, or a place that is taken.
    """
    refuse_processes()
    refuse_impossible(settings)
    from nope_probe.results import check_place, settings_hash, write_run

    settings = with_samples(settings)
    asked = {key: value for key, value in asdict(settings).items() if key != "out"}
    asked["alpha"] = list(settings.alpha)
    out = settings.out or Path("runs") / f"simulate-{settings_hash(asked)}"
    if not check_place(out, asked):
        from nope_probe.simulation_record import assemble

        started = time.time()
        model, found = measure(settings)
        write_run(out, assemble(model, found, asked, started))
    return out


def with_samples(settings: Settings) -> Settings:
    """Fill in the number of samples where nothing decides it."""
    if settings.n_samples is None and settings.target_se is None:
        return replace(settings, n_samples=2000)
    return settings


def measure(settings: Settings) -> tuple[Any, dict[float, Simulation]]:
    """Build the model and simulate it at each alpha, with a progress bar."""
    from tqdm import tqdm

    from nope_probe.analyses import simulation
    from nope_probe.models import build, parameter_free

    model = build(
        parameter_free(
            settings.n_layers, settings.d_model, settings.norm, settings.rope, settings.causal
        )
    )
    found = {}
    for alpha in settings.alpha:
        with tqdm(desc=f"alpha = {alpha:g}", unit="sample", file=sys.stderr) as bar:
            found[alpha] = simulation.simulate(
                model,
                alpha=alpha,
                seq_len=settings.seq_len,
                n_samples=settings.n_samples,
                target_se=settings.target_se,
                control_variate=settings.control_variate,
                seed=settings.seed,
                on_samples=_progress(bar),
            )
    return model, found


def _progress(bar: Any) -> Callable[[int, int], None]:
    def show(done: int, goal: int) -> None:
        bar.total = goal
        bar.update(done - bar.n)

    return show


def refuse_impossible(settings: Settings) -> None:
    """Refuse what cannot be simulated.

    Raises:
        UserError: saying what was asked and what can be.
    """
    _refuse_alphas(settings.alpha)
    if settings.n_layers < 1:
        raise UserError(f"expected at least 1 layer, got {settings.n_layers}")
    if not 3 <= settings.seq_len <= CONTEXT:
        raise UserError(f"expected from 3 to {CONTEXT} positions, got {settings.seq_len}")
    if settings.d_model < 2:
        raise UserError(f"expected at least 2 dimensions, got {settings.d_model}")
    if settings.rope and settings.d_model % 2:
        raise UserError(f"RoPE turns pairs of coordinates: --d-model {settings.d_model} is odd")
    if settings.seed < 0:
        raise UserError(f"expected a seed of 0 or more, got {settings.seed}")
    _refuse_samples(settings)


def _refuse_alphas(alphas: tuple[float, ...]) -> None:
    if not alphas:
        raise UserError("expected at least one --alpha")
    for alpha in alphas:
        if not 0 <= alpha < 1:
            raise UserError(f"expected 0 <= alpha < 1, got {alpha:g}")
    if len({f"{alpha:g}" for alpha in alphas}) < len(alphas):
        raise UserError("two alphas are the same to six digits")


def _refuse_samples(settings: Settings) -> None:
    n_samples, target = settings.n_samples, settings.target_se
    if n_samples is not None and target is not None:
        raise UserError("expected --n-samples or --target-se, not both")
    if n_samples is not None and n_samples < 2:
        raise UserError(f"expected at least 2 samples, got {n_samples}: one has no spread")
    finest = 2.0**-23 * (settings.d_model**0.5 if settings.norm == "layernorm-sqrt-d" else 1.0)
    if target is not None and not finest <= target < float("inf"):
        raise UserError(f"expected a --target-se that float32 resolves, {finest:.2g} nats or more")
