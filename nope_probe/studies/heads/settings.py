"""The `heads` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from nope_probe.errors import UserError
from nope_probe.maps import default_rows
from nope_probe.models.info import ModelInfo
from nope_probe.run.flags import COUNT, LARGEST, LAYERS, Bounds
from nope_probe.run.processes import validate_one_process
from nope_probe.run.settings import LAYERS_ARG, RunSettings, memory_of

Order = Literal["others", "positional", "information", "first_key", "previous_token", "induction"]
ORDERS: tuple[str, ...] = get_args(Order)
LOWEST = "lowest-"  # before a measure: its lowest heads first
Removed = Literal["rope", "content", "mask"]
COUNTS = (1, 5, 20)  # of the first heads; those that a small model lacks are left out
MEAN_SEQS = 384  # on which heads are ordered
SHORTEST = 17  # tokens, so that a segment of 8 tokens fits twice behind BOS


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Test what the heads that a measure ranks first do, by removing a part of them.

    Orders all heads by a measure of their attention, removes RoPE, content or the mask from the
    first k, and reports what it costs on text, on second copies and in induction heads, next to
    as many other heads drawn from the same layers, or for k = 1 next to every other head alone.

    Attributes:
        by: Orders, highest first: others and positional (the share of position among the other
            keys, and of all keys), information, first_key, previous_token, induction;
            lowest-others for lowest first; or a CSV file with the columns layer and head, in the
            order of the file.
        remove: What to remove from the first heads, one at a time.
        k: In how many of the first heads, one number at a time; 1 removes it from every head alone.
        draws: How often as many other heads are drawn from the same layers, for comparison.
        n_seqs: Sequences that costs are measured on.
        mean_seqs: Other sequences, on which heads are ordered, and whose mean attention removed
            content leaves.
        layers: Which layers' heads to order, as in `ablate`; all layers are run.
    """

    by: tuple[str, ...] = ("others",)
    remove: tuple[Removed, ...] = ("rope", "content")
    k: Annotated[tuple[int, ...], COUNT] = COUNTS
    draws: Annotated[int, Bounds(2, LARGEST)] = 19
    n_seqs: Annotated[int, COUNT] = 8
    mean_seqs: Annotated[int, Bounds(8, LARGEST)] = MEAN_SEQS
    layers: Annotated[int | str, LAYERS, LAYERS_ARG] = "all"

    def validate(self) -> None:
        """Check what can be checked without the model."""
        validate_one_process()
        if self.data in ("random", "gaussian") or self.model.lower().startswith("parameter-free"):
            raise UserError("heads are tested on text, with a language model")
        super().validate()
        for name in ("by", "remove", "k"):
            values: tuple[object, ...] = getattr(self, name)
            if not values or len({*values}) < len(values):
                raise UserError(f"expected one or more different values of --{name}")
        for order in self.by:
            if order.removeprefix(LOWEST) not in ORDERS and not order.endswith(".csv"):
                raise UserError(
                    f"--by {order}: expected {', '.join(ORDERS)}, one of them after {LOWEST}, or a "
                    "CSV file"
                )
            if order.endswith(".csv") and not Path(order).is_file():
                raise UserError(f"--by {order}: there is no such file")
        if self.seq_len < SHORTEST:
            raise UserError(f"copies need {self.length_of(SHORTEST)} or more")

    def counts_of(self, n_heads: int) -> list[int]:
        """Return the numbers of first heads in ascending order, of a model with n heads.

        Raises:
            UserError: for a number of heads next to which there are fewer others.
        """
        counts = [k for k in sorted(self.k) if self.k != COUNTS or 2 * k <= n_heads]
        if not counts or 2 * max(counts) > n_heads:
            raise UserError(
                f"--k {max(counts, default=1)}: there are {n_heads} heads, and chance takes as "
                f"many others: take up to {n_heads // 2}"
            )
        return counts

    @property
    def depth(self) -> None:
        """The whole model is run, whatever layers' heads are ordered."""

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds: those of one layer's heads, and all heads' means."""
        every_row = self.query_rows or default_rows(self.seq_len)
        of_heads = info.n_heads * (1 + info.n_layers // self.folds)
        return -(-of_heads * self.seq_len // every_row)

    @property
    def least_memory(self) -> int:
        """The bytes of the sequences and of one head's fold maps, before the model is known."""
        return memory_of(self, n_maps=1)
