"""The `ablate` command's run: from settings to a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.experiments.replacements import validate_replacements
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings
from nope_probe.runtime.status import status

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
            "the circuits qk ov, rope_high and rope_low (pairs whose wavelength is below the "
            "sequence's length, and the rest), unions such as w_q+mlp; or `sources` alone. By "
            "default mask rope w_q w_k w_o, and in a second set mask rope qk ov."
        ),
    ] = None
    bands: Annotated[
        int,
        _arg(
            help="Into how many bands of rotary pairs to divide RoPE, each a player in its place; "
            "0 leaves it whole. Without --players, mask and bands play alone."
        ),
    ] = 0
    replacement: Annotated[
        tuple[Literal["identity", "random", "mean", "zero"], ...],
        _arg(
            help="What a removed weight is replaced by; several are shown side by side, and maps "
            "and figures are of the first."
        ),
    ] = ("identity",)
    gain: Annotated[
        Literal["output", "norm", "identity"],
        _arg(help="The size of the replacements identity and random."),
    ] = "output"
    scope: Annotated[
        Literal["both", "upstream", "own"],
        _arg(help="For a layer's scores, remove in the layers before it, in itself, or in both."),
    ] = "both"
    reparametrise: Annotated[
        int, _arg(help="In how many random reparametrisations to repeat the first player set.")
    ] = 0
    residuals_gb: Annotated[
        float,
        _arg(
            help="With --scope own or upstream: up to how many GB of residual streams to keep for "
            "conditions that have them in common, in the memory of the model's device."
        ),
    ] = 1.0

    unrecorded = (*RunSettings.unrecorded, "residuals_gb")

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        if self.residuals_gb < 0:
            raise UserError(f"expected --residuals-gb of 0 or more, got {self.residuals_gb}")
        if self.bands < 0:
            raise UserError(f"expected --bands of 0 or more, got {self.bands}")
        if self.bands and self.players and "rope" not in self.players:
            raise UserError("--bands divides the player rope, and it is not among --players")
        if self.reparametrise < 0:
            raise UserError(f"expected a --reparametrise of 0 or more, got {self.reparametrise}")

        validate_replacements(self.replacement, self.gain)

    @property
    def flags_of_weights(self) -> dict[str, bool]:
        """Whether each flag was given that has an effect only where weights are removed."""
        return {
            "reparametrise": self.reparametrise != 0,
            "replacement": self.replacement != ("identity",),
            "gain": self.gain != "output",
        }

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
            plan = plan_of(session)
            measured = run_conditions(session, plan)
            if session.is_first:
                with status("analysing and writing"):
                    from nope_probe.experiments.ablation.analyse import analyse

                    session.write(analyse(session, plan, measured))
    return session.folder


def plan_of(session: Session[Settings]) -> Plan:
    """Return the conditions to run.

    Raises:
        UserError: for players that the model does not have, or flags that need others.
    """
    from nope_probe.experiments.ablation.bands import bands_of, with_bands
    from nope_probe.experiments.ablation.plan import make_plan
    from nope_probe.experiments.components import validate_bands
    from nope_probe.hooks.components import components
    from nope_probe.hooks.rope_names import ROPE_HALVES

    settings, loaded = session.settings, session.loaded
    players: tuple[str, ...] | None = settings.players
    bands: tuple[str, ...] = ROPE_HALVES
    if settings.bands:
        bands = bands_of(loaded.model, settings.bands)
        players = tuple(with_bands(players or ("mask", "rope"), bands))
    plan = make_plan(components(loaded.model), players, loaded.info.parameter_free, bands)
    validate_bands(loaded.model, plan.removable)
    for flag, given in settings.flags_of_weights.items():
        if given and not plan.removes_weights:
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
    from nope_probe.hooks.residual_cache import GIGABYTE

    settings = session.settings
    return CaptureOptions(
        n_layers=settings.n_layers_of(session.loaded),
        batch_size=settings.seqs_per_batch,
        n_folds=settings.folds,
        replacements=settings.replacement,
        gain=settings.gain,
        scope=settings.scope,
        n_reparametrisations=settings.reparametrise,
        seed=settings.seed,
        max_residual_bytes=int(settings.residuals_gb * GIGABYTE),
    )
