"""The explorer: leads and patterns without what a reader chooses, of a run or in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.analyses.attribution import Values, values_in
from nope_probe.analyses.contrasts import contrast_grams
from nope_probe.errors import closed_choices
from nope_probe.figures.explorer import MEASURES, Explorer, RemovedMaps
from nope_probe.figures.names import row_name
from nope_probe.figures.panels import Pooled, RowMaps, pool_with_leads
from nope_probe.hooks.layers.model import Given, layers_of, skip_keys_of
from nope_probe.hooks.layers.objects import Model
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.maps.centred import kept_cells
from nope_probe.maps.layers import LayerMaps, shared_patterns
from nope_probe.models.info import LoadedModel
from nope_probe.models.parity import as_loaded
from nope_probe.removal import Gain
from nope_probe.run.processes import Progress
from nope_probe.run.sources import as_sequences, folds_for_intervals
from nope_probe.studies.ablate_plan import INTACT_ROW, Row, plan_of
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import run_passes
from nope_probe.studies.tables import columns_of
from nope_probe.studies.tidy import shown_layer

PAGE_BYTES = 900_000  # next to all other maps of a report
MAX_POSITIONS = 64  # of a map in the explorer, however long the sequences are
HEADS = "mean over heads"
Panels = Sequence[Sequence[LayerMaps]]  # [layer][panel]: the mean over heads, then the heads


@closed_choices("replacement", "gain")
def explore(
    model: Model | LoadedModel,
    tokens: Given,
    *,
    remove: Sequence[str] | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    replacement: Replacement = "mean",
    gain: Gain = "output",
) -> Explorer:
    """Run a model without each source and weight, and return the choice for a notebook.

    The explorer shows each head's pattern, its first key's lead, and what is left of both. It opens
    on the layer with the largest lead and pattern, without the mask. A progress bar goes to stderr.

    Args:
        model: what `load` takes in memory, or returns.
        tokens: `Sequences`, or what `capture_scores` takes; vectors for a parameter-free model.
            Some dozens of sequences suffice.
        remove: what can be removed besides the sources: components, the circuits `qk` and `ov`,
            unions such as `w_q+mlp`; `["sources"]` for the sources alone. By default W_Q, W_K,
            both, and W_O, if the model has them.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from, 4 or more; by default 8, or as many
            as there are sequences (documents) if these are fewer.
        replacement: what a removed weight is replaced by.
        gain: the size of a replacement that is no constant output.

    Returns:
        An explorer that notebooks show, and that `save` writes as a page.

    Raises:
        UserError: for components that the model lacks.

    Example:
        >>> from nope_probe import figures, load, sequences
        >>> loaded = load("nope-tiny", n_layers=2)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=8, seq_len=12)
        >>> explorer = figures.explore(loaded.model, data, remove=["qk"], n_folds=4)
        >>> explorer.view.maps.shape  # condition, layer, head and their mean, query, key
        (3, 2, 5, 12, 12)
    """
    loaded = as_loaded(model)
    model, name = loaded.model, loaded.info.name
    data, by = as_sequences(model, tokens), Ablation(replacement=replacement, gain=gain)
    kept_cells(data.inputs.shape[1], skip_keys_of(data.inputs))  # raises where no keys are left
    layers = [layer.index for layer in layers_of(model)]
    options = {"ablations": (by,), "heads": "everywhere"}
    plan = plan_of(loaded, data.inputs, remove, layers=layers, **options)
    engine = Engine(
        model=model,
        inputs=data.inputs,
        documents=data.documents,
        batch_size=batch_size,
        n_folds=folds_for_intervals(data, n_folds),
    )
    passes = [*plan.passes(engine)]
    total = len(passes) * len(data.inputs)
    with Progress(total=total, desc="patterns", unit="seq", leave=False) as bar:
        on_bar = replace(engine, stream=OnBar(bar))
        results = run_passes(replace(one, engine=on_bar) for one in passes)
    maps = {
        row: [[layer, *(layer.heads if len(layer.heads) > 1 else ())] for layer in of_row.values()]
        for row, of_row in plan.maps(results).items()
    }
    return explorer_of(
        maps,
        values_of_panels(maps),
        layers=layers,
        title=f"The positional pattern of {name or 'a model'}, component by component",
        note=f"Means over {len(data.inputs):,} sequences of {data.inputs.shape[1]} positions. What "
        "is removed is removed in every layer. Brackets: 95% intervals.",
    )


class OnBar(StreamCheckpoint):
    """Counts the sequences of a stream on a progress bar."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar

    def advance(self, n_seqs: int) -> None:
        """Count a batch."""
        self.bar.update(n_seqs)


def values_of_panels(maps: Mapping[Row, Panels]) -> list[list[dict[Row, Values]]]:
    """Return the values of each layer and panel in every row, nats."""
    return [
        [
            {row: values_in(grams, row, INTACT_ROW) for row in maps}
            for panels in zip(*layers, strict=True)
            for grams in [contrast_grams(dict(zip(maps, shared_patterns(panels), strict=True)))]
        ]
        for layers in zip(*maps.values(), strict=True)
    ]


def explorer_of(
    maps: Mapping[Row, Panels],
    values: Sequence[Sequence[Mapping[Row, Values]]],
    *,
    layers: Sequence[int],
    title: str,
    note: str,
    max_bytes: int | None = None,
) -> Explorer:
    """Return the explorer of leads and patterns in some rows, the intact model first.

    It opens on the layer that all commands show first, without the mask.

    Args:
        maps: score maps by layer and panel, in the rows to choose from.
        values: lead, amplitude and kept by layer and panel, in every row.
        layers: the layers' numbers.
        title: the explorer's title.
        note: sentences about the maps.
        max_bytes: of the page.
    """
    rows, n_panels = [*maps], len(maps[INTACT_ROW][0])
    small = [[[_pooled(panel) for panel in of_layer] for of_layer in maps[row]] for row in rows]
    ends = [
        [[[getattr(x[row], of["name"]).ends for of in MEASURES] for x in layer] for layer in values]
        for row in rows
    ]
    names = [condition.name for condition, _ in rows]
    view = RemovedMaps(
        conditions=tuple(names),
        labels=tuple(row_name(condition.name, by, names) for condition, by in rows),
        layers=tuple(layers),
        panels=(HEADS, *(f"H{head}" for head in range(n_panels - 1))),
        maps=np.array([[[x.values[0] for x in panels] for panels in row] for row in small]),
        leads=np.array([[[_leads(x) for x in panels] for panels in row] for row in small]),
        measures=np.array(ends),
        block=small[0][0][0].block,
    )
    intact = [columns_of(layer[0][INTACT_ROW], ("lead", "amplitude")) for layer in values]
    counts = maps[INTACT_ROW][0][0].counts.tolist()
    first = shown_layer(pd.DataFrame(intact).assign(layer=[*layers]), counts)
    options = {} if max_bytes is None else {"max_bytes": max_bytes}
    return Explorer(
        title=title,
        view=view,
        layer=0 if first is None else [*layers].index(first),
        removed=min(1, len(rows) - 1),
        note=note,
        **options,
    )


def _pooled(layer: LayerMaps) -> Pooled:
    pattern = layer.pattern.mean_with_lead()
    values, queries = pattern[None].numpy(), layer.queries.numpy()
    maps = RowMaps(values=values, queries=queries, skip_keys=layer.skip_keys)
    return pool_with_leads(maps, MAX_POSITIONS)


def _leads(maps: Pooled) -> Float[np.ndarray, " query_block"]:
    return np.full(len(maps.values[0]), np.nan) if maps.leads is None else maps.leads[0]
