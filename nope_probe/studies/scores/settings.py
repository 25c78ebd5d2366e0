"""The `scores` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from nope_probe.models.info import ModelInfo
from nope_probe.run.flags import Bounds
from nope_probe.run.settings import OFFSET_BINS, RunSettings


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Map a model's attention scores (the paper's Figure 5).

    Averages the pre-softmax scores of each layer over sequences and heads, and writes raw and
    diagonal-normalised maps, standard errors and measures of the pattern in them.

    Attributes:
        per_head: Keep and measure each head's map too.
        bands: Split the maps by RoPE frequency: octaves of wavelengths, or so many bands.
    """

    per_head: bool = False
    bands: Annotated[int | Literal["octaves"] | None, Bounds(1, 1024)] = None
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"

    @property
    def removes(self) -> bool:
        """Whether the run removes components."""
        return False

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds; of a head two, with half the bytes of a layer's."""
        n_layers = len(self.layers_with_maps(info))
        return n_layers * (1 + info.n_heads) if self.per_head else n_layers
