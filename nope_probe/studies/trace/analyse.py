"""From the writers' parts of each reader to tables, maps and a run, on disk or in memory.

The exact part of a writer is its direct path, through the reader's norm, W_Q and W_K, with the
norm's scale of every token kept. `measure_effects` runs the model without the writer's
position, so that the blocks between the writer and the reader respond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pandas as pd

from nope_probe.analyses.contrasts import contrast_grams
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.positions import clock, direct_part, readers, scores_without, term_maps
from nope_probe.analyses.reader import Reader, Side
from nope_probe.figures.words import reader_of
from nope_probe.hooks.ablation import directly_ablated
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import WrittenPosition
from nope_probe.maps.folds import pooled
from nope_probe.maps.layers import LayerMaps, Question, shared_patterns
from nope_probe.maps.positions import PositionSums
from nope_probe.removal import Writer
from nope_probe.studies.engine import Engine
from nope_probe.studies.tables import TableRow, interval_columns, interval_names, writer_table
from nope_probe.studies.trace.settings import numbers_of

EFFECTS = ("predicted", "held", "direct", "norm", "total")  # columns of `effects.csv`
EFFECTS_COLUMNS = ["layer", "head", "of", "writer", *interval_names(*EFFECTS)]
ALL, CLOCKS = "all", 4  # writers with a clock: all together, and the strongest of them
MATTERS = 0.05  # of a lead or pattern: what a removal takes, or what a writer writes


@dataclass(frozen=True)
class ReaderPlace:
    """A layer, or a head of it, whose scores are read."""

    layer: int
    head: int | None = None

    def reader(self, sums: PositionSums) -> Reader:
        """Return its mean queries and keys."""
        names = {name: number for name, number in vars(self).items() if number is not None}
        return next(reader for of_reader, reader in readers(sums) if of_reader == names)

    def rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return its rows of a table."""
        rows = table[table["layer"] == self.layer]
        return rows if self.head is None else rows[rows["head"] == self.head]

    def maps(self, engine: Engine, key: str, ablation: Ablation | None = None) -> LayerMaps:
        """Return its scores, of the model without what an ablation removes."""
        by_head = self.head is not None
        maps = engine.scores(f"effects-{key}", ablation, layers=[self.layer], per_head=by_head)
        of_layer = maps[self.layer]
        return of_layer if self.head is None else of_layer.heads[self.head]


def measure_effects(
    engine: Engine, sums: PositionSums, writers: pd.DataFrame, reader: str, *, n_heads: int = 6
) -> pd.DataFrame:
    """Return what a reader's lead and pattern lose without the position of each writer.

    The position of every earlier attention and MLP, and of the embeddings, is taken away in turn.
    The heads of an attention are taken one by one if the attention matters: if the reader loses a
    twentieth or more without it, or if one of its heads writes as much. A run without a
    writer's position serves lead and pattern, and so does a run without its direct path.

    Args:
        engine: the model on the sequences of the run.
        sums: the readers' sums, on the same sequences in the same folds.
        writers: the `writer_table` of the sums.
        reader: the layer (L2) or head (L2H1).
        n_heads: how many heads to take one by one, those that write most first, then those whose
            mean output varies most with the position.

    Returns:
        A row for each writer, of the lead and of the pattern: `layer`, `head` if heads are readers,
        `of`, `writer`, and in nats with their intervals `predicted`, the exact part in queries and
        keys together; `held`, the loss if only the reader's input loses the writer's position and
        the scales of its norms stay; `direct`, the loss if the scales follow, as in the model;
        `norm`, direct less held; and `total`, the loss if all blocks after the writer lose the
        position. There are no rows of the lead where the first position keeps what is written
        there: most of the lead would be kept as well.
    """
    place = ReaderPlace(*numbers_of(reader))
    read, known = place.reader(sums), place.rows(writers)
    names = {Writer(name) for name in read.sums.keys if name != "bias"}
    least = {
        asked.question: MATTERS * abs(asked.size_of(asked.scores).nats.value)
        for asked in read.questions()
    }
    intact = place.maps(engine, "intact")

    def measured(engine: Engine, removed: Iterable[Writer]) -> Iterator[TableRow]:
        for writer in removed:
            total = place.maps(engine, writer, Ablation(remove=[writer.removal]))
            position = written_positions(engine)[writer]
            with directly_ablated(engine.model, writer, position, place.layer):
                direct = place.maps(engine, f"{writer}-to-L{place.layer}")
            for question, lost in losses(intact, direct, total, read, writer).items():
                yield {**vars(place), "of": question, "writer": writer, **interval_columns(**lost)}

    whole = sorted({writer.whole for writer in names}, key=lambda writer: writer.order)
    rows = [*measured(with_positions(engine, "blocks", whole), whole)]
    direct = direct_parts(known, least)
    matter = {writer.whole for writer in direct} | {
        row["writer"]
        for row in rows
        if could_matter(row["total_low"], row["total_high"], least[row["of"]])
    }
    heads = sorted(name for name in names if name.head is not None and name.whole in matter)
    if heads and n_heads:
        of_heads = with_positions(engine, "heads", heads)
        sizes = {name: of.vectors.norm() for name, of in written_positions(of_heads).items()}
        heads.sort(key=lambda head: (-direct.get(head, 0.0), -float(sizes[head])))
        rows += measured(of_heads, heads[:n_heads])
    rows.sort(key=lambda row: (row["of"], row["writer"].order))
    table = pd.DataFrame(rows, columns=EFFECTS_COLUMNS)
    return table.drop(columns="head") if place.head is None else table


