"""The `trace` command's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from nope_probe.errors import UserError
from nope_probe.models.info import ModelInfo
from nope_probe.run.flags import LARGEST, Bounds
from nope_probe.run.paths import validate_memory
from nope_probe.run.settings import RunSettings

MIN_FOLDS = 5  # a product needs four different folds, and intervals leave one out


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Trace who writes the position that each layer reads.

    Splits each layer's lead of the first key, and its pattern among the other keys, exactly into
    rotation (RoPE on vectors that know nothing of position), written position and covariance.
    Splits the written position into the parts of all embeddings, heads and MLPs before the layer,
    and measures what one layer loses without the position of each.

    Attributes:
        reader: The layer (L2) or head (L2H1) that the headline, the maps and --confirm are about
            [the one with the largest lead and pattern]; a head turns --per-head on.
        writers: Whether heads write one by one, or each block's attention as a whole.
        per_head: Trace what each head reads, instead of each layer.
        confirm: How many heads lose their position, one at a time and after each earlier attention
            and MLP, to measure what is lost.
        folds: Parts of the data that intervals are made from.
    """

    model: str = "nope-tiny"
    reader: str | None = None
    writers: Literal["heads", "layers"] = "heads"
    per_head: bool = False
    confirm: Annotated[int, Bounds(0, 1000)] = 6
    folds: Annotated[int, Bounds(MIN_FOLDS, LARGEST)] = 8

    def validate(self) -> None:
        """Check the settings that need no model.

        Raises:
            UserError: naming the flag.
        """
        super().validate()
        if self.reader is None:
            return
        if not re.fullmatch(r"L(0|[1-9][0-9]*)(H(0|[1-9][0-9]*))?", self.reader):
            raise UserError(f"--reader {self.reader}: expected a layer or head, such as L2 or L2H1")
        if self.per_head and len(self.reader_numbers) == 1:
            raise UserError(f"--reader {self.reader}: with --per-head, readers are heads, as L2H1")
        layer = self.reader_numbers[0]
        if self.depth is not None and layer >= self.depth:
            raise UserError(
                f"--reader {self.reader} is not among the first {self.depth} layers: take --layers "
                f"{layer + 1}"
            )

    @property
    def reader_numbers(self) -> list[int]:
        """The number of the reader's layer and, for a head, the head's number."""
        return numbers_of(self.reader or "")

    @property
    def traces_heads(self) -> bool:
        """Whether the readers are heads, not layers."""
        return self.per_head or len(self.reader_numbers) == 2

    def validate_layers(self, info: ModelInfo) -> None:
        """Check that the reader exists, and that the sums of all writers fit into memory.

        Raises:
            UserError: naming the possible readers, or the flags that save memory.
        """
        super().validate_layers(info)
        layers, (layer, head) = self.layers_with_maps(info), (*self.reader_numbers, 0, 0)[:2]
        if self.reader is not None and (layer not in layers or head >= info.n_heads):
            there = ", ".join(f"L{layer}" for layer in layers)
            raise UserError(
                f"--reader {self.reader}: there are {there}, with the heads H0 to "
                f"H{info.n_heads - 1}"
            )
        fewer = ", or take --writers layers" if self.writers == "heads" else ""
        validate_memory(self.bytes_of_sums(info), f"--layers or --seq-len{fewer}")

    @property
    def removes(self) -> bool:
        """Whether writers' positions are taken away."""
        return self.confirm > 0

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds, with the writers' sums counted in maps."""
        maps_of_sums = self.bytes_of_sums(info) // (8 * self.folds * self.seq_len**2)
        return len(self.layers_with_maps(info)) + maps_of_sums

    def bytes_of_sums(self, info: ModelInfo) -> int:
        """Return the bytes of the writers' parts of queries and keys, by fold and position."""
        n_layers = self.depth_in(info)
        n_heads = info.n_heads if self.writers == "heads" else 1
        n_writers = (n_heads + 1) * n_layers * (n_layers - 1) // 2  # before all readers
        n_queries = info.n_heads if self.traces_heads else info.n_kv_heads
        width = (n_queries + info.n_kv_heads) * info.d_head
        return 8 * self.folds * n_writers * self.seq_len * width


def numbers_of(reader: str) -> list[int]:
    """Return the numbers in a reader's name: the layer's and, of a head, the head's.

    Example:
        >>> numbers_of("L2H1"), numbers_of("L2")
        ([2, 1], [2])
    """
    return [int(number) for number in re.findall(r"\d+", reader)]
