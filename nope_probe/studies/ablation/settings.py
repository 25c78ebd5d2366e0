"""The `ablate` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from nope_probe.hooks.removing.stand_ins import DEFAULT_REPLACEMENTS, Replacement
from nope_probe.models.info import ModelInfo
from nope_probe.removal import Condition
from nope_probe.run.flags import Bounds
from nope_probe.run.settings import OFFSET_BINS
from nope_probe.studies.removing import NAMES, RemovingSettings, parse_removed

_arg = tyro.conf.arg
MOST_BANDS = 128  # rotary pairs of the widest heads


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights. Per layer it reports what
    the first key's lead and the pattern among the other keys lose without each, with intervals.
    With the default settings, the shipped model takes about 10 seconds on two cores.

    Attributes:
        bands: Also remove each of so many bands of RoPE's pairs in turn. Without --remove, no
            weights are removed then.
        replacement: What a removed weight is replaced by; several are shown side by side. A
            headline speaks of the first.
        per_head: Also measure what each head loses without each source and band.
    """

    remove: Annotated[
        tuple[str, ...] | None,
        _arg(
            help=f"What to remove besides the sources, one at a time: {NAMES}; `sources` for the "
            "sources alone. By default w_q w_k w_o qk ov."
        ),
    ] = None
    bands: Annotated[int, Bounds(0, MOST_BANDS)] = 0
    replacement: tuple[Replacement, ...] = DEFAULT_REPLACEMENTS  # type: ignore[assignment]
    per_head: bool = False
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"

    @property
    def removed_names(self) -> tuple[str, ...] | None:
        """What is removed besides sources and bands; None where the model decides on it."""
        if self.remove is None:
            return () if self.bands else None
        return tuple(name for name in self.remove if name != "sources")

    @property
    def conditions(self) -> list[Condition] | None:
        """What is removed besides sources and bands, one at a time, if the settings say it."""
        return None if self.removed_names is None else [*map(parse_removed, self.removed_names)]

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds; of a head two, with half the bytes of a layer's."""
        n_layers = len(self.layers_with_maps(info))
        return n_layers * (1 + info.n_heads) if self.per_head else n_layers

    unset = (*RemovingSettings.unset, ("per_head", False))
