"""The `layers` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.models.names import path_of, validate_revision
from nope_probe.run.flags import LAYERS, SEED, SEQ_LEN, validate_effects
from nope_probe.run.settings import ModelSettings
from nope_probe.studies.layers.expect import Expectation, parse_expectation

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    """Find what each layer of a model does about position.

    The findings are RoPE's action, pairs and base, the mask's shape, norms, soft cap, scale and
    BOS. They come from interventions on one short batch, never from the configuration. Prints one
    table, and the differences to the configuration.

    Attributes:
        layers: How many first layers to read.
        seq_len: Length of the sequence from which masks, and changes with length, are read; only
            shorter windows show.
        beyond_context: Allow a --seq-len beyond the context (not of learned positions).
        expect: Expected values, such as no_rope_layers=3,7,11 or sliding_window=4096; exit code 1
            if the model differs.
        json: Print JSON instead of the table.
        seed: Seed of the batch.
        device: A torch device, or auto.
    """

    layers: Annotated[int | Literal["all"], LAYERS] = "all"
    seq_len: Annotated[int | Literal["auto"], SEQ_LEN] = "auto"
    beyond_context: bool = False
    expect: Annotated[tuple[str, ...], _arg(metavar="KEY=VALUE")] = ()
    json: bool = False
    seed: Annotated[int, SEED] = 0
    device: str = "auto"

    def sources(self) -> dict[str, Path | None]:
        """Return the paths of the model's files; None for a model on the Hub."""
        made_here = self.model.lower().startswith("parameter-free")
        return {} if made_here else {"model": path_of(self.model)}

    @property
    def expectations(self) -> list[Expectation]:
        """The expectations of the model.

        Raises:
            UserError: for a text that is none.
        """
        return [parse_expectation(text) for text in self.expect]

    def validate(self) -> None:
        """Check the settings that need no model.

        Raises:
            UserError: naming the flag.
        """
        expectations = self.expectations
        if len({expectation.key for expectation in expectations}) < len(expectations):
            raise UserError(f"--expect names a key twice: {' '.join(self.expect)}")
        if self.seq_len == "auto":
            validate_effects(self, {"beyond_context": "without a --seq-len"})
        if self.revision is not None:
            validate_revision(self.model)
