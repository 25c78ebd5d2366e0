"""Ablation: what to remove from a model, where, and what to put in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import get_type_hints

from nope_probe.errors import validate_choices
from nope_probe.hooks.names import (
    CIRCUITS,
    COMPONENTS,
    PER_HEAD,
    WEIGHTS,
    Gain,
    Projection,
    Replacement,
)
from nope_probe.hooks.rope_names import ROPE_HALVES, is_rope, share_pairs


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What to remove, and where.

    Attributes:
        remove: components; the circuits `qk` and `ov`; `norms`, the learned weights of the norms
            before attention and MLP; or bands of RoPE: `rope_high`, the pairs whose wavelength
            2 pi / theta is below the length of the sequences, `rope_low`, the rest, and
            `rope[a:b]`, the pairs a to b - 1, the fastest first.
        layers: block numbers from 0; None for all.
        heads: per block, the query heads (from 0) that lose the components; other blocks and heads
            keep them. A key head that several query heads share stays for the others.
        replacement: what stands for a removed projection. `identity`: c * P, where row r of P reads
            coordinate r % d_model (for W_O: its transpose); `random`: c * R, orthonormal rows (for
            W_O: columns) drawn per head from the seed; `mean`: the mean of its output over tokens
            and positions, which `calibrate` measures; `zero`: 0.
        gain: c, the size of the replacements `identity` and `random` (`mean` and `zero` have none).
            `output`: such that the replacement's output has the RMS that the projection's has over
            the run's tokens in the intact model, which `calibrate` measures; `norm`: the
            projection's Frobenius norm over the root of its rows; `identity`: 1.
        seed: of the replacement `random`.
        prefix: how many first positions lose the mask among themselves, a bidirectional prefix;
            later queries keep theirs (causal, or a sliding window). None: the mask is off for all.

    Raises:
        ValueError: for a component, replacement or gain that does not exist, names that share a
            component, layers that are no numbers, heads of a component that has none, or a prefix
            without the mask.

    Example:
        >>> from nope_probe import Ablation
        >>> Ablation(remove=["mask", "w_q"], layers=[0, 1], gain="norm").remove
        ['mask', 'w_q']
    """

    remove: Sequence[str] = ()
    layers: Sequence[int] | None = None
    heads: Mapping[int, Sequence[int]] | None = None
    replacement: Replacement = "identity"
    gain: Gain = "output"
    seed: int = 0
    prefix: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.remove, str):
            raise ValueError(
                f'expected a list of components, such as remove=["mask"], got {self.remove!r}'
            )
        names = expanded(self.remove)
        validate_disjoint(self.remove)
        for layer in self.layers if self.layers is not None else self.heads or ():
            if isinstance(layer, bool):
                raise ValueError(f"expected the numbers of layers, such as [0, 1], got {layer}")
        validate_choices(get_type_hints(type(self)), vars(self))
        if self.heads is not None:
            self._validate_heads(names)
        if self.prefix is not None:
            self._validate_prefix(self.prefix)

    def _validate_heads(self, names: Sequence[str]) -> None:
        if self.layers is not None:
            raise ValueError("expected layers or heads, not both: heads are named per layer")
        without = [name for name in names if name not in PER_HEAD and not is_rope(name)]
        if without:
            raise ValueError(f"{without[0]} has no heads; {', '.join(PER_HEAD)} have")

    def _validate_prefix(self, prefix: int) -> None:
        if prefix < 1:
            raise ValueError(f"expected a prefix of 1 position or more, got {prefix}")
        if "mask" not in self.components:
            removed = ", ".join(self.remove) or "nothing"
            raise ValueError(f"a prefix is for removing the mask; this removes {removed}")

    @property
    def components(self) -> tuple[str, ...]:
        """The components, `norms` and bands to remove, circuits taken apart."""
        return expanded(self.remove)

    @property
    def weights(self) -> tuple[Projection, ...]:
        """The projections among the components to remove."""
        return tuple(name for name in WEIGHTS if name in self.components)

    @property
    def needs_calibration(self) -> bool:
        """Whether gains or means have to be measured first."""
        if self.replacement in ("mean", "zero"):
            return self.replacement == "mean" and bool(self.weights)
        return self.gain == "output" and bool(self.weights)


def validate_disjoint(names: Sequence[str]) -> None:
    """Check that no two components, circuits, bands of RoPE or unions remove the same thing.

    Raises:
        ValueError: naming two that do, and what they share.

    Example:
        >>> validate_disjoint(["w_q+mlp", "qk"])
        Traceback (most recent call last):
        ValueError: w_q+mlp and qk share w_q
    """
    for one, other in combinations(names, 2):
        if one == other:
            raise ValueError(f"{one} is named twice")
        parts = product(expanded(one.split("+")), expanded(other.split("+")))
        for first, second in parts:
            if first == second:
                raise ValueError(f"{one} and {other} share {first}")
            if share_pairs(first, second):
                is_certain = "rope" in (first, second) or not {first, second} & {*ROPE_HALVES}
                share = "share" if is_certain else "can share"
                raise ValueError(f"{one} and {other} {share} rotary pairs")


def expanded(names: Iterable[str]) -> tuple[str, ...]:
    """Return components, `norms` and bands of RoPE, with circuits taken apart.

    Raises:
        ValueError: for a name that does not exist.

    Example:
        >>> expanded(["mask", "qk", "rope_high"])
        ('mask', 'w_q', 'w_k', 'rope_high')
    """
    found: list[str] = []
    for name in names:
        if (
            name not in COMPONENTS
            and name not in CIRCUITS
            and name != "norms"
            and not is_rope(name)
        ):
            known = ", ".join([*COMPONENTS, "norms", *CIRCUITS, *ROPE_HALVES, "rope[a:b]"])
            raise ValueError(f"unknown component {name!r}; there are {known}")
        found += CIRCUITS.get(name, (name,))
    return tuple(dict.fromkeys(found))
