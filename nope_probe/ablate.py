"""Attribute a model's positional attention pattern to mask, RoPE and the weights it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.command import run_command
from nope_probe.errors import UserError
from nope_probe.study import StudySettings, carry_out, layers_studied, skipped_keys

if TYPE_CHECKING:
    from nope_probe.data import Windows
    from nope_probe.results import Run
    from nope_probe.study_run import StudyRun

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(StudySettings):
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights, and reports per layer how
    much of the pattern each source brings and which weights it needs, with intervals.
    """

    players: Annotated[
        tuple[str, ...] | None,
        _arg(
            help="What is kept or removed: of mask rope w_q w_k w_o w_v mlp pos_embed, the "
            "circuits qk ov, unions such as w_q+mlp; or `sources` alone. By default mask rope w_q "
            "w_k w_o, and the circuits beside."
        ),
    ] = None
    gain: Annotated[
        Literal["output", "norm", "identity"], _arg(help="The size of a removed weight's stand-in.")
    ] = "output"
    scope: Annotated[
        Literal["both", "upstream", "own"],
        _arg(help="For a layer's scores, remove in the layers before it, in itself, or in both."),
    ] = "both"
    gauge: Annotated[
        int, _arg(help="In how many random bases of the weights to repeat single matrices.")
    ] = 0


def main() -> None:
    """Run the command line."""
    run_command(Settings, ablate)


def ablate(settings: Settings) -> Path:
    """Run the attribution, or show it again if it is finished, and return its folder."""
    from nope_probe.summary import show

    if settings.gauge < 0:
        raise UserError(f"expected a --gauge of 0 or more, got {settings.gauge}")
    return carry_out("ablate", settings, partial(_compute, settings), show)


def _compute(settings: Settings, study: StudyRun) -> Run | None:
    from nope_probe.experiment import How, make_plan, passes, run_conditions, run_gauges
    from nope_probe.hooks.ablation import components
    from nope_probe.run_record import assemble

    loaded, model = study.loaded, study.loaded.model
    inputs, shuffled = _inputs(study)
    skip_keys = skipped_keys(settings, inputs)
    plan = make_plan(components(model), settings.players, loaded.card.parameter_free)
    if settings.gauge and not plan.games:
        raise UserError("--gauge needs players: the sources have no weights to rewrite")
    how = How(
        n_layers=layers_studied(settings, loaded),
        batch_size=settings.batch_size,
        n_folds=settings.folds,
        gain=settings.gain,
        scope=settings.scope,
        journal=study.journal,
    )
    total = passes(plan, how, shuffled is not None, settings.gauge)
    with study.progress(total) as bar:
        how = replace(how, on_batch=bar.update)
        measured = run_conditions(model, inputs, plan, how, shuffled)
        gauges = list(run_gauges(model, inputs, plan, how, settings.gauge, settings.seed))
    if not study.processes.is_first:
        return None
    return assemble(
        settings=study.asked,
        loaded=loaded,
        inputs=inputs,
        plan=plan,
        measured=measured,
        gauges=gauges,
        skip_keys=skip_keys,
        started=study.started,
    )


def _inputs(study: StudyRun) -> tuple[Windows, Windows | None]:
    """Give the run's windows, and shuffled ones as a control where order means something."""
    inputs = study.windows("inputs")
    if study.settings.shuffle or study.settings.data in ("random", "gaussian"):
        return inputs, None
    return inputs, study.windows("shuffled", shuffle=True)


if __name__ == "__main__":
    main()
