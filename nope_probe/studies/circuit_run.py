"""What `circuit` runs: the stages of a block, and their measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure_pattern, query_stride
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Given, layers_of
from nope_probe.hooks.reading.accumulators import STAGES, absent_stages
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.maps import StageMaps
from nope_probe.removal import INTACT
from nope_probe.run.folder import Run
from nope_probe.run.session import Session, input_arrays
from nope_probe.studies.circuit import Settings, report
from nope_probe.studies.engine import Engine, ablation_of, are_finite
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.page import with_page
from nope_probe.studies.study import Pass, Results, Study, calibration
from nope_probe.studies.tables import interval_columns

if TYPE_CHECKING:
    from nope_probe.studies.options import CircuitOptions as Options

ABLATED = "ablated"


class CaptureStages(Study[Settings]):
    """The stages of a block, of the intact model and, with an ablation, of the ablated model."""

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        self.ablation = ablation_of(session.loaded.model, self.settings)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that capture the stages."""
        ablation, engine = self.ablation, Engine.of(self.session)
        yield Pass(key=INTACT.name, engine=engine, read=self._read, maps=len(STAGES))
        yield from calibration(engine, [ablation])
        if ablation.condition:
            n_maps = 2 * len(STAGES)  # those of the intact model stay in memory
            yield Pass(key=ABLATED, engine=engine, read=self._read, ablation=ablation, maps=n_maps)

    def _read(self, engine: Engine, key: str, ablation: Ablation) -> StageMaps:
        maps = engine.stages(key, ablation, layer=self.settings.layer)
        for letter, folds in maps.folds.items():
            n_rows, n = folds.shape[-2:]
            # Chosen rows have no cells j > i.
            below = torch.arange(n) <= maps.query_positions[:, None]
            if not are_finite(folds, maps.visible.get(letter, below | (n_rows == n))):
                raise UserError(f"non-finite values at stage ({letter}) of the {key} model")
        return maps

    def analyse(self, results: Results) -> Run:
        """Measure the stages, and return the run."""
        session, model, layer = self.session, self.session.loaded.model, self.settings.layer
        maps = {name: results[name] for name in (INTACT.name, ABLATED) if name in results}
        inputs, n_queries = session.sequences(), len(maps[INTACT.name].query_positions)
        blocks = {block.index: block for block in layers_of(model)}
        manifest = replace(
            session.manifest_of(inputs),
            query_stride=query_stride(n_queries),
            removed=tuple(self.ablation.named.ordered),
            results={
                "layer": layer,
                "components": [*components(model)],
                "absent": absent_stages(blocks, layer, session.loaded.info.n_layers),
            },
        )
        arrays = {**arrays_of([*maps.values()]), "tokens": input_arrays(inputs)}
        tables = {"stages": stages_table(maps, layer)}
        return with_page(session, Run(manifest=manifest, arrays=arrays, tables=tables), report)


def arrays_of(maps: Sequence[StageMaps]) -> dict[str, dict[str, np.ndarray]]:
    """Return the maps of a run, and their folds as lower triangles.

    With an ablation, the intact model's maps are the reference.
    """
    shown, means, folds = maps[-1], dict[str, Tensor](), dict[str, Tensor]()
    for letter in shown.folds:
        of_stage = shown.layer_maps(letter)
        means[f"gram/{letter}"] = shown.mean(letter)
        means[f"normalised/{letter}"] = shown.normalised(letter)
        means[f"se/{letter}"] = standard_error(of_stage.folds.maps, of_stage.weights)
        folds[f"gram/{letter}"] = of_stage.folds.where.pack(of_stage.folds.maps)
        if len(maps) > 1:
            means[f"reference/{letter}"] = maps[0].mean(letter)
    if len(shown.query_positions) < next(iter(shown.folds.values())).shape[-1]:
        means["query_positions"] = shown.query_positions
    return {
        file: {name: tensor.float().cpu().numpy() for name, tensor in of_file.items()}
        for file, of_file in (("maps", means), ("folds", folds))
    }


def stages_table(maps: Mapping[str, StageMaps], layer: int) -> pd.DataFrame:
    """Return the table of stages: layer, model, stage, and the measures of scores for its map.

    Args:
        maps: the stages of the intact and of any ablated model.
        layer: the block under study, from 0; (h) and (i) belong to the next block.
    """
    return pd.DataFrame(
        {
            **{"layer": layer + STAGES[letter].block, "model": model, "stage": letter},
            **interval_columns(**vars(measure_pattern(stages.layer_maps(letter).pattern))),
        }
        for model, stages in maps.items()
        for letter in stages.folds
    )


@partial(takes_options, Settings)
def run_circuit(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Unpack[Options]
) -> Run:
    """Capture the stages (a) to (i) of a block, as the `circuit` command does.

    Args:
        model: a name, as the command takes it, or a model that `load` takes or returns, of which
            all layers are studied by default.
        inputs: what `capture_scores` takes; by default the sequences that the options describe.
        out: a new folder for the run, or that of the same run; by default nothing is kept.
        options: the flags of `python -m nope_probe.circuit --help`, as in `seq_len=32`.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_circuit
        >>> run = run_circuit("nope-tiny", layer=1, n_seqs=16, remove="mask")
        >>> stages = run.tables["stages"]
        >>> stages.groupby("model")["stage"].agg("".join).to_dict()
        {'ablated': 'abcdefghi', 'intact': 'abcdefghi'}
    """
    return run_of(CaptureStages, Settings, model, inputs, out, options)
