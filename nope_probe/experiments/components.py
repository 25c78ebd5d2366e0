"""The components that a user names, against those that the model has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nope_probe.errors import UserError
from nope_probe.hooks.names import COMPONENTS, Component


def validate_components(wanted: Collection[Component], has: Sequence[Component]) -> None:
    """Check that a model has some components.

    Raises:
        UserError: naming the first that it lacks, and those that it has.
    """
    lacking = [name for name in COMPONENTS if name in wanted and name not in has]
    if lacking:
        raise UserError(f"the model has no {lacking[0]}; it has {', '.join(has)}")
