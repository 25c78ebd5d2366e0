"""From captured score maps to what a run holds: maps, errors, tables, manifest and page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.noise import standard_error
from nope_probe.analyses.pattern import diagonal_normalised, measure
from nope_probe.data import Windows
from nope_probe.errors import UserError
from nope_probe.hooks.capture import ScoreMaps, pooled
from nope_probe.models import Loaded
from nope_probe.provenance import kept_inputs, provenance
from nope_probe.report_scores import scores_page
from nope_probe.results import Run
from nope_probe.summary_scores import answer
from nope_probe.tables import measures_table, spread

INTACT = "intact"
HEAD_MEASURES = ("amplitude", "locality", "relative_r2", "edge_contrast")


def assemble(
    *,
    settings: Mapping[str, Any],
    loaded: Loaded,
    inputs: Windows,
    measured: ScoreMaps,
    skip_keys: int,
    started: float,
) -> Run:
    """Measure the maps and put a run together.

    Raises:
        UserError: if a layer masks keys before the query, so that its pattern cannot be measured.
    """
    _refuse_windowed(measured.mean)
    tables = {"pattern": measures_table([({"kept": INTACT}, measure(measured.folds, skip_keys))])}
    if measured.per_head is not None:
        tables["heads"] = heads_table(measured.per_head, skip_keys)
    maps = score_arrays(measured)
    manifest = {
        **provenance(
            settings=settings,
            loaded=loaded,
            inputs=inputs,
            skip_keys=skip_keys,
            started=started,
        ),
        "conditions": [INTACT],
    }
    return Run(
        manifest=manifest,
        arrays={"tokens": kept_inputs(inputs), "maps": maps},
        tables=tables,
        page=scores_page(maps, tables, manifest, answer(manifest, tables)),
    )


def score_arrays(measured: ScoreMaps) -> dict[str, np.ndarray]:
    """Give the maps that a run keeps, float32, in nats, NaN where the model masks.

    `score`, `se` (its standard error, from folds) and `normalised` (less each diagonal's mean, the
    paper's Figure 5) are [n_layers, query_pos, key_pos]; `score_per_head`, where heads were kept,
    is [n_layers, head, query_pos, key_pos].
    """
    maps = {
        "score": measured.mean,
        "se": standard_error(measured.folds),
        "normalised": diagonal_normalised(measured.mean),
    }
    if measured.per_head is not None:
        maps["score_per_head"] = pooled(measured.per_head, measured.counts)
    return {name: each.float().numpy() for name, each in maps.items()}


def heads_table(
    per_head: Float[Tensor, "fold layer head query_pos key_pos"], skip_keys: int
) -> pd.DataFrame:
    """Tabulate each head's pattern: layer and head from 1, four measures with 95% intervals."""
    return pd.DataFrame(
        {
            "layer": layer + 1,
            "head": head + 1,
            **{k: v for name in HEAD_MEASURES for k, v in spread(getattr(m, name), name).items()},
        }
        for layer in range(per_head.shape[1])
        for head, m in enumerate(measure(per_head[:, layer], skip_keys))
    )


def _refuse_windowed(mean: Float[Tensor, "layer query_pos key_pos"]) -> None:
    """Refuse maps with blank cells below the diagonal: the layer's sliding window is too short."""
    n = mean.shape[-1]
    for layer, cells in enumerate(mean, 1):
        blank = ~cells[torch.ones(n, n, dtype=torch.bool).tril()].isfinite()
        if blank.any():
            seen = int(cells[-1].isfinite().sum())
            raise UserError(
                f"layer {layer} sees a sliding window of {seen} tokens, so that a pattern over {n} "
                f"cannot be measured; lower --seq-len to {seen}"
            )
