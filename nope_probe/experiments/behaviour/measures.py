"""The measures of behaviour by name: how long windows have to be, and what each number means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number of `behaviour.csv`.

    Attributes:
        label: in tables and figures.
        unit: nats or positions.
        caption: what it is, in one sentence.
    """

    label: str
    unit: str = "nats"
    caption: str


QUANTITIES: dict[str, Quantity] = {
    "loss": Quantity(label="loss", caption="mean loss per token of the text."),
    "loss_suffix": Quantity(
        label="loss, suffix",
        caption="mean loss of the tokens after the prefix (bidirectional without the mask).",
    ),
    "in_context": Quantity(
        label="in-context gain",
        caption="loss early in the window (its second tenth) less loss late (its last tenth).",
    ),
    "copy_text": Quantity(
        label="copy, text",
        caption="a text segment twice: loss of the second copy less the first; below 0, it copies.",
    ),
    "copy_text_second": Quantity(
        label="second copy, text", caption="loss of the second copy of a text segment."
    ),
    "copy_random": Quantity(
        label="copy, random",
        caption="random tokens twice: loss of the second copy less the first; below 0, it copies.",
    ),
    "copy_random_second": Quantity(
        label="second copy, random", caption="loss of the second copy of random tokens."
    ),
    "order": Quantity(
        label="order",
        caption="rise of the suffix's loss when the tokens of the prefix are shuffled.",
    ),
    "without_bos": Quantity(
        label="without BOS", caption="rise of the loss when the BOS token is left out."
    ),
    "other_first": Quantity(
        label="another first token",
        caption="rise of the loss when a random token takes the place of BOS.",
    ),
    "extrapolation": Quantity(
        label="extrapolation",
        caption="loss beyond the trained context less loss in its last quarter.",
    ),
    "position": Quantity(
        label="position error",
        unit="positions",
        caption="how far the index that a ridge regression reads from the residual stream is from "
        "the true one, mean over layers and held-out documents.",
    ),
}
