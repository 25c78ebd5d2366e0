"""The `ablate` command's run: from settings to a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

if TYPE_CHECKING:
    from nope_probe.data.sequences import Sequences
    from nope_probe.experiments.ablation.conditions import CaptureOptions, Measured
    from nope_probe.experiments.ablation.plan import Plan

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights, and reports per layer how
    much of the positional pattern each source brings and which weights it needs, with intervals.
    """

    players: Annotated[
        tuple[str, ...] | None,
        _arg(
            help="What is kept or removed as a whole: of mask rope w_q w_k w_o w_v mlp pos_embed, "
            "the circuits qk ov, unions such as w_q+mlp; or `sources` alone. By default mask rope "
            "w_q w_k w_o, and in a second set mask rope qk ov."
        ),
    ] = None
    gain: Annotated[
        Literal["output", "norm", "identity"],
        _arg(help="The size of a removed weight's replacement."),
    ] = "output"
    scope: Annotated[
        Literal["both", "upstream", "own"],
        _arg(help="For a layer's scores, remove in the layers before it, in itself, or in both."),
    ] = "both"
    reparametrise: Annotated[
        int, _arg(help="In how many random reparametrisations to repeat the first player set.")
    ] = 0

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        if self.reparametrise < 0:
            raise UserError(f"expected a --reparametrise of 0 or more, got {self.reparametrise}")

    @property
    def has_shuffled_control(self) -> bool:
        """Whether the tokens have an order that shuffling removes, so that it is a control."""
        return not self.shuffle and self.data not in ("random", "gaussian")


def run(settings: Settings) -> Path:
    """Run the attribution unless it is finished, and return its folder.

    Raises:
        UserError: for what cannot be done.
    """
    with Session("ablate", settings) as session:
        if not session.finished:
            from nope_probe.experiments.ablation.analyse import analyse

            plan = plan_of(session)
            measured = run_conditions(session, plan)
            if session.is_first:
                session.write(analyse(session, plan, measured))
    return session.folder


def plan_of(session: Session[Settings]) -> Plan:
    """Return the conditions to run.

    Raises:
        UserError: for players that the model does not have, or flags that need others.
    """
    from nope_probe.experiments.ablation.plan import make_plan
    from nope_probe.hooks.components import components

    settings, loaded = session.settings, session.loaded
    plan = make_plan(components(loaded.model), settings.players, loaded.info.parameter_free)
    for flag, given in (("reparametrise", settings.reparametrise), ("gain", settings.gain)):
        if given not in (0, "output") and not plan.removes_weights:
            raise UserError(f"--{flag} is for weights, and no player of this run removes one")
    return plan


def run_conditions(session: Session[Settings], plan: Plan) -> Measured:
    """Return the score maps of all conditions, from the checkpoint or captured and saved."""
    from nope_probe.experiments.ablation.conditions import ConditionRunner

    inputs, shuffled = inputs_of(session)
    runner = ConditionRunner(session.loaded.model, plan, options_of(session), session.checkpoint)
    runner.validate(inputs)
    with session.checkpoint.progress(runner.keys(shuffled is not None), session.n_own_seqs):
        return runner.run(inputs, shuffled)


def inputs_of(session: Session[Settings]) -> tuple[Sequences, Sequences | None]:
    """Return the run's sequences, and shuffled ones if shuffling is a control."""
    shuffled = None
    if session.settings.has_shuffled_control:
        shuffled = session.sequences("shuffled-inputs", shuffle=True)
    return session.sequences(), shuffled


def options_of(session: Session[Settings]) -> CaptureOptions:
    """Return how conditions are run."""
    from nope_probe.experiments.ablation.conditions import CaptureOptions

    settings = session.settings
    return CaptureOptions(
        n_layers=settings.n_layers_of(session.loaded),
        batch_size=settings.seqs_per_batch,
        n_folds=settings.folds,
        gain=settings.gain,
        scope=settings.scope,
        n_reparametrisations=settings.reparametrise,
        seed=settings.seed,
    )
