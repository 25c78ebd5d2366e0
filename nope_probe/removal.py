"""What can be removed from a model: names and words, their parsing, and a condition's one name.

A component has a row in `REMOVABLE`, and a class in `hooks/removing` that removes it. Nothing here
needs torch, so that the command line, figures and pages read the same rows as hooks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Literal, get_args

from nope_probe.errors import UserError

Projection = Literal["w_q", "w_k", "w_o", "w_v"]
WEIGHTS: tuple[Projection, ...] = get_args(Projection)
Gain = Literal["output", "norm", "identity"]
NO_REPLACEMENT = "none"  # in tables, where no weight is removed
INK = "#1b1f24"
OTHERS = "other writers"  # those that a table has in one row
INTERACTION, UNION, IN_HEADS = "_x_", "+", "@"  # mask_x_rope, mask+w_q, w_q@L1H0,L1H2
_WRITER = re.compile(r"L([0-9]+)H([0-9]+)|(ATTN|MLP|BLOCK)([0-9]+)|embed|pos_embed|bias")
_OF_COMPONENT = {"HEAD": "w_o", "ATTN": "w_o", "MLP": "mlp", "pos_embed": "pos_embed"}


@dataclass(frozen=True)
class Words:
    """How sentences name a component, circuit or term of the pattern, and how figures draw it.

    Attributes:
        label: in legends.
        colour, marker: of its lines and points.
        phrase: in sentences; the label if empty.
        short: in unions, interactions and narrow columns; the label if empty.
    """

    label: str
    colour: str = INK
    marker: str = "circle"
    phrase: str = ""
    short: str = ""


REMOVABLE: dict[str, Words] = {
    "mask": Words("causal mask", "#d55e00", "square", "the causal mask", "mask"),
    "rope": Words("RoPE", "#0070e3", "diamond"),
    "w_q": Words("W_Q", "#079ae3", "triangle-up"),
    "w_k": Words("W_K", "#d272b3", "triangle-down"),
    "w_o": Words("W_O", "#6c6446", "star"),
    "w_v": Words("W_V", "#8952a0", "hexagon"),
    "mlp": Words("MLP", "#8a5969", "x", "the MLPs"),
    "pos_embed": Words(
        "learned positions", "#538ff5", "diamond", "the learned position embeddings"
    ),
    "alibi": Words("ALiBi", "#4a78c8", "diamond"),
    "window": Words("sliding window", "#908448", "pentagon", "the sliding window", "window"),
    "sink": Words("attention sink", "#5f6b2d", "x", "the attention sinks", "sink"),
    "norms": Words("norm weights", "#6a7a99", "pentagon", "the norms' weights"),
    "content": Words("content", "#a0617a", "hexagon", "the content of attention"),
    "written": Words("written position", "#a86f3c", "bowtie"),
    "position": Words("position"),
}
# Which of them make positions differ; of these, a mask and a window hide keys, others encode.
_SOURCES, _HIDING = ("mask", "rope", "pos_embed", "alibi", "window"), ("mask", "window")
# Which can be removed in some heads alone.
PER_HEAD = ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "alibi", "window", "sink", "content")
# A removal at a token depends on that token alone: a cache of keys and values stays right.
BY_TOKEN = ("w_q", "w_o", "mlp", "sink", "norms")
# A removal depends on a sequence's length, so that padding changes it.
_OF_LENGTH = ("pos_embed", "content", "written", "position")
CIRCUITS: dict[str, tuple[Projection, ...]] = {"qk": ("w_q", "w_k"), "ov": ("w_o", "w_v")}


def spelled(name: str) -> str:
    """Return a component, circuit, band or union as it is spelled here.

    Example:
        >>> spelled("W_Q"), spelled("RoPE+MLP"), spelled("position[L1H0]")
        ('w_q', 'rope+mlp', 'position[L1H0]')
    """
    kinds = r"(?<![^+])(?!position\[)[^+@]+"  # of each part, without the heads
    return re.sub(kinds, lambda kind: kind[0].lower(), name)


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
        UserError: for a name that is no writer's.

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
        named = _WRITER.fullmatch(name)
        if named is None:
            raise UserError(f"expected a writer, such as L1H0, MLP1 or embed, got {name!r}")
        writer = super().__new__(cls, name)
        block_of_head, head, kind, block = named.groups()
        writer.kind = kind or ("HEAD" if head else name)
        writer.block = int(block_of_head or block or 0)
        writer.head = int(head) if head else None
        return writer

    @classmethod
    def parse(cls, name: str) -> Writer | None:
        """Return the writer of a name; None for any other name, such as that of a layer."""
        return cls(name) if _WRITER.fullmatch(name) else None

    @property
    def removal(self) -> Component:
        """The removal of its position."""
        return Component(f"position[{self}]")

    @property
    def whole(self) -> Writer:
        """The attention that a head is a part of; any other writer itself.

        Example:
            >>> Writer("L2H11").whole, Writer("MLP2").whole
            ('ATTN2', 'MLP2')
        """
        return self if self.head is None else Writer(f"ATTN{self.block}")

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
        """Return whether its output can change another's; heads of a block run side by side."""
        return self.order[:2] < other.order[:2]

    def shares_output(self, removed: Component) -> bool:
        """Return whether a removal, of a component or a position, changes the same output."""
        return removed.writer == self.whole or _OF_COMPONENT.get(self.kind) == removed


