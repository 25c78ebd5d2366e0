"""The `scores` command's run: from settings to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nope_probe.analyses.recover import recover_rotation
from nope_probe.analyses.splits import Band, BandChoice, make_bands
from nope_probe.errors import UserError
from nope_probe.experiments.engine import Engine, validate_first_sequence
from nope_probe.experiments.scores.analyse import MeasuredScores, analyse
from nope_probe.experiments.scores.heads import HeadMeans, head_sums
from nope_probe.experiments.scores.settings import Settings
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs, numbered_layers
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.maps.folds import folds_of
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

ADDS_UP = 1e-3  # relative error, for scores in half precision


def run(settings: Settings) -> Path:
    """Map the scores unless the run is finished, and return the run's folder.

    Raises:
        UserError: for settings that the model or the data cannot satisfy.
    """
    with Session("scores", settings) as session:
        if not session.finished:
            measured = capture(session, per_head=settings.per_head, choice=settings.bands)
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    session.write(analyse(session, measured, settings.offset_bins))
    return session.folder


def capture(
    session: Session[RunSettings], *, per_head: bool = False, choice: BandChoice | None = None
) -> MeasuredScores:
    """Return the model's score maps, from the checkpoint or captured and saved.

    Args:
        session: the run.
        per_head: whether to keep each head's map too.
        choice: the bands of RoPE to split the maps by, if any.

    Raises:
        UserError: for a non-finite score, or for scores that cannot be split into bands.
    """
    inputs, model = session.sequences().inputs, session.loaded.model
    layers = session.settings.layers_of(session.loaded.info)
    bands = [] if choice is None else bands_of(model, inputs, layers, choice)
    if "scores" not in session.checkpoint:
        validate_first_sequence(model, inputs, layers)
    engine, keys = Engine.of(session), ["scores", "bands"] if bands else ["scores"]
    session.announce(1, keys, n_seqs=len(inputs))
    with session.checkpoint.progress(keys, session.n_own_seqs):
        name = "the intact model"
        sums = head_sums(model, layers, session.sequences(), engine.n_folds) if per_head else []
        maps = engine.stored_scores(
            "scores", name=name, layers=layers, per_head=per_head, beside=sums
        )
        fold_of = folds_of(len(inputs), engine.n_folds, engine.documents)
        heads = HeadMeans.of(sums, fold_of) if sums else None
        if not bands:
            return MeasuredScores(layers=maps, heads=heads, bands=bands)
        coordinates = [[band.coordinates for band in of_layer] for of_layer in bands]
        band_maps = engine.once(
            "bands",
            lambda stream: {"folds": engine.by_fold(capture_bands, stream, groups=coordinates)},
        )["folds"]
    for place, (number, layer) in enumerate(maps.items()):
        scores, added = layer.folds.maps, band_maps[:, place].sum(1)
        visible = ~scores[0].isnan()
        if not relative_error(added[:, visible], scores[:, visible]) < ADDS_UP:
            raise UserError(f"--bands: the scores of L{number} are not q.k, so they have no bands")
    return MeasuredScores(layers=maps, heads=heads, bands=bands, band_maps=band_maps)


def bands_of(
    model: HookedModel, inputs: Inputs, layers: Sequence[int], choice: BandChoice
) -> list[list[Band]]:
    """Return the bands of the first layers that attend, from their rotations.

    Raises:
        UserError: if no layer has RoPE, if scores are soft-capped, or for too many bands.
    """
    blocks = numbered_layers(model, layers)
    capped = [f"L{layer.index}" for layer in blocks if layer.soft_cap is not None]
    if capped:
        raise UserError(f"--bands: the scores of {capped[0]} are soft-capped, so they are no sum")
    rotations = list(map(recover_rotation, read_rotations(model, inputs[:1], len(blocks))))
    try:
        return make_bands(rotations, blocks[0].d_head, choice, layers)
    except ValueError as error:
        raise UserError(f"--bands: {error}") from error