def with_positions(engine: Engine, key: str, writers: Sequence[Writer]) -> Engine:
    """Return the engine with the mean output of some writers at each position."""
    removals = [Ablation(remove=[writer.removal]) for writer in writers]
    return engine.calibrated(f"effects-{key}", removals)


def written_positions(engine: Engine) -> Mapping[str, WrittenPosition]:
    """Return the position of the writers that an engine was calibrated for."""
    return {} if engine.calibration is None else engine.calibration.positions


def could_matter(low: float, high: float, least: float) -> bool:
    """Return whether what is between these bounds could be as large as the least that matters."""
    return bool(max(abs(low), abs(high)) >= least)


def direct_parts(writers: pd.DataFrame, least: Mapping[Question, float]) -> dict[Writer, float]:
    """Return the writers whose part could matter, with its size over the least that matters.

    A part is that in keys and queries together, of the lead or of the pattern.

    Args:
        writers: one reader's rows of `writers.csv`.
        least: the least part that matters of the lead and of the pattern, nats.
    """
    columns = ["part", "part_low", "part_high"]
    sums = writers.dropna(subset=columns).groupby(["of", "writer"], sort=False)[columns].sum()
    sizes: dict[Writer, float] = {}
    for (question, name), (part, low, high) in zip(sums.index, sums.to_numpy(), strict=True):
        if could_matter(low, high, least[question]):
            size = abs(part) / least[question]
            sizes[Writer(name)] = max(size, sizes.get(Writer(name), 0.0))
    return sizes


def losses(
    intact: LayerMaps, direct: LayerMaps, total: LayerMaps, reader: Reader, writer: Writer
) -> dict[Question, dict[str, Interval]]:
    """Return the nats of a reader's lead and pattern that are lost without a writer's position.

    Args:
        intact: the reader's scores.
        direct: its scores where only its input loses the position.
        total: its scores where all blocks after the writer lose the position.
        reader: its mean queries and keys.
        writer: the writer.
    """
    linear, fixed = (
        LayerMaps.of(scores, reader.counts, reader.sums.query_positions, reader.skip_keys)
        for scores in (reader.scores, scores_without(reader, writer))
    )
    maps = {"intact": intact, "direct": direct, "total": total, "linear": linear, "held": fixed}
    patterns = shared_patterns([*maps.values()])
    grams = contrast_grams(dict(zip(maps, patterns, strict=True)))
    whole = {"intact": 1.0}
    return {
        asked.question: {
            "predicted": direct_part(asked, writer),
            "held": gram.part({"linear": 1.0, "held": -1.0}, whole),
            "direct": gram.part({"intact": 1.0, "direct": -1.0}, whole),
            "norm": gram.part({"intact": 1.0, "direct": -1.0, "linear": -1.0, "held": 1.0}, whole),
            "total": gram.part({"intact": 1.0, "total": -1.0}, whole),
        }
        for asked in reader.questions()
        if asked.question == "pattern" or not reader.kept_positions
        for gram in (grams[asked.question],)
    }


def sorted_writers(sums: PositionSums) -> pd.DataFrame:
    """Return the `writer_table`, with the writers of a reader in the order in which they write."""
    writers = writer_table(sums)
    return writers.sort_values(
        [name for name in ("layer", "head", "of", "side", "writer") if name in writers],
        key=lambda column: (
            column.map(lambda name: Writer(name).order) if column.name == "writer" else column
        ),
        ignore_index=True,
    )


def map_arrays(sums: PositionSums) -> dict[str, np.ndarray]:
    """Return the patterns of the terms by name, such as `L1/rotation`, nats.

    The first column holds the lead of the first key. Where only some queries have rows, there are
    also the `query_positions` of the rows.
    """
    maps = {
        f"{reader_of(names)}/{term}": values.float().numpy()
        for names, of_reader in readers(sums)
        for term, values in term_maps(of_reader).items()
    }
    reader = next(iter(sums.readers.values()))
    n_rows, n = reader.scores.shape[-2:]
    if n_rows < n and reader.query_positions is not None:
        maps["query_positions"] = reader.query_positions.numpy()
    return maps


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
    tables, kept = [], sums.kept_positions
    for names, reader in readers(sums):
        scales = reader.sums.norm_scale
        assert scales is not None
        scale = pooled(scales, reader.counts)[kept:]
        scale = scale / scale.mean()
        of_reader = (writers[list(names)] == pd.Series(names)).all(axis=1)
        of_pattern = writers[of_reader & (writers["of"] == "pattern")]
        for side in get_args(Side):
            hands = clock(reader, side)
            rows = of_pattern[of_pattern["side"] == side]
            order = rows["part"].abs().sort_values(ascending=False).index
            strongest = rows.loc[order, "writer"][: CLOCKS - 1]
            for writer in (ALL, *strongest):
                points = (hands.whole if writer == ALL else hands.writers[writer])[kept:]
                columns = {
                    **names,
                    "side": side,
                    "writer": writer,
                    "position": range(kept, kept + len(points)),
                    "axis_1": points[:, 0],
                    "axis_2": points[:, 1],
                    "explained": float(hands.explained.sum()),
                    "norm_scale": scale,
                }
                tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)