def writer_of(name: str) -> Writer | None:
    """Return the writer whose position a removal takes away; None for any other name.

    Example:
        >>> [*map(writer_of, ("position[L1H0]", "position[mask]", "mlp"))]
        ['L1H0', None, None]
    """
    named = re.fullmatch(r"position\[(.*)\]", name)
    writer = None if named is None else Writer.parse(named[1])
    return None if writer == "bias" else writer


class Component(str):
    """The name of a component of a model that can be removed.

    Names are those of `REMOVABLE`, in any case; `rope_high`, the rotary pairs whose wavelength
    2 pi / theta is below the length of the sequences, and `rope_low`, the other pairs; `rope[a:b]`,
    the pairs a to b - 1, the fastest first; and `position[L1H0]`, the mean output of a writer at
    each position, less its mean over positions. `w_q@L1H0,L1H2` is lost in these heads alone.

    Attributes:
        kind: its name in `REMOVABLE`; of a band `rope`, of a position `position`.
        pairs: the first rotary pair of a band `rope[a:b]` and the pair after its last; None for
            others.
        writer: the component whose position is removed, if any.

    Raises:
        UserError: for a name that does not exist.

    Example:
        >>> Component("W_Q"), Component("rope[0:4]").pairs, Component("position[L1H0]").writer
        ('w_q', (0, 4), 'L1H0')
    """

    kind: str
    pairs: tuple[int, int] | None
    writer: Writer | None

    def __new__(cls, name: str) -> Component:
        """Return the component of a name."""
        if isinstance(name, Component):
            return name
        writer, removed = writer_of(name), spelled(name).partition(IN_HEADS)[0]
        band = re.fullmatch(r"rope(?:_high|_low|\[([0-9]+):([0-9]+)\])", removed)
        kind = "rope" if band else "position" if writer else removed
        kind = "written" if kind == WRITTEN_NULL else kind
        if kind not in REMOVABLE or (kind == "position" and writer is None):
            kinds = [kind for kind in REMOVABLE if kind != "position"]
            known = ", ".join([*kinds, *CIRCUITS, *ROPE_HALVES, "rope[a:b]"])
            raise UserError(
                f"unknown component {name!r}; there are {known}, position[L1H0], and unions such "
                "as w_q+w_k (spaces separate components, a union has none)"
            )
        component = super().__new__(cls, spelled(name))
        component.kind, component.writer = kind, writer
        component.pairs = (int(band[1]), int(band[2])) if band and band[1] else None
        return component

    @property
    def is_band(self) -> bool:
        """Whether it is a band of RoPE's pairs, and not all of them."""
        return self.kind == "rope" and self != "rope"

    @property
    def of_length(self) -> bool:
        """Whether its removal depends on a sequence's length, so that padding changes it."""
        return self.kind in _OF_LENGTH or self in ROPE_HALVES

    @property
    def order(self) -> tuple[int, str]:
        """The sort key of components, of bands of RoPE where RoPE is, and of positions, last."""
        return [*REMOVABLE].index(self.kind), self

    def shares(self, other: Component) -> str:
        """Return what two components share, as the end of a sentence; empty if nothing.

        `rope_high` can share pairs with any `rope[a:b]`, since its pairs depend on the model and
        the sequences' length.

        Example:
            >>> Component("rope[0:9]").shares(Component("rope[7:16]"))
            'share rotary pairs'
            >>> Component("rope_high").shares(Component("rope_low"))
            ''
            >>> Component("mlp").shares(Component("position[MLP1]"))
            'share the output of a component'
        """
        if self == other:
            return f"share {self}"
        writers = ((self.writer, other), (other.writer, self))
        if any(writer is not None and writer.shares_output(name) for writer, name in writers):
            return "share the output of a component"
        if "written" in (self.kind, other.kind) and {self.kind, other.kind} <= _OF_WRITTEN:
            return "share the position that blocks write"
        halves = {self, other} & {*ROPE_HALVES}
        if self.kind != "rope" or other.kind != "rope" or len(halves) == 2:
            return ""
        if halves and "rope" not in (self, other):
            return "can share rotary pairs"
        (a, b), (c, d) = (component.pairs or (0, float("inf")) for component in (self, other))
        return "share rotary pairs" if max(a, c) < min(b, d) else ""


