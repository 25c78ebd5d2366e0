"""The `ablate` command's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from nope_probe.analyses.shapley import player_set
from nope_probe.components import SOURCES, WEIGHTS, equal_bands, with_bands
from nope_probe.conditions import Condition
from nope_probe.errors import UserError
from nope_probe.hooks.removing.removals import Substitute, validate_replacements, without_weights
from nope_probe.hooks.removing.stand_ins import DEFAULT_REPLACEMENTS, Replacement
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

    Runs the model with and without its causal mask, RoPE and weights, and reports per layer how
    much of the positional pattern each source brings and which weights it needs, with intervals.
    With the default settings, the shipped model takes about 15 seconds on two cores.
    """

    players: Annotated[
        tuple[str, ...] | None,
        _arg(
            help="What is kept or removed as a whole: of mask rope w_q w_k w_o w_v mlp pos_embed "
            "window alibi sink, the circuits qk ov, rope_high and rope_low (pairs whose wavelength "
            "is below the sequence's length, and the rest), the position that a head, MLP or "
            "embedding writes (position[L1H0], position[MLP0]), unions such as w_q+mlp; or "
            "`sources` alone. By default mask rope w_q w_k w_o, and in a second set mask rope qk "
            "ov."
        ),
    ] = None
    bands: Annotated[
        int,
        Bounds(0, MOST_BANDS),
        _arg(
            help="Into how many bands of rotary pairs to divide RoPE, each a player in its place; "
            "0 leaves it whole. Without --players, mask and bands play alone."
        ),
    ] = 0
    replacement: Annotated[
        tuple[Replacement, ...] | None,
        _arg(
            help="What a removed weight is replaced by; several are shown side by side, and maps "
            "and figures are of the first. By default identity, and beside it, for what is lost "
            "without each weight, mean."
        ),
    ] = None
    gain: GainFlag = "output"
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        if self.bands and self.players is not None and "rope" not in self.players:
            raise UserError("--bands divides the player rope, and it is not among --players")
        validate_replacements(
            DEFAULT_REPLACEMENTS if self.replacement is None else self.replacement, self.gain
        )
        removed = self._named_components()
        if removed is not None and not removed & {*WEIGHTS}:
            validate_effects(self, without_weights(FLAGS_OF_WEIGHTS))

    def _named_components(self) -> Condition | None:
        """Return the components of the players, as far as their names tell; None by default.

        Raises:
            UserError: for players that do not exist or share a component, or too many.
        """
        names = self.player_names
        if names is None:
            return None
        if names == ("sources",):
            return Condition(SOURCES)
        try:
            if self.bands:
                player_set(names)  # as they were named: bands of other players are no fault
                pairs = equal_bands(self.bands, self.bands)  # in place of the model's
                names = tuple(with_bands(names, pairs))
            players = player_set(names).players
        except ValueError as error:
            flag = "--bands" if self.players is None else "--players"
            raise UserError(f"{flag}: {error}") from error
        return Condition(name for player in players for name in player.components)

    @property
    def substitutes(self) -> tuple[Substitute, ...]:
        """The replacements of removed weights, in turn."""
        return self._substitutes(self.replacement or DEFAULT_REPLACEMENTS[:1])

    @property
    def checks(self) -> tuple[Substitute, ...]:
        """The replacements that only measure what is lost without each weight."""
        return () if self.replacement else self._substitutes(DEFAULT_REPLACEMENTS[1:])

    def _substitutes(self, names: Sequence[Replacement]) -> tuple[Substitute, ...]:
        return tuple(Substitute(replacement=name, gain=self.gain, seed=self.seed) for name in names)

    @property
    def player_names(self) -> tuple[str, ...] | None:
        """The players as they were named; None where the model decides on them."""
        if self.players is None and self.bands:
            return ("mask", "rope")
        return self.players
