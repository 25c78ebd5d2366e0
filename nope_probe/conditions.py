"""What one set of forward passes removes: conditions, writers, and the names of removals.

Nothing here needs torch, so that the command line checks names as hooks do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product

from nope_probe.components import (
    BAND,
    CIRCUITS,
    COMPONENTS,
    OF_LENGTH,
    ROPE_HALVES,
    Component,
    is_rope,
)
from nope_probe.errors import UserError

_NAME = re.compile(r"L([0-9]+)H([0-9]+)|(ATTN|MLP|BLOCK)([0-9]+)|embed|pos_embed|bias")
_OF_COMPONENT = {"HEAD": "w_o", "ATTN": "w_o", "MLP": "mlp", "pos_embed": "pos_embed"}


class Writer(str):
    """The name of a component that writes into the residual stream.

    Writers are heads (`L1H0`), a block's attention (`ATTN1`) or MLP (`MLP1`), a block that adds up
    otherwise (`BLOCK1`), token embeddings (`embed`), learned positions (`pos_embed`), and the
    constants that biases add (`bias`).

    Attributes:
        kind: `HEAD` for heads, else the name without a number.
        block: the number of its block; of embeddings, the first.
        head: the number of a head in its block; None for other writers.

    Raises:
        ValueError: for a name that stands for no writer.

    Example:
        >>> writer = Writer("L2H11")
        >>> writer.kind, writer.block, writer.head, writer.removal
        ('HEAD', 2, 11, 'position[L2H11]')
    """

    kind: str
    block: int
    head: int | None

    def __new__(cls, name: str) -> Writer:
        """Return the writer of a name."""
        named = _NAME.fullmatch(name)
        if named is None:
            raise ValueError(f"expected a writer, such as L1H0, MLP1 or embed, got {name!r}")
        writer = super().__new__(cls, name)
        block_of_head, head, kind, block = named.groups()
        writer.kind = kind or ("HEAD" if head else name)
        writer.block = int(block_of_head or block or 0)
        writer.head = int(head) if head else None
        return writer

    @classmethod
    def parse(cls, name: str) -> Writer | None:
        """Return the writer of a name; None for any other name, such as that of a layer.

        Example:
            >>> Writer.parse("MLP1"), Writer.parse("L1")
            ('MLP1', None)
        """
        return cls(name) if _NAME.fullmatch(name) else None

    @classmethod
    def removed_by(cls, name: str) -> Writer | None:
        """Return the writer whose position a removal takes away; None for any other removal.

        `position[L1H0]` is the mean output of head 0 in block 1 at each position, less its mean
        over positions.

        Example:
            >>> removed = map(Writer.removed_by, ("position[L1H0]", "position[mask]", "mlp"))
            >>> [*removed]
            ['L1H0', None, None]
        """
        named = re.fullmatch(r"position\[(.*)\]", name)
        writer = None if named is None else cls.parse(named[1])
        return None if writer == "bias" else writer

    @property
    def removal(self) -> str:
        """The name of the removal of its position."""
        return f"position[{self}]"

    @property
    def short(self) -> str:
        """The name within its block: `H0`, `MLP`."""
        return self.kind if self.head is None else f"H{self.head}"

    @property
    def whole(self) -> Writer:
        """The attention that a head is a part of; any other writer itself.

        Example:
            >>> Writer("L2H11").whole, Writer("MLP2").whole
            ('ATTN2', 'MLP2')
        """
        return self if self.head is None else Writer(f"ATTN{self.block}")

    @property
    def is_attention(self) -> bool:
        """Whether it is a head, or the attention of a block."""
        return self.kind in ("HEAD", "ATTN")

    @property
    def order(self) -> tuple[int, bool, int]:
        """The sort key of the order in which a model runs writers; constants come last.

        Example:
            >>> names = ["bias", "L1H0", "MLP0", "L0H10", "L0H2", "embed"]
            >>> sorted(map(Writer, names), key=lambda writer: writer.order)
            ['embed', 'L0H2', 'L0H10', 'MLP0', 'L1H0', 'bias']
        """
        blocks = {"embed": -1, "pos_embed": -1, "bias": 10**6}
        return blocks.get(self.kind, self.block), self.kind == "MLP", self.head or 0

    def runs_before(self, other: Writer) -> bool:
        """Return whether its output can change another's; heads of a block run side by side.

        Example:
            >>> [Writer(name).runs_before(Writer("L1H1")) for name in ("MLP0", "L1H0", "MLP1")]
            [True, False, False]
        """
        return self.order[:2] < other.order[:2]

    def shares_output(self, removed: str) -> bool:
        """Return whether a removal, of a component or a position, changes the same output.

        Example:
            >>> [Writer("L1H0").shares_output(name) for name in ("w_o", "mlp", "position[ATTN1]")]
            [True, False, True]
        """
        other = Writer.removed_by(removed)
        in_attention = other is not None and (other.kind, other.block) == ("ATTN", self.block)
        is_part = self.kind == "HEAD" and in_attention
        return is_part or _OF_COMPONENT.get(self.kind) == removed


class Condition(frozenset[str]):
    """What is removed in one set of forward passes; the intact model is the empty set.

    Members are components, `norms`, bands of RoPE and positions of writers, without circuits.

    Example:
        >>> Condition({"w_q", "mask"}).name, INTACT.name
        ('mask+w_q', 'intact')
    """

    @classmethod
    def of(cls, names: Iterable[str], bands: Iterable[str] = ROPE_HALVES) -> Condition:
        """Return the condition that removes some components; all bands of RoPE are `rope`.

        `position[pos_embed]` is dropped beside `pos_embed`, because removed embeddings write
        nothing. Plans and explorers make all their conditions here, so that a map is
        looked up under the name under which it was captured.

        Args:
            names: components and bands of RoPE.
            bands: bands of RoPE that together are all of RoPE.

        Example:
            >>> Condition.of(["rope_high", "mask"]).name
            'mask+rope_high'
            >>> Condition.of(["rope_low", "rope_high"]).name
            'rope'
            >>> Condition.of(["pos_embed", "position[pos_embed]"]).name
            'pos_embed'
        """
        removed, whole = frozenset(names), frozenset(bands)
        if "pos_embed" in removed:
            removed -= {"position[pos_embed]"}
        if "rope" in removed or (whole and whole <= removed):
            removed = frozenset(name for name in removed if not is_rope(name)) | {"rope"}
        return cls(removed)

    @classmethod
    def parse(cls, removed: str | Iterable[str]) -> Condition:
        """Return the condition that removes components, circuits (`qk`, `ov`) or unions.

        Args:
            removed: a name, or names; a union is several names joined by `+`.

        Raises:
            ValueError: for a name that does not exist, or two names that share a component.

        Example:
            >>> Condition.parse(["mask", "qk"]).name, Condition.parse("rope+mlp").name
            ('mask+w_q+w_k', 'rope+mlp')
        """
        names = [*map(spelled, [removed] if isinstance(removed, str) else removed)]
        parts = [part for name in names for part in name.split("+")]
        for part in parts:
            known = part in COMPONENTS or part in CIRCUITS or is_rope(part)
            if not (known or Writer.removed_by(part)):
                there = ", ".join([*COMPONENTS, *CIRCUITS, *ROPE_HALVES, "position[L1H0]"])
                raise ValueError(
                    f"unknown component {part!r}; there are {there}, and unions such as w_q+w_k"
                )
        for name in names:
            validate_disjoint(name.split("+"))
        validate_disjoint(names)
        return cls.of(expanded(parts))

    @property
    def ordered(self) -> list[str]:
        """The names in the order of components, bands of RoPE where RoPE is."""
        return sorted(self, key=removal_order)

    @property
    def name(self) -> str:
        """The names in order, joined by `+`; `intact` where nothing is removed."""
        return "+".join(self.ordered) or "intact"


INTACT = Condition()
MASK = Condition({"mask"})


def removal_order(name: str) -> tuple[int, str]:
    """Return the sort key of components, of bands of RoPE where RoPE is, and of `norms`, last."""
    component = next((c for c in ("rope", "position") if name.startswith(c)), name)
    return [*COMPONENTS, "norms", "position"].index(component), name


def spelled(name: str) -> str:
    """Return a component, circuit, band or union as it is spelled here; other names as they are.

    Example:
        >>> spelled("W_Q"), spelled("RoPE+MLP"), spelled("position[L1H0]")
        ('w_q', 'rope+mlp', 'position[L1H0]')
    """
    parts = [(part, part.lower()) for part in name.split("+")]
    known = (*COMPONENTS, *CIRCUITS, "norms")
    return "+".join(low if low in known or is_rope(low) else part for part, low in parts)


def expanded(names: Iterable[str]) -> tuple[str, ...]:
    """Return components, `norms`, bands of RoPE and positions, with circuits taken apart.

    Raises:
        ValueError: for a name that does not exist.

    Example:
        >>> expanded(["mask", "qk", "rope_high"])
        ('mask', 'w_q', 'w_k', 'rope_high')
    """
    components: list[str] = []
    for name in map(spelled, names):
        is_listed = name in (*COMPONENTS, *CIRCUITS, "norms")
        if not (is_listed or is_rope(name) or Writer.removed_by(name)):
            known = [*COMPONENTS, "norms", *CIRCUITS, *ROPE_HALVES, "rope[a:b]", "position[L1H0]"]
            raise ValueError(f"unknown component {name!r}; there are {', '.join(known)}")
        components += CIRCUITS.get(name, (name,))
    return tuple(dict.fromkeys(components))


def depends_on_length(name: str) -> bool:
    """Return whether a removal depends on a sequence's length, so that padding changes it.

    Example:
        >>> depends_on_length("rope_low"), depends_on_length("position[MLP0]")
        (True, True)
    """
    return name in OF_LENGTH or Writer.removed_by(name) is not None


def share_pairs(one: str, other: str) -> bool:
    """Return whether two names of RoPE or its bands can stand for the same rotary pairs.

    `rope_high` can share pairs with any `rope[a:b]`, since its pairs depend on the model and the
    sequences' length.

    Example:
        >>> share_pairs("rope[0:9]", "rope[7:16]"), share_pairs("rope[0:8]", "rope[8:16]")
        (True, False)
        >>> share_pairs("rope", "rope_high"), share_pairs("rope_high", "rope_low")
        (True, False)
    """
    if not (is_rope(one) and is_rope(other)) or {one, other} == {*ROPE_HALVES}:
        return False
    first, second = BAND.fullmatch(one), BAND.fullmatch(other)
    if first is None or second is None:
        return True
    return max(int(first[1]), int(second[1])) < min(int(first[2]), int(second[2]))


def validate_components(wanted: Collection[str], has: Sequence[Component]) -> None:
    """Check that a model has some components.

    Raises:
        UserError: naming a component that it lacks, and its own.
    """
    ordered = [name for name in Condition(wanted).ordered if not Writer.removed_by(name)]
    lacking = [name for name in ordered if ("rope" if is_rope(name) else name) not in has]
    if lacking:
        raise UserError(f"the model has no {lacking[0]}; it has {', '.join(has)}")


def validate_disjoint(names: Sequence[str]) -> None:
    """Check that no two components, circuits, bands of RoPE or unions remove the same thing.

    Raises:
        ValueError: naming two that do, and the shared part.

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
            if _share_output(first, second):
                raise ValueError(f"{one} and {other} share the output of a component")
            if share_pairs(first, second):
                is_certain = "rope" in (first, second) or not {first, second} & {*ROPE_HALVES}
                share = "share" if is_certain else "can share"
                raise ValueError(f"{one} and {other} {share} rotary pairs")


def _share_output(one: str, other: str) -> bool:
    pairs = ((Writer.removed_by(one), other), (Writer.removed_by(other), one))
    return any(writer is not None and writer.shares_output(name) for writer, name in pairs)
