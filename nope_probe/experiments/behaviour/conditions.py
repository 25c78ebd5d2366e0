"""The conditions whose behaviour is measured: what is removed in each."""

from __future__ import annotations

from collections.abc import Sequence

from nope_probe.analyses.conditions import condition
from nope_probe.analyses.shapley import INTACT, MASK, Condition
from nope_probe.errors import UserError
from nope_probe.experiments.components import validate_components
from nope_probe.hooks.names import POSITION_ENCODINGS, Component

INTACT_NAME = "intact"
DEFAULT = (
    *POSITION_ENCODINGS,
    "mask",
    "w_q",
    "w_k",
    "qk",
    "w_o",
    "ov",
    "mlp",
    *(f"mask+{name}" for name in POSITION_ENCODINGS),
)


def make_conditions(has: Sequence[Component], names: Sequence[str] | None) -> dict[str, Condition]:
    """Return the components that each condition removes, by its name; the intact model first.

    Args:
        has: the components that the model has.
        names: what to remove; by default each of `DEFAULT` that the model has.

    Raises:
        UserError: for a name that does not exist, or a component that the model lacks.
    """
    if names is None:
        ours = {name: condition(name) for name in DEFAULT}
        kept = {name: removed for name, removed in ours.items() if removed <= set(has)}
        return {INTACT_NAME: INTACT, **kept}
    found = {INTACT_NAME: INTACT}
    for name in names:
        if name != INTACT_NAME:
            found[name] = _condition(name)
            validate_components(found[name], has)
    return found


def _condition(name: str) -> Condition:
    try:
        return condition(name)
    except ValueError as error:
        raise UserError(f"--remove: {error}") from error


def sources_of(has: Sequence[Component]) -> Condition:
    """Return the mask and the position encoding of a model, the sources of positional patterns."""
    return MASK | {name for name in POSITION_ENCODINGS if name in has}
