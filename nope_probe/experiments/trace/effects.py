"""The loss of a reader's pattern without a writer's position: in total, and directly.

The exact share of a writer is its direct path, through the reader's norm, W_Q and W_K, with the
norm's scale of every token held fixed. Here the model runs without the writer's position, and the
blocks between the writer and the reader respond.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from torch import Tensor

from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern_rows import ContrastGram
from nope_probe.analyses.positions import direct_share, readers
from nope_probe.components import Ablation
from nope_probe.experiments.engine import Engine
from nope_probe.experiments.tables import Row, interval_columns, interval_names
from nope_probe.hooks.layers.attached_hooks import hooks_in_place
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.replacements import block_of_writer, without_position
from nope_probe.maps.positions import PositionSums
from nope_probe.maps.stored_maps import LayerFolds, TensorFolds

MOST_HEADS = 4  # heads measured per MLP, because the MLP may have passed on their output


class Pair(NamedTuple):
    """A writer, and the layer (or head) that reads it."""

    layer: int
    head: int | None
    writer: str

    @property
    def reader(self) -> tuple[int, int | None]:
        """The layer and head of the reader."""
        return self.layer, self.head


def measure_effects(
    engine: Engine,
    sums: PositionSums,
    writers: pd.DataFrame,
    *,
    skip_keys: int,
    n_pairs: int = 6,
) -> pd.DataFrame:
    """Return the share of a reader's pattern that is lost without a writer's position.

    The strongest pairs of writer and reader are measured. If the writer is an MLP, the heads whose
    output it reads are measured on the same reader. A run of the model without a writer's position
    serves all readers; every direct path into a layer needs its own run.

    Args:
        engine: the model on the sequences of the run.
        sums: the readers' sums, on the same sequences in the same folds.
        writers: the `writer_table` of the sums, or its rows of some readers.
        skip_keys: how many first keys the patterns leave out.
        n_pairs: how many of the strongest pairs to measure.

    Returns:
        A row for each pair, the strongest first: `layer`, `head` if heads are readers, `writer`,
        and with their intervals `predicted`, the exact share; `direct`, the loss if only the
        reader's own input loses the writer's position; and `total`, the loss if all blocks after
        the writer lose it.
    """
    pairs = strongest_pairs(writers, n_pairs)
    heads = {pair: heads_read_by(engine, sums, pair) for pair in pairs}
    named = sorted({pair.writer for pair in pairs}.union(*heads.values()))
    removed = [Ablation(remove=[f"position[{writer}]"]) for writer in named]
    engine = engine.calibrated("effects-positions", removed, skip_keys)
    positions = {} if engine.calibration is None else engine.calibration.positions
    for pair, candidates in heads.items():
        by_size = sorted(candidates, key=lambda head: -float(positions[head].vectors.norm()))
        pairs += [Pair(*pair.reader, writer) for writer in by_size[:MOST_HEADS]]
    pairs = list(dict.fromkeys(pairs))
    known = {(name["layer"], name.get("head")): reader for name, reader in readers(sums, skip_keys)}
    per_head = "head" in writers

    def maps(
        key: str, layers: list[int], ablation: Ablation | None = None
    ) -> dict[tuple[int, int | None], TensorFolds]:
        captured = engine.scores(f"effects-{key}", ablation, layers=layers, per_head=per_head)
        queries = captured.query_positions
        if captured.per_head is None:
            folds = captured.folds.unbind(1)
            return {
                (layer, None): TensorFolds(folds[at], queries) for at, layer in enumerate(layers)
            }
        return {
            (layer, head): TensorFolds(captured.per_head[:, at, head], queries)
            for at, layer in enumerate(layers)
            for head in range(captured.per_head.shape[2])
        }

    intact = maps("intact", sorted({pair.layer for pair in pairs})) if pairs else {}
    rows: dict[Pair, Row] = {}
    for writer in dict.fromkeys(pair.writer for pair in pairs):
        own = [pair for pair in pairs if pair.writer == writer]
        layers = sorted({pair.layer for pair in own})
        total = maps(writer, layers, Ablation(remove=[f"position[{writer}]"]))
        direct: dict[tuple[int, int | None], TensorFolds] = {}
        for layer in layers:
            hook = without_position(engine.model, writer, positions[writer], layer)
            with hooks_in_place([hook]):
                direct |= maps(f"{writer}-to-L{layer}", [layer])
        for pair in own:
            reader, counts = pair.reader, sums.counts
            rows[pair] = {
                **pair._asdict(),
                **interval_columns(
                    predicted=direct_share(known[reader], writer),
                    direct=share_lost(intact[reader], direct[reader], skip_keys, counts),
                    total=share_lost(intact[reader], total[reader], skip_keys, counts),
                ),
            }
    columns = [*Pair._fields, *interval_names("predicted", "direct", "total")]
    table = pd.DataFrame([rows[pair] for pair in pairs], columns=columns)
    return table if per_head else table.drop(columns="head")


def strongest_pairs(writers: pd.DataFrame, n_pairs: int) -> list[Pair]:
    """Return the pairs with the largest shares, of keys and queries together, either sign."""
    rows = writers[writers["writer"] != "bias"].dropna(subset=["share"])
    names = [name for name in ("layer", "head", "writer") if name in rows]
    shares = rows.groupby(names, sort=False)["share"].sum()
    order = shares.abs().sort_values(ascending=False, kind="stable").index[:n_pairs]
    pairs = (dict(zip(names, key, strict=True)) for key in order)
    return [Pair(pair["layer"], pair.get("head"), pair["writer"]) for pair in pairs]


def heads_read_by(engine: Engine, sums: PositionSums, pair: Pair) -> list[str]:
    """Return the heads (or the attention) whose output an MLP reads directly.

    The heads belong to the MLP's block, or to the block before if attention and MLP are parallel.
    """
    if not pair.writer.startswith("MLP"):
        return []
    block = block_of_writer(pair.writer)
    if any(layer.index == block and layer.parallel for layer in layers_of(engine.model)):
        block -= 1
    names = sums.readers[pair.layer].keys
    return [name for name in names if name == f"ATTN{block}" or name.startswith(f"L{block}H")]


def share_lost(intact: LayerFolds, without: LayerFolds, skip_keys: int, counts: Tensor) -> Interval:
    """Return the lost share of a pattern v that becomes w, <v - w, v> / <v, v>."""
    gram = ContrastGram.of_layers({"v": intact, "w": without}, skip_keys, counts)
    return gram.share({"v": 1.0, "w": -1.0}, {"v": 1.0})
