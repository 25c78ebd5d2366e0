"""From the writers' parts of each reader to tables, maps and a run, on disk or in memory.

The exact share of a writer is its direct path, through the reader's norm, W_Q and W_K, with the
norm's scale of every token held fixed. `measure_effects` runs the model without the writer's
position, so that the blocks between the writer and the reader respond.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern_rows import ContrastGram
from nope_probe.analyses.positions import clock, direct_share, readers, scores_without, term_maps
from nope_probe.analyses.reader import Reader, Side
from nope_probe.conditions import Writer
from nope_probe.experiments.engine import Engine
from nope_probe.experiments.sections import with_page
from nope_probe.experiments.tables import (
    Row,
    interval_columns,
    interval_names,
    term_table,
    writer_table,
)
from nope_probe.experiments.trace.sections import lead, report
from nope_probe.figures.position_figure import ALL, CLOCKS
from nope_probe.figures.words import reader_of, with_readers
from nope_probe.hooks.ablation import directly_ablated
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.folds import folds_of, pooled
from nope_probe.maps.layers import LayerMaps, patterns_of_others
from nope_probe.maps.positions import PositionSums
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import RunSettings

EFFECTS = ("predicted", "held", "direct", "norm", "total")  # columns of `effects.csv`
LEAST_TESTED = 0.05  # of a pattern: no smaller share is tested by a removal
MOST_HEADS = 4  # heads measured per MLP, because the MLP may have passed on their output
ReaderMaps = dict[tuple[int, int | None], LayerMaps]  # by layer and head


class Pair(NamedTuple):
    """A writer, and the layer (or head) that reads it."""

    layer: int
    head: int | None
    writer: Writer

    @property
    def reader(self) -> tuple[int, int | None]:
        """The layer and head of the reader."""
        return self.layer, self.head


def measure_effects(
    engine: Engine,
    sums: PositionSums,
    writers: pd.DataFrame,
    *,
    n_pairs: int = 6,
    least: float = 0.0,
) -> pd.DataFrame:
    """Return the share of a reader's pattern that is lost without a writer's position.

    The strongest pairs of writer and reader are measured. If the writer is an MLP, the heads whose
    output it reads are measured on the same reader. A run of the model without a writer's position
    serves all readers; every direct path into a layer needs its own run.

    Args:
        engine: the model on the sequences of the run.
        sums: the readers' sums, on the same sequences in the same folds.
        writers: the `writer_table` of the sums, or its rows of some readers.
        n_pairs: how many of the strongest pairs to measure.
        least: the loss of a pattern, without the position of all heads that an MLP reads, below
            which the heads are not measured one by one.

    Returns:
        A row for each pair, the strongest first: `layer`, `head` if heads are readers, `writer`,
        and with their intervals `predicted`, the exact share; `held`, the loss if only the
        reader's own input loses the writer's position and the scales of its norms stay; `direct`,
        the loss if the scales follow, as in the model; `norm`, direct less held; and `total`, the
        loss if all blocks after the writer lose the position.
    """
    pairs = strongest_pairs(writers, n_pairs)
    heads = {pair: heads_read_by(engine, sums, pair) for pair in pairs}
    together = {pair: Writer(f"ATTN{own[0].block}") for pair, own in heads.items() if own}
    named = sorted({pair.writer for pair in pairs}.union(*heads.values(), together.values()))
    removals = {writer: Ablation(remove=[writer.removal]) for writer in named}
    engine = engine.calibrated("effects-positions", removals.values())
    per_head, layers = "head" in writers, {pair.layer for pair in pairs}
    captured = partial(_reader_maps, engine, per_head)
    # Of the writers' blocks too: later passes start with the input of these blocks.
    blocks = {*layers, *(writer.block for writer in named)} & {*sums.readers}
    intact = captured("intact", blocks) if pairs else {}

    @cache
    def total(writer: Writer) -> ReaderMaps:
        read_by = {pair.layer for pair in pairs if writer in (pair.writer, together.get(pair))}
        return captured(writer, read_by, removals[writer])

    positions = {} if engine.calibration is None else engine.calibration.positions
    for pair, candidates in heads.items():
        if not candidates or could_be(
            share_lost(intact[pair.reader], total(together[pair])[pair.reader]), least
        ):
            by_size = sorted(candidates, key=lambda head: -float(positions[head].vectors.norm()))
            pairs += [Pair(*pair.reader, writer) for writer in by_size[:MOST_HEADS]]
    pairs = list(dict.fromkeys(pairs))
    known = {(name["layer"], name.get("head")): reader for name, reader in readers(sums)}
    rows: dict[Pair, Row] = {}
    for writer in dict.fromkeys(pair.writer for pair in pairs):
        own = [pair for pair in pairs if pair.writer == writer]
        direct: ReaderMaps = {}
        for layer in sorted({pair.layer for pair in own}):
            with directly_ablated(engine.model, writer, positions[writer], layer):
                direct |= captured(f"{writer}-to-L{layer}", [layer])
        for pair in own:
            reader = pair.reader
            of_maps = intact[reader], direct[reader], total(writer)[reader]
            rows[pair] = pair._asdict() | interval_columns(
                predicted=direct_share(known[reader], writer),
                **shares_lost(*of_maps, known[reader], writer),
            )
    columns = [*Pair._fields, *interval_names(*EFFECTS)]
    table = pd.DataFrame([rows[pair] for pair in pairs], columns=columns)
    return table if per_head else table.drop(columns="head")


def _reader_maps(
    engine: Engine,
    per_head: bool,
    key: str,
    layers: Collection[int],
    ablation: Ablation | None = None,
) -> ReaderMaps:
    """Return the score maps of readers by layer and head; None is the mean over heads."""
    captured = engine.scores(f"effects-{key}", ablation, layers=sorted(layers), per_head=per_head)
    by_layer = captured.by_layer
    if not per_head:
        return {(layer, None): maps for layer, maps in by_layer.items()}
    return {
        (layer, head): maps
        for layer, of_layer in by_layer.items()
        for head, maps in enumerate(of_layer.heads)
    }


def that_could_matter(writers: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the writers whose share, of keys and queries together, could be 5%."""
    names = [name for name in ("layer", "head", "writer") if name in writers]
    bounds = writers.groupby(names)[["share_low", "share_high"]].transform("sum")
    return writers[bounds.abs().max(axis=1) >= LEAST_TESTED]


