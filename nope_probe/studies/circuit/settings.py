"""The `circuit` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.models.info import ModelInfo
from nope_probe.run.flags import COUNT, LAYERS, SEQ_LEN, Bounds
from nope_probe.run.processes import validate_one_process
from nope_probe.studies.removing import RemovingSettings

N_STAGES = 9


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Follow one block from its input to the next block's scores (the paper's Figure 3).

    Writes the mean Gram or score map of each stage, (a) to (i), with standard errors, into a
    folder with manifest.json, stages.csv and report.html.

    Attributes:
        layer: Which block, from 0; the last one has (a) to (g).
    """

    model: str = "nope-tiny"
    layer: Annotated[int, Bounds(0, LAYERS.high - 1)] = 0
    n_seqs: Annotated[int, COUNT] = 1000
    seq_len: Annotated[int, SEQ_LEN] = 50
    layers: Annotated[int | Literal["all"], tyro.conf.Suppress] = "all"
    unrecorded: ClassVar[tuple[str, ...]] = (*RemovingSettings.unrecorded, "layers")

    def validate(self) -> None:
        """Check the settings that need no model."""
        validate_one_process()
        super().validate()

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
