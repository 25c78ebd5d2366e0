"""The `scores` command's run: from settings to a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import OFFSET_BINS, Bounds, RunSettings

if TYPE_CHECKING:
    from nope_probe.models.info import ModelInfo

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Map a model's attention scores (the paper's Figure 5).

    Averages the pre-softmax scores of each layer over sequences and heads, and writes raw and
    diagonal-normalised maps, standard errors and measures of the pattern in them.
    """

    per_head: Annotated[bool, _arg(help="Keep and measure each head's map too.")] = False
    bands: Annotated[
        int | Literal["octaves"] | None,
        Bounds(1, 1024),
        _arg(help="Split the maps by RoPE frequency: octaves of wavelengths, or so many bands."),
    ] = None
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds; a head's map has half the bytes of a layer's."""
        n_layers = len(self.layers_of(info))
        return n_layers * (1 + info.n_heads // 2) if self.per_head else n_layers


def run(settings: Settings) -> Path:
    """Map the scores unless the run is finished, and return the run's folder.

    Raises:
        UserError: for settings that the model or the data cannot satisfy.
    """
    with Session("scores", settings) as session:
        if not session.finished:
            from nope_probe.experiments.scores.analyse import analyse, capture

            measured = capture(session, per_head=settings.per_head, choice=settings.bands)
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    session.write(analyse(session, measured, settings.offset_bins))
    return session.folder
