"""The flags --replacement and --gain, checked without the model."""

from __future__ import annotations

from collections.abc import Sequence

from nope_probe.components import Gain, Replacement
from nope_probe.errors import UserError


def validate_replacements(replacements: Sequence[Replacement], gain: Gain) -> None:
    """Check that there is a replacement, each once, and that the gain has an effect.

    Raises:
        UserError: for none, one named twice, or a gain where none of them has one.
    """
    if not replacements or len(set(replacements)) < len(replacements):
        raise UserError(f"expected each --replacement once, got {' '.join(replacements) or 'none'}")
    if gain != "output" and not {"identity", "random"} & set(replacements):
        raise UserError(
            f"--gain is for the replacements identity and random, not {' '.join(replacements)}"
        )


def without_weights(flags: Sequence[str]) -> dict[str, str]:
    """Return why flags of removed weights have no effect, for `validate_effects`."""
    return dict.fromkeys(flags, "where no weight is removed")
