"""The components that an ablation can remove: name, kind, words, colour and marker.

Nothing here needs torch, so that the command line, figures and pages read the same table as hooks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import Literal, get_args, get_type_hints

from nope_probe.errors import UserError, validate_choices

Component = Literal[
    "mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed", "alibi", "window", "sink"
]
COMPONENTS: tuple[Component, ...] = get_args(Component)
Projection = Literal["w_q", "w_k", "w_o", "w_v"]
WEIGHTS: tuple[Projection, ...] = get_args(Projection)
Replacement = Literal["identity", "random", "mean", "zero"]
REPLACEMENTS: tuple[Replacement, ...] = get_args(Replacement)
Gain = Literal["output", "norm", "identity"]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of a replacement of weights.

    Attributes:
        gain: a size; the gain `output` is measured.
        seed: a seed to draw it from.
        mean: the measured mean of the weight's output.
    """

    gain: bool = False
    seed: bool = False
    mean: bool = False


NEEDS: dict[Replacement, Needs] = {
    "identity": Needs(gain=True),
    "random": Needs(gain=True, seed=True),
    "mean": Needs(mean=True),
    "zero": Needs(),
}
WITH_GAIN = tuple(name for name in REPLACEMENTS if NEEDS[name].gain)
DEFAULT_REPLACEMENTS: tuple[Replacement, ...] = ("identity", "mean")
CIRCUITS: dict[str, tuple[Component, ...]] = {"qk": ("w_q", "w_k"), "ov": ("w_o", "w_v")}
INK = "#1b1f24"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A component, circuit or term of the pattern, as tables, sentences and figures name it.

    Attributes:
        label: in legends.
        phrase: in sentences; the label if empty.
        short: in unions, interactions and narrow columns; the label if empty.
        colour, marker: of its lines and points.
        breaks_symmetry: whether it is a source, which makes positions differ.
        per_head: whether it can be removed in some heads only.
        by_token: whether a removal at a token depends on that token alone, so that a cache of
            keys and values stays right.
    """

    label: str
    phrase: str = ""
    short: str = ""
    colour: str = INK
    marker: str = "circle"
    breaks_symmetry: bool = False
    per_head: bool = False
    by_token: bool = False


TABLE: dict[str, Entry] = {
    "all": Entry(label="whole pattern"),
    "position": Entry(label="positional part", phrase="the mask and position encoding"),
    "base": Entry(label="without the players", phrase="what no player brings"),
    "content": Entry(label="content", phrase="the content of the text", colour="#7a7a7a"),
    "mask": Entry(
        label="causal mask",
        phrase="the causal mask",
        short="mask",
        colour="#d55e00",
        marker="square",
        breaks_symmetry=True,
        per_head=True,
    ),
    "rope": Entry(
        label="RoPE", colour="#0070e3", marker="diamond", breaks_symmetry=True, per_head=True
    ),
    "pos_embed": Entry(
        label="learned positions",
        phrase="the learned position embeddings",
        colour="#538ff5",
        marker="diamond",
        breaks_symmetry=True,
    ),
    "alibi": Entry(
        label="ALiBi", colour="#4a78c8", marker="diamond", breaks_symmetry=True, per_head=True
    ),
    "window": Entry(
        label="sliding window",
        phrase="the sliding window",
        short="window",
        colour="#908448",
        marker="pentagon",
        breaks_symmetry=True,
        per_head=True,
    ),
    "sink": Entry(
        label="attention sink",
        phrase="the attention sinks",
        short="sink",
        colour="#5f6b2d",
        marker="x",
        per_head=True,
        by_token=True,
    ),
    "interaction": Entry(label="interaction", colour="#ab3e98", marker="cross"),
    "w_q": Entry(label="W_Q", colour="#1da2a5", marker="triangle-up", per_head=True, by_token=True),
    "w_k": Entry(label="W_K", colour="#18753a", marker="triangle-down", per_head=True),
    "w_o": Entry(label="W_O", colour="#999847", marker="star", per_head=True, by_token=True),
    "w_v": Entry(label="W_V", colour="#8952a0", marker="hexagon", per_head=True),
    "mlp": Entry(label="MLP", phrase="the MLPs", colour="#8a5969", marker="x", by_token=True),
    "norms": Entry(
        label="norm weights",
        phrase="the norms' weights",
        colour="#6a7a99",
        marker="pentagon",
        by_token=True,
    ),
    "qk": Entry(
        label="QK circuit",
        phrase="the query-key circuit (W_Q with W_K)",
        short="QK",
        colour="#3ba763",
        marker="triangle-up",
    ),
    "ov": Entry(
        label="OV circuit",
        phrase="the value-output circuit (W_V with W_O)",
        short="OV",
        colour="#a64b21",
        marker="star",
    ),
    "mean_term": Entry(
        label="mean term", phrase="the mean term", colour="#535dba", marker="square"
    ),
    "covariance_term": Entry(
        label="covariance term", phrase="the covariance term", colour="#8d6620"
    ),
    "rotation": Entry(
        label="rotation", phrase="RoPE's rotation alone", colour="#0070e3", marker="diamond"
    ),
    "written_key": Entry(
        label="written into keys",
        phrase="position written into keys",
        colour="#18753a",
        marker="triangle-down",
    ),
    "written_query": Entry(
        label="written into queries",
        short="into queries",
        phrase="position written into queries",
        colour="#1da2a5",
        marker="triangle-up",
    ),
    "written_both": Entry(
        label="written into both",
        short="into both",
        phrase="position written into queries and keys",
        colour="#8952a0",
        marker="hexagon",
    ),
    "intact": Entry(label="intact model", phrase="the intact model"),
}
SOURCES: tuple[Component, ...] = tuple(n for n in COMPONENTS if TABLE[n].breaks_symmetry)
POSITION_ENCODINGS: tuple[Component, ...] = ("rope", "pos_embed", "alibi")
PER_HEAD: tuple[Component, ...] = tuple(n for n in COMPONENTS if TABLE[n].per_head)
LOCAL = frozenset(name for name, entry in TABLE.items() if entry.by_token)
ROPE_HALVES = ("rope_high", "rope_low")
# Padding would change these removals: they depend on a sequence's length.
OF_LENGTH = frozenset((*ROPE_HALVES, "pos_embed"))
BAND = re.compile(r"rope\[([0-9]+):([0-9]+)\]")
# The writers whose output a component makes.
_OUTPUTS = {"mlp": r"MLP\d+", "w_o": r"L\d+H\d+|ATTN\d+", "pos_embed": "pos_embed"}
_WRITERS = {"embed": "the token embeddings", "pos_embed": "the learned embeddings"}
WRITER = re.compile(r"position\[(embed|pos_embed|L[0-9]+H[0-9]+|(?:ATTN|MLP|BLOCK)[0-9]+)\]")

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
Letter = Literal["a", "b", "c", "d", "e", "f", "g", "h", "i"]
LETTERS: tuple[Letter, ...] = get_args(Letter)
SCORE_STAGES: tuple[Letter, ...] = ("b", "i")
# The contents of each stage of the paper's Figure 3; primes mark the next layer.
STAGE_MEANINGS: dict[Letter, str] = {
    "a": "Y = LN(X)",
    "b": "QKᵀ/√d",
    "c": "AV",
    "d": "AVW_O",
    "e": "O = AVW_O + X",
    "f": "LN(O)",
    "g": "X′ = FFN(LN(O)) + O",
    "h": "Y′ = LN(X′)",
    "i": "Q′K′ᵀ/√d",
}


def words(name: str) -> str:
    """Return the label of a component, term or player; of a union or interaction, its parts'.

    Example:
        >>> words("mask"), words("mask+w_q"), words("mask_x_rope")
        ('causal mask', 'mask + W_Q', 'mask × RoPE')
    """
    for sign, between in (("_x_", " × "), ("+", " + ")):
        if sign in name:
            return between.join(short(part) for part in name.split(sign))
    writer = writer_of(name)
    if writer is not None:
        return f"position of {_WRITERS.get(writer, writer)}"
    return TABLE[name].label if name in TABLE else name


def short(name: str) -> str:
    """Return the short label of a component or term.

    Example:
        >>> short("mask"), short("written_both"), short("covariance")
        ('mask', 'into both', 'covariance')
    """
    return (TABLE[name].short if name in TABLE else "") or words(name)


def phrase(name: str) -> str:
    """Return a component, term or player as a sentence names it.

    Example:
        >>> phrase("mask"), phrase("w_q+mlp"), phrase("mask_x_rope")
        ('the causal mask', 'W_Q + MLP', 'mask and RoPE together')
        >>> phrase("position[L1H0]")
        'the position of L1H0'
    """
    if writer_of(name) is not None:
        return f"the {words(name)}"
    if "_x_" in name:
        *others, last = (short(part) for part in name.split("_x_"))
        return f"{', '.join(others)} and {last} together"
    return (TABLE[name].phrase if name in TABLE else "") or words(name)


def colour(name: str) -> str:
    """Return a component's colour, the same in every figure; unions and interactions share two."""
    return _drawn_as(name).colour