WRITTEN_NULL = "written_null"  # the same texts with their positions permuted: noise, no position
_OF_WRITTEN = {"written", "position"}
ROPE_HALVES = ("rope_high", "rope_low")
COMPONENTS: tuple[Component, ...] = tuple(
    Component(name) for name in REMOVABLE if name not in ("norms", "content", "written", "position")
)
SOURCES: tuple[Component, ...] = tuple(map(Component, _SOURCES))
POSITION_ENCODINGS: tuple[Component, ...] = tuple(x for x in SOURCES if x not in _HIDING)


class Condition(frozenset[Component]):
    """What is removed in one set of forward passes; the intact model is the empty set.

    Members are components, `norms`, bands of RoPE and positions of writers. Circuits are their
    weights, `rope` with its bands or both of its halves is `rope`, and removed embeddings write no
    position, so that a condition has one name everywhere.

    Example:
        >>> Condition({"w_q", "mask"}).name, Condition().name
        ('mask+w_q', 'intact')
        >>> Condition(["rope_low", "rope_high"]).name
        'rope'
    """

    def __new__(cls, names: Iterable[str] = ()) -> Condition:
        """Return the condition that removes some components."""
        removed = set(map(Component, names))
        if "pos_embed" in removed:
            removed.discard(Component("position[pos_embed]"))
        if "rope" in removed or removed.issuperset(ROPE_HALVES):
            removed = {name for name in removed if not name.is_band} | {Component("rope")}
        return super().__new__(cls, removed)

    @classmethod
    def parse(cls, removed: str | Iterable[str]) -> Condition:
        """Return the condition of a name or names: components, circuits, unions joined by `+`.

        Raises:
            UserError: for a name that does not exist, or two names that share a component.

        Example:
            >>> Condition.parse(["mask", "qk"]).name, Condition.parse("rope+mlp").name
            ('mask+w_q+w_k', 'rope+mlp')
        """
        if removed == INTACT.name:
            return INTACT
        names = [removed] if isinstance(removed, str) else [*removed]
        parts = [part for name in names for part in _members(name)]
        for name in names:
            validate_disjoint(name.split(UNION))
        validate_disjoint(names)
        return cls(parts)

    @property
    def ordered(self) -> list[Component]:
        """The components in their order, bands of RoPE where RoPE is."""
        return sorted(self, key=lambda name: name.order)

    @cached_property
    def name(self) -> str:
        """The names in order, joined by `+`; `intact` where nothing is removed."""
        return UNION.join(self.ordered) or "intact"

    @property
    def weights(self) -> tuple[Projection, ...]:
        """The weights that are removed."""
        return tuple(name for name in WEIGHTS if name in self)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The components whose position is removed."""
        return tuple(name.writer for name in self.ordered if name.writer is not None)

    @property
    def writes_as_intact(self) -> bool:
        """Whether positions of writers alone are removed, of which none reads another's output."""
        pairs = product(self.writers, repeat=2)
        return len(self.writers) == len(self) and not any(a.runs_before(b) for a, b in pairs)

    @property
    def null(self) -> Condition:
        """The condition with the null of written position in its place; else the same.

        Example:
            >>> Condition.parse("rope+written").null.name
            'rope+written_null'
        """
        return Condition(WRITTEN_NULL if name == "written" else name for name in self)

    def in_heads(self, heads: Mapping[int, Sequence[int]] | None) -> Condition:
        """Return the condition of heads that lose the components; the same for all heads.

        Example:
            >>> Condition.parse("w_q+w_k").in_heads({2: [0, 1]}).name
            'w_q@L2H0,L2H1+w_k@L2H0,L2H1'
        """
        if heads is None:
            return self
        named = ",".join(
            f"L{layer}H{head}" for layer in sorted(heads) for head in sorted({*heads[layer]})
        )
        return Condition(f"{name}{IN_HEADS}{named}" for name in self)

    @property
    def of_written(self) -> tuple[Component, ...]:
        """The removals of written position: of all blocks, of its null, or of single writers."""
        return tuple(name for name in self.ordered if name.kind in _OF_WRITTEN)

    @property
    def of_blocks(self) -> tuple[Component, ...]:
        """The removal of the position that all blocks write, or its null."""
        return tuple(name for name in self.ordered if name.kind == "written")

    @property
    def are_sources(self) -> bool:
        """Whether all components are sources or bands of RoPE.

        Example:
            >>> Condition(["mask", "rope"]).are_sources, Condition(["mask", "w_q"]).are_sources
            (True, False)
        """
        return all(name.kind in _SOURCES for name in self)


