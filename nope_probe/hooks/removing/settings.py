"""What to remove, and where: `Ablation`, and the replacements of removed weights.

A replacement has its name and its note here, and is made by a `Place`. Nothing here needs
torch, so that commands read their options, and pages their words, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nope_probe.errors import (
    UserError,
    as_tuple,
    is_of_numbers,
    kind_of,
    takes_arguments,
    validate_layer_numbers,
    validate_types,
)
from nope_probe.removal import IN_HEADS, PER_HEAD, Condition, Gain, spelled

if TYPE_CHECKING:
    from torch import Tensor

    # A weight, or what makes one from a weight and its `Place`.
    GivenReplacement: TypeAlias = Tensor | Callable[[Tensor, Any], Tensor]
else:
    GivenReplacement = object  # so that types which name it resolve without torch

Replacement = Literal["identity", "random", "mean", "zero"]
REPLACEMENTS: dict[Replacement, str] = {  # as a note to a page says what they are
    "identity": "an identity as strong as the weight, so that coordinates pass on as they are",
    "random": "a random projection as strong as the weight, which learned nothing",
    "mean": "the mean of its output, whatever it reads",
    "zero": "zero",
}
WITH_GAIN: tuple[Replacement, ...] = ("identity", "random")
CONSTANT_OUTPUTS: tuple[Replacement, ...] = ("mean", "zero")


@dataclass(frozen=True, kw_only=True, repr=False)
class Ablation:
    """Components to remove, and where.

    Attributes:
        remove: one component or several (`w_q` or `W_Q`), or a union of them (`mask+w_q`); the
            circuits `qk` and `ov`; `norms`, the learned weights of the norms before attention and
            MLP; bands of RoPE: `rope_high`, the pairs whose wavelength 2 pi / theta is below the
            length of the sequences, `rope_low`, the rest, and `rope[a:b]`, the pairs a to b - 1,
            the fastest first; or `position[L1H0]`, the position that a component writes into the
            residual stream: its mean output at each position, which `calibrate` measures, becomes
            its mean over positions (see `Writer`); or `content`: heads attend as in the mean over
            the texts that `calibrate` reads, at each query and key, whatever the text says; or
            `written`, the position that blocks write: what each block's attention and MLP add at a
            position, on average over texts, becomes its mean over positions, and the model stays
            causal. Its null, `written_null`, permutes the positions of each text before the means.
        layers: block numbers from 0; None for all. Blocks that do not attend lose their MLP alone.
        heads: per block, the query heads (from 0) that lose the components; other blocks and heads
            keep them. A key head that several query heads share stays for the others.
        replacement: what a removed projection becomes. `mean`: the mean of its output over tokens
            and positions, which `calibrate` measures; `zero`: 0; `identity`: c * P, where row r of
            P reads coordinate r % d_model (for W_O: its transpose); `random`: c * R, orthonormal
            rows (for W_O: columns) drawn per head from the seed. Or a weight that you give, without
            bias: a tensor [head, d_model, d_head] (for W_O: [head, d_head, d_model]), with the
            heads of the weight or one for each query head, for every removed weight in every layer;
            or a function of the weight and its `Place`, which returns such a tensor. A place has
            a `name`, the number `layer.index`, and a `generator` that depends on the seed.
        gain: c, the size of `identity` or `random`. `output`: such that the
            replacement's output has the RMS that the projection's has over the run's tokens in the
            intact model, which `calibrate` measures; `norm`: the projection's Frobenius norm over
            the root of its rows; `identity`: 1. None: `output`; a weight that you give stays as it
            is, and with `norm` takes the projection's norm.
        seed: of a drawn replacement, and of the `generator` of a function.
        prefix: how many first positions lose the mask among themselves, a bidirectional prefix;
            later queries keep theirs (causal, or a sliding window). None: the mask is off for all.
        kept_positions: how many first positions keep what blocks write, where `written` is removed:
            the first token keeps its mark by default.

    Raises:
        UserError: for a component, replacement or gain that does not exist, names that share a
            component, layers that are no numbers, heads of a component that has none, layers of a
            writer, a prefix without the mask, or a gain of a constant output.

    Example:
        >>> from nope_probe import Ablation
        >>> Ablation(remove=["mask", "w_q"], layers=[0, 1]).remove
        ['mask', 'w_q']
    """

    remove: Sequence[str] | str = ()
    layers: Sequence[int] | None = None
    heads: Mapping[int, Sequence[int]] | None = None
    replacement: Replacement | GivenReplacement = "mean"
    gain: Gain | None = None
    seed: int = 0
    prefix: int | None = None
    kept_positions: int = 1

    def __repr__(self) -> str:
        """Return what is removed, and each option that is not the default, as it is asked for."""
        values = {name: x for name, x in vars(self).items() if name in self.__dataclass_fields__}
        chosen = [
            f"{name}={kind_of(x) if hasattr(x, 'shape') else repr(x)}"
            for name, x in values.items()
            if name == "remove" or x is not self.__dataclass_fields__[name].default
        ]
        return f"Ablation({', '.join(chosen)})"

    def __post_init__(self) -> None:
        given = as_tuple(self.remove)
        unnamed = [name for name in given if not isinstance(name, str) or IN_HEADS in name]
        if unnamed:
            raise UserError(
                "expected the names of components to remove, and heads separately, got "
                f"{unnamed[0]!r:.60}"
            )
        object.__setattr__(self, "remove", [spelled(str(name)) for name in given])
        if self.layers is not None:
            validate_layer_numbers(self.layers)
        for name in ("seed", "prefix", "kept_positions"):
            number = vars(self)[name]
            if number is not None and not is_of_numbers([number]):
                raise UserError(f"{name} {number!r:.60}: expected a whole number")
        validate_types({"gain": Gain | None}, {"gain": self.gain})
        if isinstance(self.replacement, str):
            validate_types({"replacement": Replacement}, {"replacement": self.replacement})
            self._validate_gain()
        else:
            self._validate_given(self.replacement)
        writers = self.condition.writers
        if self.layers is not None and writers:
            raise UserError(f"{writers[0].removal} is of one place: it takes no layers")
        if self.layers is not None and self.condition.of_blocks:
            raise UserError(
                "written is the position of all blocks, since each is measured without the earlier "
                "ones': it takes no layers; position[ATTN1] or position[MLP1] is that of a part"
            )
        if self.heads is not None:
            self._validate_heads()
        if self.prefix is not None:
            self._validate_prefix(self.prefix)

    def _validate_gain(self) -> None:
        if self.gain not in (None, "output") and self.replacement not in WITH_GAIN:
            raise UserError(
                f"the gain {self.gain!r} has no effect on the replacement {self.replacement!r}: "
                f"take replacement={WITH_GAIN[0]!r}, or leave the gain out"
            )

    def _validate_given(self, replacement: object) -> None:
        if self.gain == "output":
            raise UserError(
                "the gain 'output' is measured for replacements by name; a weight that you give "
                "takes 'norm' or 'identity'"
            )
        if not callable(replacement) and not hasattr(replacement, "shape"):
            raise UserError(
                f"a replacement is {', '.join(REPLACEMENTS)}, a tensor, or a function of a weight "
                f"and its place, not {kind_of(replacement)}"
            )
        if callable(replacement) and not takes_arguments(replacement, 2):
            raise UserError(
                "a replacement is called with a weight and its place: write it as "
                "`lambda weight, place: ...`"
            )

    def _validate_heads(self) -> None:
        if not isinstance(self.heads, Mapping):
            raise UserError(
                f"expected heads by layer, such as {{0: [1, 3]}}, got {self.heads!r:.60}"
            )
        validate_layer_numbers([*self.heads])
        for layer, heads in self.heads.items():
            if not is_of_numbers(heads):
                raise UserError(
                    f"heads of L{layer}: expected their numbers, such as [1, 3], got {heads!r:.60}"
                )
        if self.layers is not None:
            raise UserError("expected layers or heads, not both: heads are named per layer")
        without = [name for name in self.condition.ordered if name.kind not in PER_HEAD]
        if without:
            raise UserError(f"{without[0]} has no heads; {', '.join(PER_HEAD)} have")

    def _validate_prefix(self, prefix: int) -> None:
        if prefix < 1:
            raise UserError(f"expected a prefix of 1 position or more, got {prefix}")
        if "mask" not in self.condition:
            removed = ", ".join(self.remove) or "nothing"
            raise UserError(f"a prefix is for removing the mask; this removes {removed}")

    @classmethod
    def of(cls, given: object) -> Ablation:
        """Return an ablation; the names of components are short for `Ablation(remove=...)`.

        Raises:
            UserError: for anything else.

        Example:
            >>> Ablation.of(["mask", "w_q"]).remove
            ['mask', 'w_q']
        """
        if isinstance(given, Ablation):
            return given
        if isinstance(given, Mapping) or not all(isinstance(x, str) for x in as_tuple(given)):
            raise UserError(
                "expected an Ablation, or the components to remove, such as ['mask', 'w_q'], got "
                f"{kind_of(given)}"
            )
        return cls(remove=[str(name) for name in as_tuple(given)])

    def without(self, names: Iterable[str]) -> Ablation:
        """Return the ablation of other components."""
        return replace(self, remove=Condition(names).ordered)

    def acts_on(self, layer: int, heads: Iterable[int]) -> bool:
        """Return whether heads of a layer are among those that lose what is removed."""
        if self.heads is not None:
            return {*heads} <= {*self.heads.get(layer, ())}
        return self.layers is None or layer in self.layers

    @cached_property
    def condition(self) -> Condition:
        """What is removed."""
        return Condition.parse(self.remove)

    @property
    def named(self) -> Condition:
        """What is removed, with the heads that lose it in each name."""
        return self.condition.in_heads(self.heads)

    @property
    def kind(self) -> Replacement | Literal["given"]:
        """The name of the replacement; `given` for a weight that the user gives."""
        return self.replacement if isinstance(self.replacement, str) else "given"

    @property
    def scaling(self) -> Gain:
        """The gain, by default `output`; a weight that the user gives stays as it is."""
        return self.gain or ("identity" if self.kind == "given" else "output")

    @property
    def needs_calibration(self) -> bool:
        """Whether gains, means or positions have to be measured first."""
        return self.needs_intact or bool(self.condition.of_written)

    @property
    def needs_intact(self) -> bool:
        """Whether the intact model has to be measured first."""
        of_weights = self.has_measured_gain or self.kind == "mean"
        return "content" in self.condition or (bool(self.condition.weights) and of_weights)

    @property
    def has_measured_gain(self) -> bool:
        """Whether replacements have the size of the weights' outputs."""
        return self.kind in WITH_GAIN and self.scaling == "output"

    @property
    def calibration_seed(self) -> int | None:
        """The seed to `calibrate` with; None where nothing is drawn."""
        return self.seed if self.kind == "random" else None
