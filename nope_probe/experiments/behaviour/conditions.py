"""The conditions whose behaviour is measured: what is removed in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from nope_probe.analyses.shapley import INTACT, MASK, Condition, condition, removal
from nope_probe.components import (
    POSITION_ENCODINGS,
    REPLACEMENTS,
    WEIGHTS,
    Component,
    Replacement,
    is_rope,
    kept_name,
    removal_order,
)
from nope_probe.errors import UserError
from nope_probe.experiments.removals import validate_components
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.protocols import HookedModel

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


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What a condition removes, and what stands for the weights among it.

    Attributes:
        components: what is removed.
        replacement: of removed weights; `identity` where no weight is removed.
        head: the layer and the head that lose them; None where all do.
    """

    components: Condition = INTACT
    replacement: Replacement = "identity"
    head: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.weights:
            object.__setattr__(self, "replacement", REPLACEMENTS[0])

    @property
    def weights(self) -> Condition:
        """The weights among the components."""
        return self.components & set(WEIGHTS)

    @property
    def mask(self) -> bool:
        """Whether the mask is removed."""
        return "mask" in self.components

    @property
    def remove(self) -> list[str]:
        """The components in order."""
        return sorted(self.components, key=removal_order)

    def without(self, more: Condition) -> Removal:
        """Return the removal of more components."""
        return Removal(components=removal(more | self.components), replacement=self.replacement)

    def is_source(self, sources: Condition) -> bool:
        """Return whether nothing but sources, or bands of RoPE, is removed."""
        return all(name in sources or is_rope(name) for name in self.components)

    @property
    def key(self) -> str:
        """A name that no other removal has."""
        return f"{kept_name(self.components)}-{self.replacement}"


def make_conditions(
    has: Sequence[Component],
    names: Sequence[str] | None,
    replacements: Sequence[Replacement] = ("identity",),
) -> dict[str, Removal]:
    """Return what each condition removes, by its name; the intact model first.

    With several replacements, a condition that removes weights is there once for each, under names
    such as `w_q:mean`.

    Args:
        has: the components that the model has.
        names: what to remove; by default each of `DEFAULT` that the model has.
        replacements: of removed weights.

    Raises:
        UserError: for a name that does not exist, or a component that the model lacks.
    """
    found = {INTACT_NAME: Removal()}
    for name, removed in _components(has, names).items():
        if removed and len(replacements) > 1 and removed & set(WEIGHTS):
            for each in replacements:
                found[f"{name}:{each}"] = Removal(components=removed, replacement=each)
        elif removed:
            found[name] = Removal(components=removed, replacement=replacements[0])
    return found


def _components(has: Sequence[Component], names: Sequence[str] | None) -> dict[str, Condition]:
    if names is None:
        ours = {name: condition(name) for name in DEFAULT}
        return {name: removed for name, removed in ours.items() if removed <= set(has)}
    found = {name: _condition(name) for name in names if name != INTACT_NAME}
    for removed in found.values():
        validate_components(removed, has)
    for (one, removed), (other, again) in combinations(found.items(), 2):
        if removed == again:
            raise UserError(f"--remove: {one} and {other} remove the same")
    return found


def _condition(name: str) -> Condition:
    try:
        return condition(name)
    except ValueError as error:
        raise UserError(f"--remove: {error}") from error


def head_conditions(
    model: HookedModel, n_layers: int, replacement: Replacement
) -> dict[str, Removal]:
    """Return the conditions that remove the W_Q of one head each, by names such as `L2H3`.

    Args:
        model: a HookedTransformer or TransformerBridge.
        n_layers: in how many first layers.
        replacement: of W_Q.
    """
    return {
        f"L{layer}H{head}": Removal(
            components=condition("w_q"), replacement=replacement, head=(layer, head)
        )
        for layer, block in enumerate(layers_of(model)[:n_layers])
        for head in range(block.n_heads)
    }


def sources_of(has: Sequence[Component]) -> Condition:
    """Return the mask and the position encoding of a model, the sources of positional patterns."""
    return MASK | {name for name in POSITION_ENCODINGS if name in has}
