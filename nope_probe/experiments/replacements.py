"""The checks of the flags --replacement and --gain, which `nope_probe.components` has."""

from __future__ import annotations

from nope_probe.components import validate_replacements, without_weights

__all__ = ["validate_replacements", "without_weights"]