def strongest_pairs(writers: pd.DataFrame, n_pairs: int) -> list[Pair]:
    """Return the pairs with the largest shares, of keys and queries together, either sign."""
    rows = writers[writers["writer"] != "bias"].dropna(subset=["share"])
    names = [name for name in ("layer", "head", "writer") if name in rows]
    shares = rows.groupby(names, sort=False)["share"].sum()
    order = shares.abs().sort_values(ascending=False, kind="stable").index[:n_pairs]
    pairs = (dict(zip(names, key, strict=True)) for key in order)
    return [Pair(pair["layer"], pair.get("head"), Writer(pair["writer"])) for pair in pairs]


def heads_read_by(engine: Engine, sums: PositionSums, pair: Pair) -> list[Writer]:
    """Return the heads (or the attention) whose output an MLP reads directly.

    The heads belong to the MLP's block, or to the block before if attention and MLP are parallel.
    """
    if pair.writer.kind != "MLP":
        return []
    block = pair.writer.block
    if any(layer.index == block and layer.parallel for layer in layers_of(engine.model)):
        block -= 1
    writers = map(Writer, sums.readers[pair.layer].keys)
    return [writer for writer in writers if writer.is_attention and writer.block == block]


def could_be(share: Interval, least: float) -> bool:
    """Return whether a share of either sign could be so large."""
    return not max(abs(share.low), abs(share.high)) < least


def share_lost(intact: LayerMaps, without: LayerMaps) -> Interval:
    """Return the lost share of a pattern v that becomes w, <v - w, v> / <v, v>."""
    v, w = patterns_of_others([intact, without])
    gram = ContrastGram.of({"v": v, "w": w})
    return gram.share({"v": 1.0, "w": -1.0}, {"v": 1.0})


def shares_lost(
    intact: LayerMaps, direct: LayerMaps, total: LayerMaps, reader: Reader, writer: Writer
) -> dict[str, Interval]:
    """Return the shares of a reader's pattern that are lost without a writer's position.

    Args:
        intact: the reader's scores.
        direct: its scores where its own input loses the position.
        total: its scores where all blocks after the writer lose the position.
        reader: its mean queries and keys.
        writer: the writer.
    """
    linear, held = (
        LayerMaps.of(scores, reader.counts, reader.sums.query_positions, reader.skip_keys)
        for scores in (reader.scores, scores_without(reader, writer))
    )
    maps = {"intact": intact, "direct": direct, "total": total, "linear": linear, "held": held}
    patterns = patterns_of_others([*maps.values()])
    gram = ContrastGram.of(dict(zip(maps, patterns, strict=True)))

    def lost(**contrast: float) -> Interval:
        return gram.share(contrast, {"intact": 1.0})

    return {
        "held": lost(linear=1.0, held=-1.0),
        "direct": lost(intact=1.0, direct=-1.0),
        "norm": lost(intact=1.0, direct=-1.0, linear=-1.0, held=1.0),
        "total": lost(intact=1.0, total=-1.0),
    }