def symbol(name: str) -> str:
    """Return a component's marker, so that colour is never the only sign."""
    return _drawn_as(name).marker


def _drawn_as(name: str) -> Entry:
    *others, last = name.split("_x_")
    if others and last == "window":
        marker = "star" if len(others) > 1 else "x" if others == ["mask"] else "triangle-left"
        return replace(TABLE["interaction"], colour=TABLE["window"].colour, marker=marker)
    if others or "+" in name:
        return TABLE["interaction"]
    return TABLE.get(name, Entry(label=name))


def removal_order(name: str) -> tuple[int, str]:
    """Return the sort key of components, of bands of RoPE where RoPE is, and of `norms`, last."""
    component = next((c for c in ("rope", "position") if name.startswith(c)), name)
    return [*COMPONENTS, "norms", "position"].index(component), name


def kept_name(kept: Collection[str]) -> str:
    """Return the name of a condition: the components that it keeps, in order, or `none`.

    Example:
        >>> kept_name({"w_q", "mask"}), kept_name(())
        ('mask+w_q', 'none')
    """
    return "+".join(sorted(kept, key=removal_order)) or "none"


def is_rope(name: str) -> bool:
    """Return whether a name stands for RoPE or a band of its pairs.

    `rope` is all pairs; `rope_high` the pairs whose wavelength 2 pi / theta is below the length of
    the sequences, `rope_low` the rest; `rope[a:b]` the pairs a to b - 1, from 0, the fastest first.

    Example:
        >>> is_rope("rope"), is_rope("rope_low"), is_rope("rope[0:4]"), is_rope("mask")
        (True, True, True, False)
    """
    return name in ("rope", *ROPE_HALVES) or BAND.fullmatch(name) is not None


