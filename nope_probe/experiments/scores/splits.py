"""Exact splits of the intact model's scores: RoPE bands, and offset profiles."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.bands import Band, BandChoice, make_bands, split_bands
from nope_probe.analyses.recover import recover_rotation
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.experiments.tables import bands_table, head_offsets_table, offsets_table
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.model import Inputs, layers_of
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.bands import capture_bands
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.centred import row_centred
from nope_probe.maps.folds import State, pooled
from nope_probe.maps.maps import ScoreMaps
from nope_probe.runtime.checkpoint import RunCheckpoint

BandMaps = Float[Tensor, "fold layer band query_pos key_pos"]
ADDS_UP = 1e-3  # relative, for scores in half precision


def bands_of(
    model: HookedModel, inputs: Inputs, n_layers: int, choice: BandChoice
) -> list[list[Band]]:
    """Return the bands of the first layers, from the rotation that they apply.

    Raises:
        UserError: if no layer has RoPE, if scores are soft-capped, or for too many bands.
    """
    layers = layers_of(model)[:n_layers]
    capped = [layer.index for layer in layers if layer.soft_cap is not None]
    if capped:
        raise UserError(f"--bands: the scores of L{capped[0]} are soft-capped, so they are no sum")
    rotations = [recover_rotation(each) for each in read_rotations(model, inputs[:1], n_layers)]
    try:
        return make_bands(rotations, layers[0].d_head, choice)
    except ValueError as error:
        raise UserError(f"--bands: {error}") from error


def bands_once(
    checkpoint: RunCheckpoint,
    model: HookedModel,
    data: Sequences,
    bands: list[list[Band]],
    *,
    batch_size: int,
    n_folds: int,
) -> BandMaps:
    """Return the maps of bands, captured unless the checkpoint has them."""

    def capture(stream: StreamCheckpoint) -> State:
        folds = capture_bands(
            model,
            data.inputs,
            [[band.coordinates for band in of_layer] for of_layer in bands],
            batch_size=batch_size,
            n_folds=n_folds,
            documents=data.documents,
            checkpoint=stream,
        )
        return {"folds": folds}

    return checkpoint.once("bands", capture)["folds"]


def validate_sum(measured: ScoreMaps, maps: BandMaps) -> None:
    """Check that bands add up to the score map: that scores are q.k.

    Raises:
        UserError: naming the layer in which they do not.
    """
    for layer, visible in enumerate(measured.visible):
        added = maps[:, layer].sum(1)[..., visible]
        if not relative_error(added, measured.folds[:, layer][..., visible]) < ADDS_UP:
            raise UserError(f"--bands: the scores of L{layer} are not q.k, so they have no bands")


def split_tables(
    measured: ScoreMaps,
    skip_keys: int,
    bands: list[list[Band]] | None = None,
    maps: BandMaps | None = None,
) -> dict[str, pd.DataFrame]:
    """Return `offsets`, `head_offsets` where heads were kept, and `bands` where these were."""
    folds = measured.folds.double()
    terms = {"score": folds, "all": row_centred(folds, skip_keys)}
    tables = {"offsets": offsets_table(terms, measured.counts, skip_keys)}
    if measured.per_head is not None:
        tables["head_offsets"] = head_offsets_table(measured.per_head, measured.counts, skip_keys)
    if bands is not None and maps is not None:
        tables["bands"] = bands_table(
            split_bands(measured.folds, maps, bands, skip_keys, counts=measured.counts)
        )
    return tables


def band_arrays(bands: list[list[Band]], maps: BandMaps, counts: Tensor) -> dict[str, np.ndarray]:
    """Return `band/<name>`, the map of each band: [n_layers, query_pos, key_pos], nats."""
    means = pooled(maps, counts)
    return {
        f"band/{band.name}": means[:, index].float().numpy() for index, band in enumerate(bands[0])
    }
