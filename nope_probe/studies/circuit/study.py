"""The `circuit` command's study: its passes, and the run of their stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure_pattern, query_stride
from nope_probe.errors import TooFewLayersError, UserError
from nope_probe.hooks.layers.model import Given, layers_of
from nope_probe.hooks.reading.accumulators import STAGES, absent_stages
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.maps import StageMaps
from nope_probe.maps.rows import MapRows
from nope_probe.models.info import LoadedModel
from nope_probe.removal import INTACT
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.session import Session
from nope_probe.run.sources import load_layers
from nope_probe.studies.circuit.page import StudiedBlock, report
from nope_probe.studies.circuit.settings import Settings
from nope_probe.studies.engine import Engine, ablation_of, are_finite
from nope_probe.studies.from_python import ModelOrName, run_of, takes
from nope_probe.studies.page import with_page
from nope_probe.studies.study import Pass, Results, Study, calibration, run_study
from nope_probe.studies.tables import measures_table

ABLATED = "ablated"


class CaptureStages(Study[Settings, Run]):
    """The stages of a block, of the intact model and, with an ablation, of the ablated model."""

    command = "circuit"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        self.ablation = ablation_of(session.loaded.model, self.settings)

    @staticmethod
    def load(settings: Settings, device: str) -> LoadedModel:
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

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that capture the stages."""
        ablation, engine = self.ablation, Engine.of(self.session)
        yield Pass(key=INTACT.name, engine=engine, read=self._read)
        yield from calibration("gains", engine, [ablation])
        if ablation.condition:
            yield Pass(key=ABLATED, engine=engine, read=self._read, ablation=ablation)

    def _read(self, engine: Engine, key: str, ablation: Ablation | None) -> StageMaps:
        maps = engine.stages(key, ablation, layer=self.settings.layer)
        validate_finite_stages(maps, f"the {key} model")
        return maps

    def analyse(self, results: Results) -> Run:
        """Measure the stages, and return the run."""
        maps = [results[name] for name in (INTACT.name, ABLATED) if name in results]
        return analyse(self.session, maps, self.ablation.condition.ordered)


run = partial(run_study, CaptureStages)


def validate_finite_stages(maps: StageMaps, model: str) -> None:
    """Check that every value of every stage, but for masked scores, is finite.

    Raises:
        UserError: naming stage and model.
    """
    for letter, folds in maps.folds.items():
        n_rows, n = folds.shape[-2:]
        kept = torch.ones(n_rows, n, dtype=torch.bool)
        if n_rows < n:  # chosen rows have no cells j > i
            kept = torch.arange(n) <= maps.query_positions[:, None]
        cells = maps.visible.get(letter, kept)
        if not are_finite(folds, cells):
            raise UserError(f"non-finite values at stage ({letter}) of {model}")


def analyse(session: Session[Settings], maps: Sequence[StageMaps], removed: Sequence[str]) -> Run:
    """Measure the stages, and return the run.

    Args:
        session: the run in progress.
        maps: the stages of the intact model and, with an ablation, of the ablated model.
        removed: the removed components, and `norms`.
    """
    inputs, layer = session.sequences(), session.settings.layer
    skip_keys = session.settings.skip_keys_of(inputs)
    table = stages_table(maps, layer)
    model = session.loaded.model
    blocks = {block.index: block for block in layers_of(model)}
    absent = absent_stages(blocks, layer, session.loaded.info.n_layers)
    block = StudiedBlock(
        layer=layer,
        components=tuple(components(model)),
        absent=dict[str, str](absent.items()),
    )
    manifest = replace(
        session.manifest_of(inputs, skip_keys, maps[0].counts),
        query_stride=query_stride(len(maps[0].query_positions)),
        removed=tuple(removed),
        results=asdict(block),
    )
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


@takes(CaptureStages)
def run_circuit(
    model: ModelOrName,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Any,
) -> Run:
    """Capture the stages (a) to (i) of a block, as the `circuit` command does.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_circuit
        >>> run = run_circuit("nope-tiny", layer=1, n_seqs=16, remove="mask")
        >>> stages = run.tables["stages"]
        >>> stages.groupby("model")["stage"].agg("".join).to_dict()
        {'ablated': 'abcdefghi', 'intact': 'abcdefghi'}
    """
    return run_of(CaptureStages, model, inputs, out, options)