def are_sources(components: Iterable[str]) -> bool:
    """Return whether all components are sources or bands of RoPE.

    Example:
        >>> are_sources(["mask", "rope"]), are_sources(["mask", "w_q"])
        (True, False)
    """
    return all(name in SOURCES or is_rope(name) for name in components)


def writer_of(name: str) -> str | None:
    """Return the component whose position a name stands for; None for any other name.

    `position[L1H0]` is the mean output of head 0 in block 1 at each position, less its mean over
    positions. Writers are heads (`L1H0`), a block's attention (`ATTN1`) or MLP (`MLP1`), a block
    that adds up otherwise (`BLOCK1`), token embeddings (`embed`) and learned positions
    (`pos_embed`).

    Example:
        >>> writer_of("position[L1H0]"), writer_of("position[mask]"), writer_of("mlp")
        ('L1H0', None, None)
    """
    named = WRITER.fullmatch(name)
    return None if named is None else named[1]


def depends_on_length(name: str) -> bool:
    """Return whether a removal depends on a sequence's length, so that padding changes it.

    Example:
        >>> depends_on_length("rope_low"), depends_on_length("position[MLP0]")
        (True, True)
    """
    return name in OF_LENGTH or writer_of(name) is not None


def share_output(one: str, other: str) -> bool:
    """Return whether one name removes the position of the output that the other removes.

    Example:
        >>> share_output("position[MLP1]", "mlp"), share_output("position[MLP1]", "w_o")
        (True, False)
        >>> share_output("position[ATTN1]", "position[L1H0]")
        True
    """
    for name, holder in ((one, other), (other, one)):
        writer, attention = writer_of(name), re.fullmatch(r"position\[ATTN(\d+)\]", holder)
        pattern = rf"L{attention[1]}H\d+" if attention else _OUTPUTS.get(holder)
        if writer is not None and pattern is not None and re.fullmatch(pattern, writer):
            return True
    return False


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


