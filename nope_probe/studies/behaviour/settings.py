"""The measures of a model's behaviour, their conditions, and the command's settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import tyro

from nope_probe.errors import UserError
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.models.names import CHECKPOINTS, trained_length
from nope_probe.removal import (
    COMPONENTS,
    INTACT,
    POSITION_ENCODINGS,
    spelled,
)
from nope_probe.run.flags import COUNT, LARGEST, LAYERS, SEQ_LEN, Bounds, validate_effects
from nope_probe.run.settings import LAYERS_ARG
from nope_probe.studies.removing import NAMES, RemovingSettings, parse_removed

_arg = tyro.conf.arg
Measure = Literal["loss", "in-context", "copy", "order", "bos", "extrapolation", "position"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
# How many tokens a window needs: a segment of 8 twice, two tenths of 2 tokens, ...
SHORTEST: dict[Measure, int] = {
    "loss": 8,
    "in-context": 20,
    "copy": 17,
    "order": 16,
    "bos": 8,
    "extrapolation": 8,
    "position": 8,
}
EXTRAPOLATED = Bounds(16, 2**20)
TIMES = 4  # the reach of extrapolation, in trained contexts
_UNIONS = tuple(f"mask+{name}" for name in POSITION_ENCODINGS)
GROUPS = {  # the names of groups of removals; those that the model has are measured
    "sources": (*POSITION_ENCODINGS, "mask", *_UNIONS),
    "weights": ("w_q", "w_k", "qk", "w_o", "ov", "mlp"),
}
REMOVED = (*POSITION_ENCODINGS, "mask", *GROUPS["weights"], *_UNIONS)  # in the tables' order
IN_SIGHT = "without the mask the next token is in sight: only the suffix is scored"
FIRST_IN_SIGHT = "without the mask the first copy is in sight: see the second copy's loss"


@dataclass(frozen=True)
class Quantity:
    """A number of `behaviour.csv`.

    Attributes:
        measure: the measure that it belongs to.
        label: in tables and figures.
        caption: its meaning, in one sentence.
        unit: nats or positions.
        probe: the sequences whose losses it is read from, next to the text windows.
        unmasked: why it means nothing without the mask; empty if it does.
        direction: how a larger or smaller number reads, on the axes of figures.
    """

    measure: Measure
    label: str
    caption: str
    unit: str = "nats"
    probe: str = "text"
    unmasked: str = ""
    direction: str = "higher is worse"


QUANTITIES: dict[str, Quantity] = {
    "loss": Quantity("loss", "loss", "mean loss per token of the text.", unmasked=IN_SIGHT),
    "loss_suffix": Quantity(
        "loss",
        "suffix loss",
        "mean loss of the tokens after the prefix (bidirectional without the mask).",
    ),
    "in_context": Quantity(
        "in-context",
        "in-context gain",
        "loss early in the window (its second tenth) less loss late (its last tenth).",
        unmasked=IN_SIGHT,
        direction="lower is worse",
    ),
    "copy_text": Quantity(
        "copy",
        "copy, text",
        "a text segment twice: loss of the second copy less the first; below 0, it copies.",
        probe="copy_text",
        unmasked=FIRST_IN_SIGHT,
    ),
    "copy_text_second": Quantity(
        "copy", "second copy, text", "loss of the second copy of a text segment.", probe="copy_text"
    ),
    "copy_random": Quantity(
        "copy",
        "copy, random",
        "random tokens twice: loss of the second copy less the first; below 0, it copies.",
        probe="copy_random",
        unmasked=FIRST_IN_SIGHT,
    ),
    "copy_random_second": Quantity(
        "copy",
        "second copy, random",
        "loss of the second copy of random tokens.",
        probe="copy_random",
    ),
    "order": Quantity(
        "order",
        "order",
        "rise of the suffix's loss when the tokens of the prefix are shuffled.",
        probe="order",
        direction="lower: needs it less",
    ),
    "without_bos": Quantity(
        "bos",
        "without BOS",
        "rise of the loss when the BOS token is left out.",
        probe="without_bos",
        direction="lower: needs it less",
    ),
    "other_first": Quantity(
        "bos",
        "another first token",
        "rise of the loss when a random token takes the place of BOS.",
        probe="other_first",
        direction="lower: needs it less",
    ),
    "extrapolation": Quantity(
        "extrapolation",
        "extrapolation",
        "loss beyond the trained context less loss in its last quarter.",
        probe="long",
    ),
    "position": Quantity(
        "position",
        "position error",
        "how far the index that a ridge regression reads from the residual stream is off, mean "
        "over layers and held-out documents.",
        unit="positions",
    ),
}


def make_conditions(
    has: Sequence[str],
    names: Sequence[str],
    ablations: Sequence[Ablation],
    left_out: Collection[str] = (),
) -> dict[str, Ablation]:
    """Return the conditions' removals by name; the intact model first.

    With several replacements, a condition that removes weights has an entry for each, with a name
    such as `w_q:mean`.

    Args:
        has: the components that the model has.
        names: what to remove; the name of a group means its removals that the model has.
        ablations: replacements of weights.
        left_out: components that are removed only where they are named, not with a group.

    Raises:
        UserError: for a name that does not exist, or a condition that is named twice.
    """
    grouped = {name for group in GROUPS if group in names for name in GROUPS[group]}
    of_groups = [parse_removed(name) for name in REMOVED if name in grouped]
    named = [parse_removed(name) for name in names if name not in (INTACT.name, *GROUPS)]
    if len({*named}) < len(named):
        raise UserError(f"--remove names something twice: {' '.join(names)}")
    removable = {*has} - {*left_out}
    removed = dict.fromkeys([*(c for c in of_groups if c <= removable), *named])
    conditions = {INTACT.name: ablations[0]}
    for condition in removed:
        without = [ablation.without(condition) for ablation in ablations]
        if len(without) > 1 and condition.weights:
            conditions |= {f"{condition.name}:{by.replacement}": by for by in without}
        else:
            conditions[condition.name] = without[0]
    return conditions


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Find what a model can no longer do without its mask, RoPE or weights.

    Runs the model with and without them, and reports losses by position, what context, order, BOS
    and copies are worth, how it extrapolates and whether position can be read from its residual
    stream: in nats or positions, with the difference to the intact model and intervals.

    Attributes:
        measures: What to measure.
        prefix: Without the mask, this many first tokens see each other, and only those after them
            are scored [half of --seq-len].
        replacement: What a removed weight becomes; several are measured side by side.
        trained_len: Tokens that the model was trained at [as recorded, else its context]; it is
            extrapolated to 4 times as many.
        max_len: Most tokens in a window of the extrapolation.
        layers: In which layers to read position, as in `ablate`; all layers are run.
    """

    measures: tuple[Measure, ...] = MEASURES
    remove: Annotated[
        tuple[str, ...] | None,
        _arg(
            help=f"The conditions: {NAMES}; or a group, if the model has it: "
            "`sources` (rope mask mask+rope), `weights` (w_q w_k qk w_o ov mlp). By default "
            "`sources`, and `weights` too for a shipped model."
        ),
    ] = None
    prefix: Annotated[int | None, Bounds(4, LARGEST)] = None
    replacement: tuple[Replacement, ...] = ("identity",)  # type: ignore[assignment]
    trained_len: Annotated[int | None, EXTRAPOLATED] = None
    max_len: Annotated[int, EXTRAPOLATED] = 4096
    layers: Annotated[int | str, LAYERS, LAYERS_ARG] = "all"
    n_seqs: Annotated[int, COUNT] = 128
    seq_len: Annotated[int, SEQ_LEN] = 128

    @property
    def prefix_len(self) -> int:
        """How many first tokens see each other where the mask is removed."""
        return self.seq_len // 2 if self.prefix is None else self.prefix

    @property
    def removals(self) -> tuple[str, ...]:
        """The names of what is removed, groups too."""
        if self.remove is not None:
            return tuple(map(spelled, self.remove))
        return tuple(GROUPS) if self.model.lower() in CHECKPOINTS else ("sources",)

    @property
    def conditions(self) -> None:
        """The model decides on the conditions of groups: see `validate_removals`."""

    def validate(self) -> None:
        """Check what can be checked without the model."""
        if self.data in ("random", "gaussian") or self.model.lower().startswith("parameter-free"):
            raise UserError("behaviour is measured on text, with a language model")
        super().validate()
        if not self.measures or len({*self.measures}) < len(self.measures):
            raise UserError("expected one or more different values of --measures")
        if self.bos == "never" and "bos" in self.measures and self.measures != MEASURES:
            raise UserError("--bos never: the measure bos needs sequences that begin with BOS")
        for measure in self.measures:
            if self.seq_len < (least := SHORTEST[measure]):
                raise UserError(
                    f"{measure} needs windows of {least} tokens or more, got "
                    f"{self.length_of(self.seq_len)}"
                )
        if not 4 <= self.prefix_len <= self.seq_len - 4:
            raise UserError(
                f"expected a --prefix from 4 to {self.seq_len - 4} of {self.seq_len} tokens, got "
                f"{self.prefix_len}"
            )
        if self.remove is not None:
            self.validate_removals(make_conditions(COMPONENTS, self.removals, self.ablations))

    def validate_removals(self, conditions: Mapping[str, Ablation]) -> None:
        """Check that flags of weights and of the mask have a condition to act on.

        Raises:
            UserError: naming the flag.
        """
        removed = [ablation.condition for ablation in conditions.values()]
        self.validate_weights(removed)
        self.validate_in_heads(removed)
        scores_suffix = {"order", "loss"} & {*self.measures}  # of every condition
        removes_mask = any("mask" in ablation.condition for ablation in conditions.values())
        if not (scores_suffix or removes_mask):
            validate_effects(self, {"prefix": "where the mask is not removed"})

    def without_effect(self) -> dict[str, str]:
        """Return by name why settings have no effect next to the others."""
        reasons = super().without_effect()
        if "extrapolation" not in self.measures:
            unread = "without the measure extrapolation"
            reasons |= {"trained_len": unread, "max_len": unread}
        if "position" not in self.measures:
            unread = "without the measure position"
            reasons |= {"layers": unread, "skip_keys": unread}
        return reasons

    @property
    def depth(self) -> None:
        """The whole model is run, in however many layers position is read."""

    @property
    def positions(self) -> int | None:
        """A shipped model takes as many positions as the extrapolation does."""
        trained, needed = trained_length(self.model), super().positions
        return needed if trained is None else max(self.extrapolated_len(trained), needed or 0)

    def trained_len_of(self, n_ctx: int) -> int:
        """Return the length that the model was trained at: as set, as recorded, or its context."""
        return self.trained_len or trained_length(self.model) or n_ctx

    def extrapolated_len(self, n_ctx: int) -> int:
        """Return how many tokens the extrapolation's windows have, for a model's context."""
        return min(TIMES * self.trained_len_of(n_ctx), self.max_len)

    def long_windows(self, n_ctx: int) -> Settings:
        """Return the settings that make the extrapolation's windows: about as many tokens."""
        length = self.extrapolated_len(n_ctx)
        n_seqs = max(self.folds, self.n_seqs * self.seq_len // length)
        return replace(self, n_seqs=n_seqs, seq_len=length, beyond_context=True)
