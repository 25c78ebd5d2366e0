"""The ablate command's report, from what a run folder holds: no model and no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nope_probe import figures, figures_bars
from nope_probe.report import Section, page

CELLS = 1_600_000


def ablation_page(
    maps: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    answer: Sequence[str],
) -> str:
    """Write the report of an ablation run.

    Args:
        maps: `score/<kept>`, `source/<term>`, `route/<name>`, `shapley/<player>` and
            `shapley_circuits/<player>`, each [n_layers, query_pos, key_pos] in nats; the first of
            the manifest's conditions names the intact model's map.
        tables: `sources`, `players`, `interactions`, `pattern`, `controls`, `routes`; those that a
            run does not have may be missing.
        manifest: what was run.
        answer: the result, a sentence each.

    Raises:
        KeyError: if the intact model's map is missing.
    """
    model = manifest.get("model", {})
    name = model.get("name", "a model") if isinstance(model, Mapping) else str(model)
    title = f"Where the positional pattern of {name} comes from"
    sections = _sections(maps, tables, manifest)
    return page(title, answer, sections, manifest)


def _sections(
    maps: Mapping[str, Any], tables: Mapping[str, pd.DataFrame], manifest: Mapping[str, Any]
) -> list[Section]:
    score = np.asarray(maps[f"score/{manifest['conditions'][0]}"])
    n_maps = len(maps) * len(score)
    size = max(8, int((CELLS / n_maps) ** 0.5))
    sections = [
        Section(
            title="Scores",
            figure=figures.score_maps(score, max_positions=size),
            caption="The mean score of each query for each key in the intact model.",
        )
    ]
    for prefix in ("source", "shapley_circuits", "shapley", "route"):
        terms = {
            key.split("/", 1)[1]: np.asarray(value)
            for key, value in maps.items()
            if key.startswith(f"{prefix}/")
        }
        if terms:
            figure = figures.term_maps(terms, title=prefix, max_positions=size)
            sections.append(Section(title=prefix, figure=figure, caption=""))
    if "sources" in tables:
        sections.append(
            Section(
                title="Sources",
                figure=figures_bars.source_shares(tables["sources"]),
                caption="",
                table=tables["sources"],
            )
        )
    return sections
