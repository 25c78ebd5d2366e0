"""The attribution of the `ablate` command in memory, for any model of TransformerLens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.attribution import LayerAttribution
from nope_probe.components import DEFAULT_REPLACEMENTS, Gain, Replacement, Substitute
from nope_probe.errors import closed_choices
from nope_probe.experiments.ablation.analyse import Analysis
from nope_probe.experiments.ablation.maps import RunMaps
from nope_probe.experiments.ablation.plan import Scope, make_plan, measure_conditions
from nope_probe.experiments.engine import (
    Engine,
    as_sequences,
    first_layers,
    folds_for_intervals,
    name_of,
    validate_first_sequence,
)
from nope_probe.experiments.removals import irreplaceable, without_effect
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.removing.targets import components
from nope_probe.maps.centred import kept_cells
from nope_probe.maps.rows import choose_rows
from nope_probe.models.info import describe
from nope_probe.runtime.checkpoint import RunCheckpoint

MOST_IN_MEMORY = 1 << 30  # bytes of fold maps


@dataclass(frozen=True, kw_only=True, repr=False)
class AblationStudy:
    """Where a model's positional pattern comes from, and which weights it needs.

    Attributes:
        tables: per name of a run's CSV file, its table: `sources`, `players`, `interactions`,
            `pattern`, `non_relative`, `controls`, `mean_covariance`, `offsets`.
        maps: under the names of a run's maps.safetensors, float32 [layer, row, key_pos] in
            nats: `score/<kept>`, `pattern/all`, `source/<term>`, `shapley/<player>`, ...
        layers: the attribution of each layer, which the tables are made from.
        skip_keys: how many first keys the patterns leave out.
        query_positions: the queries of the maps' rows.
    """

    tables: dict[str, pd.DataFrame]
    maps: dict[str, Float[np.ndarray, "layer row key_pos"]]
    layers: list[LayerAttribution]
    skip_keys: int
    query_positions: Int[Tensor, " row"]

    def __repr__(self) -> str:
        """Return the shares of the sources per layer, and what else there is."""
        first = "first key" if self.skip_keys == 1 else f"first {self.skip_keys} keys"
        skipped = f", the {first} left out" if self.skip_keys else ""
        lines = [
            f"  L{layer.layer}  "
            + ", ".join(f"{source.term} {source.share.value:.2f}" for source in layer.sources)
            for layer in self.layers
        ]
        shape = " × ".join(map(str, self.maps["pattern/all"].shape))
        return "\n".join(
            [
                f"AblationStudy: shares of the positional pattern{skipped}",
                *lines,
                f"tables: {', '.join(name for name, table in self.tables.items() if len(table))}",
                fill(
                    f"maps ({shape}): {', '.join(self.maps)}",
                    width=100,
                    subsequent_indent="  ",
                    break_on_hyphens=False,
                ),
            ]
        )

    @property
    def sources(self) -> pd.DataFrame:
        """Per layer and term (content, mask, rope, ...), its RMS in nats and its share."""
        return self.tables["sources"]

    @property
    def players(self) -> pd.DataFrame:
        """Per layer and player, its Shapley share, what is lost without it, and alone."""
        return self.tables["players"]


@closed_choices("replacement", "gain", "scope", "skip_keys")
def run_ablations(
    model: HookedModel,
    tokens: Given,
    *,
    players: Sequence[str] | None = None,
    n_layers: int | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    replacement: Replacement | Sequence[Replacement] | None = None,
    gain: Gain = "output",
    scope: Scope = "both",
    skip_keys: int | Literal["auto"] = "auto",
    query_rows: int | None = None,
    shuffled: Given | None = None,
    reparametrise: int = 0,
    seed: int = 0,
) -> AblationStudy:
    """Find where a model's positional pattern comes from, and which weights it needs.

    Runs the model with and without its mask, position encoding and weights, as the `ablate` command
    does. Fold maps are in memory or, above 1 GB, in a temporary folder. A progress bar goes to
    stderr.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: `Sequences`, or what `capture_scores` takes; vectors for a parameter-free model.
        players: what is kept or removed: components, the circuits `qk` and `ov`, unions such as
            `w_q+mlp`, at most 10; or `["sources"]` alone. By default mask, rope, w_q, w_k and w_o,
            and the circuits beside.
        n_layers: of how many first layers to map those that attend; all by default.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from, 4 or more; the sequences of one
            document share one. By default 8, or as many as there are documents if these are fewer.
        replacement: what a removed weight is replaced by; of several, the tables of players and
            interactions have all, and everything else the first. By default identity, and beside
            it mean, for what is lost without each weight.
        gain: the size of the replacements identity and random.
        scope: for a layer's scores, remove in the layers before it, in itself, or in both.
        skip_keys: first keys to leave out; `auto`: 1 where all sequences begin with the same token
            (a BOS token, which is an attention sink), else 0.
        query_rows: how many rows the maps have; see `capture_scores`.
        shuffled: the same sequences with their tokens permuted, for a control that has no content.
        reparametrise: in how many random reparametrisations to repeat the first set of players.
        seed: the seed of these, and of the replacement random.

    Raises:
        ValueError: for players that the model lacks or more than 10, too few sequences or layers,
            reparametrisations without a weight, a control for shuffled tokens, or scores that are
            not finite.

    Example:
        >>> from nope_probe import load, run_ablations, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=64, seq_len=16)
        >>> study = run_ablations(loaded.model, data, players=["mask", "qk"])
        >>> study.sources.query("layer == 2 and term == 'mask'")["share"].item() > 0.9
        True
        >>> study.maps["source/mask"].shape
        (3, 16, 16)
    """
    data, info = as_sequences(model, tokens), describe(model, name_of(model))
    skipped = int(data.bos) if skip_keys == "auto" else skip_keys
    control = None if shuffled is None else as_sequences(model, shuffled)
    n_folds = folds_for_intervals(data, n_folds)
    layers = first_layers(model, n_layers)
    if control is not None and data.kind == "shuffled":
        raise ValueError("the tokens are shuffled already: shuffled tokens are no control for them")
    kept_cells(data.inputs.shape[1], skipped)  # raises where no keys are left
    plan = make_plan(
        components(model),
        players,
        info.parameter_free,
        left_out=irreplaceable(model) | without_effect(model, data.inputs, len(layers)),
    )
    if reparametrise and not plan.removes_weights:
        raise ValueError("reparametrise has no effect where no weight is removed")
    names = (replacement,) if isinstance(replacement, str) else replacement
    substitutes = tuple(
        Substitute(replacement=name, gain=gain, seed=seed) for name in names or DEFAULT_REPLACEMENTS
    )
    n_whole = len(substitutes) if names else 1
    plan = replace(
        plan,
        layers=layers,
        substitutes=substitutes[:n_whole],
        checks=substitutes[n_whole:] if plan.removes_weights else (),
        scope=scope,
        reparametrise=reparametrise,
    )
    validate_first_sequence(model, data.inputs, plan.layers)
    queries = choose_rows(data.inputs.shape[1], query_rows)
    n_cells_of_run = len(plan.conditions) * len(plan.layers) * n_folds * int((queries + 1).sum())
    with _checkpoint(n_bytes=8 * n_cells_of_run) as checkpoint:
        engine = Engine(
            model=model,
            inputs=data.inputs,
            documents=data.documents,
            checkpoint=checkpoint,
            batch_size=batch_size,
            n_folds=n_folds,
            query_rows=query_rows,
        )
        with checkpoint.progress(plan.keys(control is not None), len(data)):
            measured = measure_conditions(engine, plan, control)
        analysis = Analysis(plan=plan, measured=measured, tokens=data.kind, skip_keys=skipped)
        return AblationStudy(
            tables=analysis.tables(),
            maps=_maps(RunMaps(plan, measured, skipped)),
            layers=analysis.layers,
            skip_keys=skipped,
            query_positions=queries,
        )


@contextmanager
def _checkpoint(n_bytes: int) -> Iterator[RunCheckpoint]:
    """Yield a checkpoint in memory or, for larger maps, in a temporary folder."""
    if n_bytes <= MOST_IN_MEMORY:
        yield RunCheckpoint()
        return
    with (
        TemporaryDirectory(prefix="nope-probe-") as folder,
        RunCheckpoint(Path(folder, "maps"), every=sys.maxsize) as checkpoint,
    ):
        yield checkpoint


def _maps(maps: RunMaps) -> dict[str, Float[np.ndarray, "layer row key_pos"]]:
    arrays = {name: np.empty(shape, np.float32) for name, shape in maps.shapes.items()}
    for name, layer, start, rows in maps.blocks():
        arrays[name][layer, start : start + len(rows)] = rows.float().numpy()
    return arrays
