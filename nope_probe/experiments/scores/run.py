"""The `scores` command's run: from settings to a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.runtime.bounds import Bounds
from nope_probe.runtime.resources import Needs
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings
from nope_probe.runtime.terminal import status

if TYPE_CHECKING:
    from torch import Tensor

    from nope_probe.analyses.bands import Band
    from nope_probe.maps.maps import ScoreMaps
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

    def needs(self, info: ModelInfo | None = None) -> Needs:
        """Return what the run needs at least: with --per-head, maps of every head too."""
        once = super().needs(info)
        n_heads = info.n_heads if self.per_head and info else 0
        return Needs(memory=once.memory + n_heads * once.disk, disk=once.disk * (1 + n_heads))


def run(settings: Settings) -> Path:
    """Map the scores unless that is finished, and return the run's folder.

    Raises:
        UserError: for what cannot be done.
    """
    with Session("scores", settings) as session:
        if not session.finished:
            bands = plan_bands(session)
            maps = capture(session)
            band_maps = capture_band_maps(session, maps, bands)
            if session.is_first:
                with status("analysing and writing"):
                    from nope_probe.experiments.scores.analyse import analyse

                    session.write(analyse(session, maps, bands, band_maps))
    return session.folder


def plan_bands(session: Session[Settings]) -> list[list[Band]] | None:
    """Return the RoPE bands of each layer; None if none were asked for.

    Raises:
        UserError: for a model without RoPE, soft-capped scores, or more bands than pairs.
    """
    from nope_probe.experiments.scores.splits import bands_of

    settings = session.settings
    if settings.bands is None:
        return None
    inputs, n_layers = session.sequences().inputs, settings.n_layers_of(session.loaded)
    return bands_of(session.loaded.model, inputs, n_layers, settings.bands)


def capture_band_maps(
    session: Session[Settings], maps: ScoreMaps, bands: list[list[Band]] | None
) -> Tensor | None:
    """Return the maps of bands, from the checkpoint or captured and saved.

    Raises:
        UserError: if they do not add up to the scores.
    """
    from nope_probe.experiments.scores.splits import bands_once, validate_sum

    if bands is None:
        return None
    settings = session.settings
    with session.checkpoint.progress(["bands"], session.n_own_seqs):
        found = bands_once(
            session.checkpoint,
            session.loaded.model,
            session.sequences(),
            bands,
            batch_size=settings.seqs_per_batch,
            n_folds=settings.folds,
        )
    validate_sum(maps, found)
    return found


def capture(session: Session[Settings]) -> ScoreMaps:
    """Return the model's score maps, from the checkpoint or captured and saved.

    Raises:
        UserError: for a non-finite score, or a layer with a sliding window shorter than the
            sequences.
    """
    from nope_probe.experiments.engine import validate_finite, validate_first_sequence
    from nope_probe.hooks.reading.capture import capture_scores
    from nope_probe.maps.maps import ScoreMaps

    settings, data = session.settings, session.sequences()
    n_layers = settings.n_layers_of(session.loaded)
    if "scores" not in session.checkpoint:
        validate_first_sequence(session.loaded.model, data.inputs, n_layers)
    session.announce(1, ["scores", *["bands"] * (settings.bands is not None)], n_seqs=len(data))
    with session.checkpoint.progress(["scores"], session.n_own_seqs):
        tensors = session.checkpoint.once(
            "scores",
            lambda stream: capture_scores(
                session.loaded.model,
                data.inputs,
                layers=range(n_layers),
                batch_size=settings.seqs_per_batch,
                n_folds=settings.folds,
                documents=data.documents,
                per_head=settings.per_head,
                checkpoint=stream,
            ).to_tensors(),
        )
    maps = ScoreMaps.from_tensors(tensors)
    validate_finite(maps, "the intact model")
    return maps
