"""The settings of the commands that remove components: what is removed, and what replaces it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import tyro

from nope_probe.errors import UserError
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.stand_ins import WITH_GAIN, Replacement
from nope_probe.removal import COMPONENTS, Condition, Gain
from nope_probe.run.settings import RunSettings, validate_effects

_arg = tyro.conf.arg
NAMES = (
    f"{' '.join(COMPONENTS)} norms, the circuits qk ov, rope_high and rope_low (pairs whose "
    "wavelength is below the sequence's length, and the rest), the position that a head, MLP or "
    "embedding writes (position[L1H0], position[MLP0]), unions such as w_k+w_o"
)


@dataclass(frozen=True, kw_only=True)
class RemovingSettings(RunSettings):
    """What is removed from a model, and what replaces its weights."""

    remove: Annotated[
        tuple[str, ...] | None, _arg(help=f"What to remove from every block: {NAMES}.")
    ] = ()
    replacement: Annotated[Replacement, _arg(help="What a removed weight is replaced by.")] = (
        "identity"
    )
    gain: Annotated[Gain, _arg(help=f"The size of the replacements {' and '.join(WITH_GAIN)}.")] = (
        "output"
    )

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        names = " ".join(self.replacements)
        if not names or len({*self.replacements}) < len(self.replacements):
            raise UserError(f"expected each --replacement once, got {names or 'none'}")
        if self.gain != "output" and not {*WITH_GAIN} & {*self.replacements}:
            raise UserError(
                f"--gain is for the replacements {' and '.join(WITH_GAIN)}, not {names}"
            )
        named = self.conditions
        if named is not None:
            self.validate_weights(named)

    def validate_weights(self, conditions: Iterable[Condition]) -> None:
        """Check that some condition removes a weight, where flags say by what to replace it.

        Raises:
            UserError: naming the flag.
        """
        if not any(condition.weights for condition in conditions):
            reason = "where no weight is removed"
            validate_effects(self, {"replacement": reason, "gain": reason})

    @property
    def conditions(self) -> list[Condition] | None:
        """What is removed, one at a time; None where the model decides on it."""
        return [self.removed]

    @property
    def removed(self) -> Condition:
        """All components to remove, at once.

        Raises:
            UserError: for a name that does not exist, or names that share a component.
        """
        return parse_removed(self.remove or ())

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """The replacements of removed weights, in turn."""
        given: Replacement | tuple[Replacement, ...] = self.replacement
        return (given,) if isinstance(given, str) else given

    @property
    def ablations(self) -> tuple[Ablation, ...]:
        """For each replacement of removed weights, an ablation that removes nothing yet."""
        return tuple(
            Ablation(replacement=name, gain=self.gain, seed=self.seed) for name in self.replacements
        )


def parse_removed(names: str | Iterable[str]) -> Condition:
    """Return the condition that `--remove` names.

    Raises:
        UserError: for a name that does not exist, or names that share a component.
    """
    try:
        return Condition.parse(names)
    except ValueError as error:
        raise UserError(f"--remove: {error}") from error
