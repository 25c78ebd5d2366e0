"""From captured stages to what a run holds: maps, errors, a table, headline, manifest and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import measure
from nope_probe.analyses.trends import query_stride
from nope_probe.experiments.circuit.sections import headline, report
from nope_probe.experiments.tables import measures_table
from nope_probe.figures.explorer import Explorer
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.stages import STAGES, absent_stages
from nope_probe.hooks.removing.targets import components
from nope_probe.maps.centred import kept_cells
from nope_probe.maps.folds import pack_triangle
from nope_probe.maps.maps import StageMaps
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

INTACT, ABLATED = "intact", "ablated"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a block.

    Attributes:
        layer: the block, from 0.
        intact: of the intact model.
        ablated: of the ablated one; None without an ablation.
        removed: what the ablation removed: components, and `norms`.
    """

    layer: int
    intact: StageMaps
    ablated: StageMaps | None
    removed: tuple[str, ...]


def analyse(session: Session[RunSettings], stages: Stages, explorer: Explorer | None = None) -> Run:
    """Measure the stages, and return the run."""
    inputs, layer = session.sequences(), stages.layer
    skip_keys = session.settings.n_skipped(inputs)
    maps = [stages.intact, *([] if stages.ablated is None else [stages.ablated])]
    table = stages_table(maps, layer, skip_keys)
    model = session.loaded.model
    manifest = {
        **session.provenance(),
        **input_record(inputs, skip_keys, stages.intact.counts),
        "query_stride": query_stride(inputs.inputs.shape[1]),
        "layer": layer,
        "components": list(components(model)),
        "removed": list(stages.removed),
        "absent": absent_stages(layers_of(model), layer),
    }
    manifest["headline"] = headline(manifest, table)
    arrays = {name: each.float().cpu().numpy() for name, each in _arrays(maps).items()}
    run = Run(
        manifest=manifest,
        arrays={"maps": arrays, "tokens": input_arrays(inputs), "folds": _folds(maps[-1])},
        tables={"stages": table},
    )
    return replace(run, page=report(run, explorer).html(manifest))


def _arrays(maps: Sequence[StageMaps]) -> dict[str, Float[Tensor, "row_pos col_pos"]]:
    """Return a run's maps; the intact model's are the reference if there is an ablated one."""
    shown = maps[-1]
    means = {letter: shown.mean(letter) for letter in shown.folds}
    found = {f"gram/{letter}": mean for letter, mean in means.items()}
    found |= {f"normalised/{letter}": shown.normalised(letter) for letter in shown.folds}
    found |= {
        f"se/{letter}": standard_error(folds, shown.counts) for letter, folds in shown.folds.items()
    }
    if len(maps) > 1:
        found |= {f"reference/{letter}": maps[0].mean(letter) for letter in maps[0].folds}
    return found


def _folds(maps: StageMaps) -> dict[str, Float[np.ndarray, "fold cell"]]:
    """Return the fold means of each stage as lower triangles, from which `compare` pairs runs."""
    return {
        f"gram/{letter}": pack_triangle(folds).float().cpu().numpy()
        for letter, folds in maps.folds.items()
    }


def stages_table(maps: Sequence[StageMaps], layer: int, skip_keys: int) -> pd.DataFrame:
    """Return the table of stages: layer, model, stage, and its map measured as if it were scores.

    A stage with a sliding window, which hides keys before the query, has no row.

    Args:
        maps: the intact model's stages and, for an ablation, the ablated model's.
        layer: the block under study, from 0; (h) and (i) belong to the next.
        skip_keys: how many first keys to leave out.
    """
    table = measures_table(
        (
            (
                {"model": model, "stage": letter},
                measure(folds[:, None], skip_keys, counts=each.counts),
            )
            for model, each in zip((INTACT, ABLATED), maps, strict=False)
            for letter, folds in each.folds.items()
            if _has_all_keys(folds)
        ),
        labels=("model", "stage"),
    )
    table["layer"] = [layer + STAGES[letter].block for letter in table["stage"]]
    return table


def _has_all_keys(folds: Float[Tensor, "fold row_pos col_pos"]) -> bool:
    return bool(folds[:, kept_cells(folds.shape[-1])].isfinite().all())