def equal_bands(n_pairs: int, n_bands: int) -> tuple[str, ...]:
    """Return the names of bands that divide all pairs as equally as possible.

    Raises:
        ValueError: for more bands than pairs, or no band.

    Example:
        >>> equal_bands(8, 3)
        ('rope[0:2]', 'rope[2:5]', 'rope[5:8]')
    """
    if not 1 <= n_bands <= n_pairs:
        raise ValueError(f"expected from 1 to {n_pairs} bands for {n_pairs} pairs, got {n_bands}")
    ends = [n_pairs * band // n_bands for band in range(n_bands + 1)]
    return tuple(f"rope[{a}:{b}]" for a, b in pairwise(ends))


def with_bands(players: Sequence[str], bands: Sequence[str]) -> list[str]:
    """Return players with bands in place of RoPE.

    Example:
        >>> with_bands(["mask", "rope"], ["rope[0:2]", "rope[2:4]"])
        ['mask', 'rope[0:2]', 'rope[2:4]']
    """
    return [member for name in players for member in (bands if name == "rope" else [name])]


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Components to remove, and where.

    Attributes:
        remove: components; the circuits `qk` and `ov`; `norms`, the learned weights of the norms
            before attention and MLP; bands of RoPE: `rope_high`, the pairs whose wavelength
            2 pi / theta is below the length of the sequences, `rope_low`, the rest, and
            `rope[a:b]`, the pairs a to b - 1, the fastest first; or `position[L1H0]`, the position
            that a component writes into the residual stream: its mean output at each position,
            which `calibrate` measures, becomes its mean over positions. See `writer_of`.
        layers: block numbers from 0; None for all. Blocks that do not attend lose their MLP alone.
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
            component, layers that are no numbers, heads of a component that has none, layers of a
            writer, or a prefix without the mask.

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
        if self.layers is not None and self.writers:
            raise ValueError(f"position[{self.writers[0]}] is of one place: it takes no layers")
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
    def writers(self) -> tuple[str, ...]:
        """The components whose position is removed."""
        return tuple(w for name in self.components if (w := writer_of(name)) is not None)

    @property
    def needs_calibration(self) -> bool:
        """Whether gains, means or positions have to be measured first."""
        needs = NEEDS[self.replacement]
        of_weights = needs.mean or (needs.gain and self.gain == "output")
        return bool(self.writers) or (bool(self.weights) and of_weights)

    @property
    def calibration_seed(self) -> int | None:
        """The seed to `calibrate` with; None where nothing is drawn."""
        return self.seed if NEEDS[self.replacement].seed else None


@dataclass(frozen=True, kw_only=True)
class Substitute:
    """The replacement of removed weights: an `Ablation`'s options of the same names.

    Attributes:
        replacement: what a removed projection is replaced by.
        gain: the size of the replacements `identity` and `random`.
        seed: of the replacement `random`.
    """

    replacement: Replacement = "identity"
    gain: Gain = "output"
    seed: int = 0

    def without(self, names: Iterable[str], layers: Sequence[int] | None = None) -> Ablation:
        """Return the ablation that removes components, in some layers or in all."""
        return Ablation(remove=sorted(names, key=removal_order), layers=layers, **vars(self))


def weights_of(name: str) -> list[Projection]:
    """Return the projections of a component, circuit or union.

    Example:
        >>> weights_of("qk"), weights_of("mlp+w_o"), weights_of("mask")
        (['w_q', 'w_k'], ['w_o'], [])
    """
    components = expanded(name.split("+"))
    return [weight for weight in WEIGHTS if weight in components]


_STAND_INS: dict[Replacement, tuple[str, str]] = {
    "identity": ("an identity", "identities"),
    "random": ("a random projection", "random projections"),
    "zero": ("a zero", "zeros"),
}
_OUTPUTS_OF = {"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "output"}


def stand_in(name: str, replacement: Replacement) -> str:
    """Return the stand-in for a player's removed weights, as sentences say it after "with".

    Args:
        name: a weight, a circuit, or a union that holds one.
        replacement: what the weights are replaced by.

    Example:
        >>> stand_in("w_q", "identity"), stand_in("w_q", "mean")
        ('an identity in its place', 'its mean query kept')
        >>> stand_in("qk", "mean"), stand_in("w_q+mlp", "identity")
        ('their mean query and key kept', 'an identity in place of W_Q')
    """
    weights = weights_of(name)
    several, alone = len(weights) > 1, len(weights) == len(expanded(name.split("+")))
    owner = ("their" if several else "its") if alone else "the"
    labels = " and ".join(words(weight) for weight in weights)
    if replacement == "mean":
        outputs = " and ".join(_OUTPUTS_OF[weight] for weight in weights)
        return f"{owner} mean {outputs}{'' if alone else f' of {labels}'} kept"
    place = f"in {owner} place" if alone else f"in place of {labels}"
    return f"{_STAND_INS[replacement][several]} {place}"


def validate_replacements(replacements: Sequence[Replacement], gain: Gain) -> None:
    """Check that there are replacements, all different, and that the gain has an effect.

    Raises:
        UserError: for no replacement, a repeated one, or a gain without effect.
    """
    if not replacements or len(set(replacements)) < len(replacements):
        raise UserError(f"expected each --replacement once, got {' '.join(replacements) or 'none'}")
    if gain != "output" and not {*WITH_GAIN} & {*replacements}:
        raise UserError(
            f"--gain is for the replacements {' and '.join(WITH_GAIN)}, not "
            f"{' '.join(replacements)}"
        )


def validate_components(wanted: Collection[str], has: Sequence[Component]) -> None:
    """Check that a model has some components.

    Raises:
        UserError: naming a component that it lacks, and its own.
    """
    ordered = [name for name in sorted(wanted, key=removal_order) if not writer_of(name)]
    lacking = [name for name in ordered if ("rope" if is_rope(name) else name) not in has]
    if lacking:
        raise UserError(f"the model has no {lacking[0]}; it has {', '.join(has)}")


def without_weights(flags: Sequence[str]) -> dict[str, str]:
    """Return by flag, for `validate_effects`, the reason that no weight is removed."""
    return dict.fromkeys(flags, "where no weight is removed")


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
            if share_output(first, second):
                raise ValueError(f"{one} and {other} share the output of a component")
            if share_pairs(first, second):
                is_certain = "rope" in (first, second) or not {first, second} & {*ROPE_HALVES}
                share = "share" if is_certain else "can share"
                raise ValueError(f"{one} and {other} {share} rotary pairs")


def expanded(names: Iterable[str]) -> tuple[str, ...]:
    """Return components, `norms`, bands of RoPE and positions, with circuits taken apart.

    Raises:
        ValueError: for a name that does not exist.

    Example:
        >>> expanded(["mask", "qk", "rope_high"])
        ('mask', 'w_q', 'w_k', 'rope_high')
    """
    components: list[str] = []
    for name in names:
        is_listed = name in (*COMPONENTS, *CIRCUITS, "norms")
        if not (is_listed or is_rope(name) or writer_of(name)):
            known = [*COMPONENTS, "norms", *CIRCUITS, *ROPE_HALVES, "rope[a:b]", "position[L1H0]"]
            raise ValueError(f"unknown component {name!r}; there are {', '.join(known)}")
        components += CIRCUITS.get(name, (name,))
    return tuple(dict.fromkeys(components))
