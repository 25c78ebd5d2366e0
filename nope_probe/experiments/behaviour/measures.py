"""What is measured of a model's behaviour, and in which conditions; nothing here needs torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

from nope_probe.analyses.shapley import condition
from nope_probe.components import POSITION_ENCODINGS, Ablation, Component, Substitute
from nope_probe.errors import UserError
from nope_probe.experiments.removals import validate_components

Measure = Literal[
    "loss", "in-context", "copy", "order", "bos", "extrapolation", "position", "pattern"
]
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
    "pattern": 12,
}
INTACT = "intact"
REMOVED = (  # by default, as far as the model has it
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
IN_SIGHT = "without the mask the next token is in sight: only the suffix is scored"
FIRST_IN_SIGHT = "without the mask the first copy is in sight: see the second copy's loss"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number of `behaviour.csv`.

    Attributes:
        measure: the measure that it belongs to.
        label: in tables and figures.
        unit: nats or positions.
        caption: what it is, in one sentence.
        probe: the sequences whose losses it is read from, beside the text windows.
        unmasked: why it means nothing without the mask; empty if it does.
    """

    measure: Measure
    label: str
    unit: str = "nats"
    caption: str
    probe: str = "text"
    unmasked: str = ""

    @property
    def sentence(self) -> str:
        """Label and caption."""
        return f"{self.label[0].upper()}{self.label[1:]}: {self.caption}"


QUANTITIES: dict[str, Quantity] = {
    "loss": Quantity(
        measure="loss", label="loss", caption="mean loss per token of the text.", unmasked=IN_SIGHT
    ),
    "loss_suffix": Quantity(
        measure="loss",
        label="loss, suffix",
        caption="mean loss of the tokens after the prefix (bidirectional without the mask).",
    ),
    "in_context": Quantity(
        measure="in-context",
        label="in-context gain",
        caption="loss early in the window (its second tenth) less loss late (its last tenth).",
        unmasked=IN_SIGHT,
    ),
    "copy_text": Quantity(
        measure="copy",
        label="copy, text",
        probe="copy_text",
        caption="a text segment twice: loss of the second copy less the first; below 0, it copies.",
        unmasked=FIRST_IN_SIGHT,
    ),
    "copy_text_second": Quantity(
        measure="copy",
        label="second copy, text",
        probe="copy_text",
        caption="loss of the second copy of a text segment.",
    ),
    "copy_random": Quantity(
        measure="copy",
        label="copy, random",
        probe="copy_random",
        caption="random tokens twice: loss of the second copy less the first; below 0, it copies.",
        unmasked=FIRST_IN_SIGHT,
    ),
    "copy_random_second": Quantity(
        measure="copy",
        label="second copy, random",
        probe="copy_random",
        caption="loss of the second copy of random tokens.",
    ),
    "order": Quantity(
        measure="order",
        label="order",
        probe="order",
        caption="rise of the suffix's loss when the tokens of the prefix are shuffled.",
    ),
    "without_bos": Quantity(
        measure="bos",
        label="without BOS",
        probe="without_bos",
        caption="rise of the loss when the BOS token is left out.",
    ),
    "other_first": Quantity(
        measure="bos",
        label="another first token",
        probe="other_first",
        caption="rise of the loss when a random token takes the place of BOS.",
    ),
    "extrapolation": Quantity(
        measure="extrapolation",
        label="extrapolation",
        probe="long",
        caption="loss beyond the trained context less loss in its last quarter.",
    ),
    "position": Quantity(
        measure="position",
        label="position error",
        unit="positions",
        caption="how far the index that a ridge regression reads from the residual stream is from "
        "the true one, mean over layers and held-out documents.",
    ),
}


# What behaviour loses, by column of `bridge.csv`: the rows of `behaviour.csv` whose differences to
# the intact model exist in all conditions.
EFFECTS = {"loss": "loss_suffix", "copy": "copy_text_second", "position": "position"}


def make_conditions(
    has: Sequence[Component],
    names: Sequence[str] | None,
    substitutes: Sequence[Substitute],
    left_out: Collection[str] = (),
) -> dict[str, Ablation]:
    """Return what each condition removes, by its name; the intact model first.

    With several replacements, a condition that removes weights is there once for each, under names
    such as `w_q:mean`.

    Args:
        has: the components that the model has.
        names: what to remove; by default each of `REMOVED` that the model has.
        substitutes: what stands for removed weights.
        left_out: components that are removed only where they are named.

    Raises:
        UserError: for a name that does not exist, or a component that the model lacks.
    """
    try:
        removed = {
            name: condition(name)
            for name in (REMOVED if names is None else names)
            if name != INTACT
        }
    except ValueError as error:
        raise UserError(f"--remove: {error}") from error
    if names is None:
        removed = {
            name: components
            for name, components in removed.items()
            if components <= {*has} - {*left_out}
        }
    for components in removed.values():
        validate_components(components, has)
    for (one, first), (other, second) in combinations(removed.items(), 2):
        if first == second:
            raise UserError(f"--remove: {one} and {other} remove the same")
    conditions = {INTACT: substitutes[0].without(())}
    for name, each in removed.items():
        ablations = [substitute.without(each) for substitute in substitutes]
        if len(ablations) > 1 and ablations[0].weights:
            conditions |= {f"{name}:{ablation.replacement}": ablation for ablation in ablations}
        else:
            conditions[name] = ablations[0]
    return conditions
