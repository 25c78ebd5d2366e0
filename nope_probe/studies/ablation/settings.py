"""The `ablate` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.hooks.removing.stand_ins import Replacement
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

    Runs the model with and without its causal mask, RoPE and weights. Per layer it reports, in
    nats, the first key's lead without each, and how much of the order of the other keys is there.
    With the default settings, the shipped model takes about 10 seconds on two cores.

    Attributes:
        bands: Also remove each of so many bands of RoPE's pairs in turn. Without --remove, no
            weights are removed then. With --remove none, split the maps into so many bands, or
            into octaves of wavelengths.
        replacement: What a removed weight is replaced by; several are shown side by side.
        per_head: Also measure each head without each source and band; with --remove none keep each
            head's map, and measure its attention.
    """

    remove: Annotated[
        tuple[str, ...] | None,
        _arg(
            help=f"What to remove besides the sources, one at a time: {NAMES}; `sources` for the "
            "sources alone; `none` to map the intact model alone. By default w_q w_k w_q+w_k w_o."
        ),
    ] = None
    bands: Annotated[int | Literal["octaves"], Bounds(0, MOST_BANDS)] = 0
    replacement: tuple[Replacement, ...] = ("mean",)  # type: ignore[assignment]
    per_head: bool = False
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"

    @property
    def removed_names(self) -> tuple[str, ...] | None:
        """What is removed, as `make_plan` takes it."""
        if self.remove is None:
            return ("sources",) if self.bands else None
        return self.remove if self.removes else ()

    @property
    def removes(self) -> bool:
        """Whether the run removes components."""
        return self.remove not in ((), ("none",))

    @property
    def conditions(self) -> list[Condition] | None:
        """What is removed besides sources and bands, one at a time, if the settings say it."""
        if self.removed_names is None:
            return None
        return [parse_removed(name) for name in self.removed_names if name != "sources"]

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        if self.bands == "octaves" and self.removes:
            raise UserError("--bands octaves splits maps: take it with --remove none")

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds; of a head two, with half the bytes of a layer's."""
        n_layers = len(self.layers_with_maps(info))
        return n_layers * (1 + info.n_heads) if self.per_head else n_layers

    unset = (*RemovingSettings.unset, ("per_head", False))
