"""The `circuit` command's run: from settings to stages, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure_pattern, query_stride
from nope_probe.errors import TooFewLayersError, UserError
from nope_probe.experiments.circuit.sections import report
from nope_probe.experiments.circuit.settings import Settings
from nope_probe.experiments.engine import Engine, ablation_of, are_finite
from nope_probe.experiments.sections import with_page
from nope_probe.experiments.tables import measures_table
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.accumulators import STAGES, absent_stages
from nope_probe.hooks.removing.components import components
from nope_probe.maps.maps import StageMaps
from nope_probe.maps.rows import MapRows
from nope_probe.models.info import LoadedModel
from nope_probe.removal import INTACT
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings
from nope_probe.runtime.sources import load_layers

ABLATED = "ablated"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a block.

    Attributes:
        layer: the block, from 0.
        intact: the stages of the intact model.
        ablated: the stages of the ablated model; None without an ablation.
        removed: the removed components, and `norms`.
    """

    layer: int
    intact: StageMaps
    ablated: StageMaps | None
    removed: tuple[str, ...]


def run(settings: Settings) -> Path:
    """Capture a block's stages unless the run is finished, and return the run's folder.

    Raises:
        UserError: for settings that the model or the data cannot satisfy.
    """
    with Session("circuit", settings, load=load_blocks) as session:
        if not session.finished:
            stages = capture(session)
            with status("analysing and writing", in_logs=True):
                session.write(analyse(session, stages))
    return session.folder


def load_blocks(settings: Settings, device: str) -> LoadedModel:
    """Load the blocks up to the one after the block under study, if there is one.

    Raises:
        UserError: if the model does not have the block.
    """
    layer = settings.layer
    try:
        return load_layers(settings, device, layer + 2)
    except TooFewLayersError as error:
        if error.depth == layer + 1:
            return load_layers(settings, device, layer + 1)
        raise UserError(
            f"{error.source} has {error.depth} layers, L0 to L{error.depth - 1}; "
            f"there is no --layer {layer}"
        ) from error


def capture(session: Session[Settings]) -> Stages:
    """Return the stages of the intact model and, with an ablation, of the ablated model.

    Raises:
        UserError: for a component that the model lacks, or a stage with a non-finite value.
    """
    settings, engine = session.settings, Engine.of(session)
    layer, ablation = settings.layer, ablation_of(engine.model, settings)
    removed = tuple(ablation.condition.ordered)
    gains = ["gains"] * ablation.needs_calibration
    keys = ["intact", *gains, *["ablated"] * bool(removed)]
    session.announce(1 + bool(removed), keys, n_seqs=len(engine.inputs))
    with session.checkpoint.progress(keys, session.n_own_seqs):
        intact, without = engine.stages("intact", layer=layer), None
        validate_finite_stages(intact, "the intact model")
        engine = engine.calibrated("gains", [ablation])
        if removed:
            without = engine.stages("ablated", ablation, layer=layer)
            validate_finite_stages(without, "the ablated model")
    return Stages(layer=layer, intact=intact, ablated=without, removed=removed)


def validate_finite_stages(maps: StageMaps, model: str) -> None:
    """Check that every value of every stage, but for masked scores, is finite.

    Raises:
        UserError: naming stage and model.
    """
    for letter, folds in maps.folds.items():
        n_rows, n = folds.shape[-2:]
        held = torch.ones(n_rows, n, dtype=torch.bool)
        if n_rows < n:  # chosen rows have no cells j > i
            held = torch.arange(n) <= maps.query_positions[:, None]
        cells = maps.visible.get(letter, held)
        if not are_finite(folds, cells):
            raise UserError(f"non-finite values at stage ({letter}) of {model}")


def analyse(session: Session[RunSettings], stages: Stages) -> Run:
    """Measure the stages, and return the run."""
    inputs, layer = session.sequences(), stages.layer
    skip_keys = session.settings.n_skipped(inputs)
    maps = [captured for captured in (stages.intact, stages.ablated) if captured is not None]
    table = stages_table(maps, layer)
    model = session.loaded.model
    blocks = {block.index: block for block in layers_of(model)}
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys, stages.intact.counts),
        "query_stride": query_stride(len(stages.intact.query_positions)),
        "layer": layer,
        "components": list(components(model)),
        "removed": list(stages.removed),
        "absent": absent_stages(blocks, layer, session.loaded.info.n_layers),
    }
    arrays = {name: array.float().cpu().numpy() for name, array in _arrays(maps).items()}
    run = Run(
        manifest=manifest,
        arrays={"maps": arrays, "tokens": input_arrays(inputs), "folds": _folds(maps[-1])},
        tables={"stages": table},
    )
    return with_page(session, run, report)


def _arrays(maps: Sequence[StageMaps]) -> dict[str, Tensor]:
    """Return a run's maps; with an ablation, the intact model's maps are the reference."""
    shown = maps[-1]
    means = {letter: shown.mean(letter) for letter in shown.folds}
    arrays = {f"gram/{letter}": mean for letter, mean in means.items()}
    arrays |= {f"normalised/{letter}": shown.normalised(letter) for letter in shown.folds}
    by_letter = {letter: shown.layer_maps(letter) for letter in shown.folds}
    arrays |= {
        f"se/{letter}": standard_error(layer.folds.maps, layer.weights)
        for letter, layer in by_letter.items()
    }
    if len(maps) > 1:
        arrays |= {f"reference/{letter}": maps[0].mean(letter) for letter in maps[0].folds}
    if len(shown.query_positions) < next(iter(shown.folds.values())).shape[-1]:
        arrays["query_positions"] = shown.query_positions
    return arrays


def _folds(maps: StageMaps) -> dict[str, Float[np.ndarray, "fold cell"]]:
    """Return the fold means of each stage as lower triangles, with which `compare` pairs runs."""
    return {
        f"gram/{letter}": MapRows.of(folds, maps.query_positions).pack(folds).float().cpu().numpy()
        for letter, folds in maps.folds.items()
    }


def stages_table(maps: Sequence[StageMaps], layer: int) -> pd.DataFrame:
    """Return the table of stages: layer, model, stage, and the measures of scores for its map.

    Args:
        maps: the intact model's stages and, for an ablation, the ablated model's.
        layer: the block under study, from 0; (h) and (i) belong to the next block.
    """
    measured = []
    for model, stages in zip((INTACT.name, ABLATED), maps, strict=False):
        for letter in stages.folds:
            measures = [measure_pattern(stages.layer_maps(letter).pattern)]
            measured.append(({"model": model, "stage": letter}, measures))
    table = measures_table(measured, [layer], labels=("model", "stage"))
    table["layer"] = [layer + STAGES[letter].block for letter in table["stage"]]
    return table
