"""The `ablate` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.hooks.removing.removals import Ablation, validate_replacements, without_weights
from nope_probe.hooks.removing.stand_ins import DEFAULT_REPLACEMENTS, Replacement
from nope_probe.models.info import ModelInfo
from nope_probe.removal import Condition
from nope_probe.runtime.settings import (
    OFFSET_BINS,
    Bounds,
    GainFlag,
    RunSettings,
    validate_effects,
)

_arg = tyro.conf.arg
MOST_BANDS = 128  # rotary pairs of the widest heads
FLAGS_OF_WEIGHTS = ("replacement", "gain")


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights. Per layer it reports what
    the first key's lead and the pattern among the other keys lose without each, with intervals.
    With the default settings, the shipped model takes about 10 seconds on two cores.
    """

    remove: Annotated[
        tuple[str, ...] | None,
        _arg(
            help="What to remove besides the sources, one at a time: w_q w_k w_o w_v mlp sink, the "
            "circuits qk ov, rope_high and rope_low (pairs whose wavelength is below the "
            "sequence's length, and the rest), the position that a head, MLP or embedding writes "
            "(position[L1H0], position[MLP0]), unions such as w_k+w_o; `sources` for the sources "
            "alone. By default w_q w_k w_o qk ov."
        ),
    ] = None
    bands: Annotated[
        int,
        Bounds(0, MOST_BANDS),
        _arg(
            help="Also remove each of so many bands of RoPE's pairs in turn. Without --remove, no "
            "weights are removed then."
        ),
    ] = 0
    replacement: Annotated[
        tuple[Replacement, ...],
        _arg(
            help="What a removed weight is replaced by; several are shown side by side. A headline "
            "speaks of the first."
        ),
    ] = DEFAULT_REPLACEMENTS
    gain: GainFlag = "output"
    per_head: Annotated[
        bool, _arg(help="Also measure what each head loses without each source and band.")
    ] = False
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        validate_replacements(self.replacement, self.gain)
        names = self.removed_names
        try:
            removed = [Condition.parse(name) for name in names or ()]
        except ValueError as error:
            raise UserError(f"--remove: {error}") from error
        if names is not None and not any(condition.weights for condition in removed):
            validate_effects(self, without_weights(FLAGS_OF_WEIGHTS))

    @property
    def removed_names(self) -> tuple[str, ...] | None:
        """What is removed besides sources and bands; None where the model decides on it."""
        if self.remove is None:
            return () if self.bands else None
        return tuple(name for name in self.remove if name != "sources")

    @property
    def ablations(self) -> tuple[Ablation, ...]:
        """For each replacement of removed weights, an ablation that removes nothing yet."""
        return tuple(
            Ablation(replacement=name, gain=self.gain, seed=self.seed) for name in self.replacement
        )

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds; of a head two, with half the bytes of a layer's."""
        n_layers = len(self.layers_of(info))
        return n_layers * (1 + info.n_heads) if self.per_head else n_layers

    def recorded(self) -> dict[str, Any]:
        """Return the settings that identify the run; a run without heads keeps its identity."""
        settings = super().recorded()
        return {key: x for key, x in settings.items() if key != "per_head" or self.per_head}
