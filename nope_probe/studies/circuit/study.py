"""The `circuit` command's study: its passes, and the run of their stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

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
from nope_probe.models.info import LoadedModel
from nope_probe.removal import INTACT
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.session import Session
from nope_probe.run.sources import load_layers
from nope_probe.studies.circuit.page import StudiedBlock, report
from nope_probe.studies.circuit.settings import Settings
from nope_probe.studies.engine import Engine, ablation_of, are_finite
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes
from nope_probe.studies.page import with_page
from nope_probe.studies.study import Pass, Results, Study, calibration, run_study
from nope_probe.studies.tables import measures_table

ABLATED = "ablated"


class CaptureStages(Study[Settings]):
    """The stages of a block, of the intact model and, with an ablation, of the ablated model."""

    command = "circuit"
    function = "run_circuit"

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
        yield from calibration(engine, [ablation])
        if ablation.condition:
            yield Pass(key=ABLATED, engine=engine, read=self._read, ablation=ablation)

    def _read(self, engine: Engine, key: str, ablation: Ablation | None) -> StageMaps:
        maps = engine.stages(key, ablation, layer=self.settings.layer)
        validate_finite_stages(maps, f"the {key} model")
        return maps

    def analyse(self, results: Results) -> Run:
        """Measure the stages, and return the run."""
        session, layer = self.session, self.settings.layer
        maps = {name: results[name] for name in (INTACT.name, ABLATED) if name in results}
        shown, inputs, model = [*maps.values()][-1], session.sequences(), session.loaded.model
        blocks = {block.index: block for block in layers_of(model)}
        absent = absent_stages(blocks, layer, session.loaded.info.n_layers)
        block = StudiedBlock(
            layer=layer,
            components=tuple(components(model)),
            absent=dict[str, str](absent.items()),
        )
        manifest = replace(
            session.manifest_of(inputs),
            query_stride=query_stride(len(shown.query_positions)),
            removed=tuple(self.ablation.condition.ordered),
            results=asdict(block),
        )
        tensors = {"maps": map_arrays([*maps.values()]), "folds": fold_arrays(shown)}
        arrays = {
            file: {name: tensor.float().cpu().numpy() for name, tensor in of_file.items()}
            for file, of_file in tensors.items()
        }
        arrays["tokens"] = input_arrays(inputs)
        tables = {"stages": stages_table(maps, layer)}
        return with_page(session, Run(manifest=manifest, arrays=arrays, tables=tables), report)


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


def map_arrays(maps: Sequence[StageMaps]) -> dict[str, Tensor]:
    """Return a run's maps; with an ablation, the intact model's maps are the reference."""
    shown, arrays = maps[-1], dict[str, Tensor]()
    for letter in shown.folds:
        of_stage = shown.layer_maps(letter)
        arrays[f"gram/{letter}"] = shown.mean(letter)
        arrays[f"normalised/{letter}"] = shown.normalised(letter)
        arrays[f"se/{letter}"] = standard_error(of_stage.folds.maps, of_stage.weights)
        if len(maps) > 1:
            arrays[f"reference/{letter}"] = maps[0].mean(letter)
    if len(shown.query_positions) < next(iter(shown.folds.values())).shape[-1]:
        arrays["query_positions"] = shown.query_positions
    return arrays


def fold_arrays(maps: StageMaps) -> dict[str, Float[Tensor, "fold cell"]]:
    """Return the fold means of each stage as lower triangles, with which `compare` pairs runs."""
    stages = {letter: maps.layer_maps(letter).folds for letter in maps.folds}
    return {f"gram/{letter}": of.where.pack(of.maps) for letter, of in stages.items()}


def stages_table(maps: Mapping[str, StageMaps], layer: int) -> pd.DataFrame:
    """Return the table of stages: layer, model, stage, and the measures of scores for its map.

    Args:
        maps: the stages of the intact and of any ablated model.
        layer: the block under study, from 0; (h) and (i) belong to the next block.
    """
    measured = [
        ({"model": model, "stage": letter}, [measure_pattern(stages.layer_maps(letter).pattern)])
        for model, stages in maps.items()
        for letter in stages.folds
    ]
    table = measures_table(measured, [layer], labels=("model", "stage"))
    table["layer"] = [layer + STAGES[letter].block for letter in table["stage"]]
    return table


@takes(CaptureStages)
def run_circuit(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Any
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