INTACT = Condition()
MASK = Condition({"mask"})
WRITTEN = Condition({"written"})


def _members(name: str) -> list[Component]:
    """Return the components of a component, circuit or union."""
    parts = (spelled(part) for part in name.split(UNION))
    named = (CIRCUITS.get(part, (part,)) for part in parts)
    return [Component(part) for members in named for part in members]


def validate_disjoint(names: Sequence[str]) -> None:
    """Check that no two components, circuits, bands of RoPE or unions remove the same thing.

    Raises:
        UserError: naming two that do, and the shared part.

    Example:
        >>> validate_disjoint(["w_q+mlp", "qk"])
        Traceback (most recent call last):
        nope_probe.errors.UserError: w_q+mlp and qk share w_q
    """
    for one, other in combinations(map(spelled, names), 2):
        if one == other:
            raise UserError(f"{one} is named twice")
        for first, second in product(_members(one), _members(other)):
            if shared := first.shares(second):
                raise UserError(f"{one} and {other} {shared}")


def validate_components(wanted: Condition, has: Collection[str]) -> None:
    """Check that a model has some components.

    Raises:
        UserError: naming a component that it lacks, and those that it has.
    """
    lacking = [name for name in wanted.ordered if name.kind in {*COMPONENTS} - {*has}]
    if lacking:
        raise UserError(f"the model has no {lacking[0]}; it has {', '.join(has)}")