@dataclass(frozen=True, kw_only=True)
class TraceTables:
    """The tables and maps of who writes the position that each layer (or head) of a model reads.

    Attributes:
        terms: a row for each term of a reader's pattern: its RMS in nats, its share, and the share
            of it that is a function of the distance.
        writers: a row for each reader, side (key or query) and writer: its share of the pattern.
        effects: for the strongest writers, the share that is lost without their position; empty
            unless measured.
        clocks: a reader's mean keys and queries along their two principal axes, by position.
        maps: the patterns of the terms by name, such as `L1/rotation`, nats; where only some
            queries have rows, also the `query_positions` of the rows.
    """

    terms: pd.DataFrame
    writers: pd.DataFrame
    effects: pd.DataFrame
    clocks: pd.DataFrame
    maps: dict[str, Float[np.ndarray, "row key_pos"] | Int[np.ndarray, " row"]]

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by the names of a run's CSV files."""
        names = ("terms", "writers", "effects", "clocks")
        return {name: getattr(self, name) for name in names}

    def with_effects(
        self, engine: Engine, sums: PositionSums, confirm: int, reader: str | None = None
    ) -> TraceTables:
        """Return the trace with the measured effects of the strongest writers.

        Args:
            engine: the model, on the sequences of the sums.
            sums: the writers' parts of each reader.
            confirm: how many pairs of writer and reader to measure the effect of, at most: the
                pairs are left out whose share is surely below 5%.
            reader: the layer or head whose writers are measured; by default all readers.
        """
        of_reader = with_readers(self.writers)["reader"] == reader
        own = self.writers if reader is None else self.writers[of_reader]
        effects = measure_effects(
            engine, sums, that_could_matter(own), n_pairs=confirm, least=LEAST_TESTED
        )
        return replace(self, effects=effects)


def trace_of(sums: PositionSums) -> TraceTables:
    """Return the tables and maps of the writers' parts of each reader, without effects.

    Args:
        sums: the writers' parts of each reader.
    """
    writers = writer_table(sums)
    writers = writers.sort_values(
        [name for name in ("layer", "head", "side", "writer") if name in writers],
        key=lambda column: (
            column.map(lambda name: Writer(name).order) if column.name == "writer" else column
        ),
        ignore_index=True,
    )
    maps = {
        f"{reader_of(names)}/{term}": values.float().numpy()
        for names, of_reader in readers(sums)
        for term, values in term_maps(of_reader).items()
    }
    return TraceTables(
        terms=term_table(sums),
        writers=writers,
        effects=pd.DataFrame(),
        clocks=clock_table(sums, writers),
        maps=maps | queries_of(sums),
    )


def queries_of(sums: PositionSums) -> dict[str, np.ndarray]:
    """Return the queries of the maps' rows as an array of the run; empty if all have rows."""
    reader = next(iter(sums.readers.values()))
    n_rows, n = reader.scores.shape[-2:]
    if n_rows == n or reader.query_positions is None:
        return {}
    return {"query_positions": reader.query_positions.numpy()}


def analyse(session: Session[RunSettings], trace: TraceTables, reader: str | None = None) -> Run:
    """Return the run of a trace.

    Args:
        session: the run in progress.
        trace: its results.
        reader: the layer or head that the headline is about; by default the reader with the
            strongest pattern.
    """
    inputs, n_folds = session.sequences(), session.settings.folds
    counts = folds_of(len(inputs), n_folds, inputs.documents).bincount()
    manifest: dict[str, Any] = {
        **session.provenance(),
        **input_record(inputs, session.settings.n_skipped(inputs), counts),
        "reader": reader,
        "headline": [lead(trace.tables, reader, counts.tolist()).sentence],
    }
    arrays = {"maps": trace.maps, "tokens": input_arrays(inputs)}
    run = Run(manifest=manifest, arrays=arrays, tables=trace.tables)
    return with_page(session, run, report)


def clock_table(sums: PositionSums, writers: pd.DataFrame) -> pd.DataFrame:
    """Return the table of clocks: mean keys and queries along their two principal axes.

    Args:
        sums: the writers' parts of each reader.
        writers: `writers.csv`, which ranks the writers.

    Returns:
        layer (head), side, writer (`all`, then the strongest), position, axis_1 and axis_2, and
        `explained`: both axes' share of the variance of all writers' sum between positions, and
        `norm_scale`: the norms' mean scale at the position over its mean over positions.
    """
    tables, skip_keys = [], sums.skip_keys
    for names, reader in readers(sums):
        scales = reader.sums.norm_scale
        assert scales is not None
        scale = pooled(scales, reader.counts)[skip_keys:]
        scale = scale / scale.mean()
        own = writers[(writers[list(names)] == pd.Series(names)).all(axis=1)]
        for side in get_args(Side):
            hands = clock(reader, side)
            rows = own[own["side"] == side]
            order = rows["share"].abs().sort_values(ascending=False).index
            strongest = rows.loc[order, "writer"][: CLOCKS - 1]
            for writer in (ALL, *strongest):
                points = (hands.whole if writer == ALL else hands.writers[writer])[skip_keys:]
                columns = {
                    **names,
                    "side": side,
                    "writer": writer,
                    "position": range(skip_keys, skip_keys + len(points)),
                    "axis_1": points[:, 0],
                    "axis_2": points[:, 1],
                    "explained": float(hands.explained.sum()),
                    "norm_scale": scale,
                }
                tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)
