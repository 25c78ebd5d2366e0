"""The `circuit` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from nope_probe.components import WEIGHTS
from nope_probe.conditions import Condition
from nope_probe.errors import UserError
from nope_probe.hooks.removing.removals import Substitute, validate_replacements, without_weights
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.models.info import ModelInfo
from nope_probe.runtime.processes import validate_one_process
from nope_probe.runtime.settings import (
    LAYERS,
    Bounds,
    GainFlag,
    ModelFlag,
    RunSettings,
    SeqLenFlag,
    SeqsFlag,
    validate_effects,
)

_arg = tyro.conf.arg
N_STAGES = 9


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Follow one block from its input to the next block's scores (the paper's Figure 3).

    Writes the mean Gram or score map of each stage, (a) to (i), with standard errors, into a
    folder with manifest.json, stages.csv and report.html.
    """

    model: ModelFlag = "nope-tiny"
    layer: Annotated[
        int,
        Bounds(0, LAYERS.high - 1),
        _arg(help="Which block, from 0; the last one has (a) to (g)."),
    ] = 0
    remove: Annotated[
        tuple[str, ...],
        _arg(
            help="What to remove in every block, for a comparison with the intact model: of mask "
            "rope w_q w_k w_o w_v mlp pos_embed, the circuits qk ov, or norms (the weights of the "
            "norms before attention and MLP)."
        ),
    ] = ()
    replacement: Annotated[Replacement, _arg(help="What a removed weight is replaced by.")] = (
        "identity"
    )
    gain: GainFlag = "output"
    n_seqs: SeqsFlag = 1000
    seq_len: SeqLenFlag = 50
    layers: Annotated[int | Literal["all"], tyro.conf.Suppress] = "all"
    unrecorded: ClassVar[tuple[str, ...]] = (*RunSettings.unrecorded, "layers")

    def validate(self) -> None:
        """Check the settings that need no model."""
        validate_one_process()
        super().validate()
        validate_replacements((self.replacement,), self.gain)
        if not self.removed & {*WEIGHTS}:
            validate_effects(self, without_weights(("gain", "replacement")))

    @property
    def removed(self) -> Condition:
        """The components to remove, circuits as their weights.

        Raises:
            UserError: for a name that does not exist, or names that share a component.
        """
        if self.remove.count("norms") > 1:
            raise UserError("--remove: norms is named twice")
        try:
            return Condition.parse(name for name in self.remove if name != "norms")
        except ValueError as error:
            raise UserError(f"--remove: {error}") from error

    def validate_layers(self, info: ModelInfo) -> None:
        """Check that the block attends.

        Raises:
            UserError: if the block does not attend.
        """
        if self.layer in info.not_attending:
            named = ", ".join(f"L{layer}" for layer in info.attending)
            raise UserError(f"--layer {self.layer} of {info.name} does not attend; {named} do")

    @property
    def removes(self) -> bool:
        """Whether the run removes components."""
        return bool(self.remove)

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds: stages (a) to (i), intact and ablated."""
        return N_STAGES * (1 + bool(self.remove))

    @property
    def substitute(self) -> Substitute:
        """The replacement of removed weights."""
        return Substitute(replacement=self.replacement, gain=self.gain, seed=self.seed)
