"""From the writers' parts of each reader to tables, maps and a run, on disk or in memory.

The exact share of a writer is its direct path, through the reader's norm, W_Q and W_K, with the
norm's scale of every token kept. `measure_effects` runs the model without the writer's
position, so that the blocks between the writer and the reader respond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import get_args

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from nope_probe.analyses.contrasts import contrast_grams
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.positions import clock, direct_share, readers, scores_without, term_maps
from nope_probe.analyses.reader import Reader, Side
from nope_probe.figures.position_figure import ALL, CLOCKS
from nope_probe.figures.words import reader_of, strongest_reader
from nope_probe.hooks.ablation import directly_ablated
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import WrittenPosition
from nope_probe.maps.folds import folds_of, pooled
from nope_probe.maps.layers import LayerMaps, Question, shared_patterns
from nope_probe.maps.positions import PositionSums
from nope_probe.removal import Writer
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.session import Session
from nope_probe.run.settings import RunSettings
from nope_probe.studies.engine import Engine
from nope_probe.studies.page import with_page
from nope_probe.studies.tables import (
    TableRow,
    interval_columns,
    interval_names,
    term_table,
    writer_table,
)
from nope_probe.studies.trace.page import Traced, report

EFFECTS = ("predicted", "held", "direct", "norm", "total")  # columns of `effects.csv`
EFFECTS_COLUMNS = ["layer", "head", "of", "writer", *interval_names(*EFFECTS)]
MATTERS = 0.05  # of a lead or pattern: what a removal takes, or a writer's direct share


@dataclass(frozen=True, kw_only=True)
class ReaderPlace:
    """A layer, or a head of it, whose scores are read."""

    layer: int
    head: int | None = None

    @classmethod
    def parse(cls, name: str) -> ReaderPlace:
        """Return the place of a name such as L2 or L2H1."""
        layer, _, head = name.removeprefix("L").partition("H")
        return cls(layer=int(layer), head=int(head) if head else None)

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
        [of_layer] = maps.by_layer.values()
        return of_layer if self.head is None else of_layer.heads[self.head]


def measure_effects(
    engine: Engine,
    sums: PositionSums,
    writers: pd.DataFrame,
    reader: str,
    *,
    n_heads: int = 6,
) -> pd.DataFrame:
    """Return what a reader's lead and pattern lose without the position of each writer.

    The position of every earlier attention and MLP, and of the embeddings, is taken away in turn.
    The heads of an attention are taken one by one if the attention matters: if the reader loses 5%
    or more without it, or if the direct share of one of its heads is as large. A run without a
    writer's position serves lead and pattern, and so does a run without its direct path.

    Args:
        engine: the model on the sequences of the run.
        sums: the readers' sums, on the same sequences in the same folds.
        writers: the `writer_table` of the sums.
        reader: the layer (L2) or head (L2H1).
        n_heads: how many heads to take one by one, those with the largest direct shares first, then
            those whose mean output varies most with the position.

    Returns:
        A row for each writer, of the lead and of the pattern: `layer`, `head` if heads are readers,
        `of`, `writer`, and with their intervals `predicted`, the exact share of queries and keys
        together; `held`, the loss if only the reader's input loses the writer's position and
        the scales of its norms stay; `direct`, the loss if the scales follow, as in the model;
        `norm`, direct less held; and `total`, the loss if all blocks after the writer lose the
        position. There are no rows of the lead where the first position keeps what is written
        there: most of the lead would be kept as well.
    """
    place = ReaderPlace.parse(reader)
    read, known = place.reader(sums), place.rows(writers)
    names = {Writer(name) for name in read.sums.keys if name != "bias"}
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
    direct = direct_shares(known)
    matter = {writer.whole for writer in direct} | {
        row["writer"] for row in rows if could_matter(row["total_low"], row["total_high"])
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


def could_matter(low: float, high: float) -> bool:
    """Return whether a share between these bounds could be 5% or more, of either sign."""
    return bool(max(abs(low), abs(high)) >= MATTERS)


def direct_shares(writers: pd.DataFrame) -> dict[Writer, float]:
    """Return the writers whose direct share could matter, with its size.

    The share is that of keys and queries together, of the lead or of the pattern.

    Args:
        writers: one reader's rows of `writers.csv`.
    """
    columns = ["share", "share_low", "share_high"]
    sums = writers.dropna(subset=columns).groupby(["of", "writer"], sort=False)[columns].sum()
    shares: dict[Writer, float] = {}
    for name, (share, low, high) in zip(
        sums.index.get_level_values("writer"), sums.to_numpy(), strict=True
    ):
        if could_matter(low, high):
            shares[Writer(name)] = max(abs(share), shares.get(Writer(name), 0.0))
    return shares


def losses(
    intact: LayerMaps, direct: LayerMaps, total: LayerMaps, reader: Reader, writer: Writer
) -> dict[Question, dict[str, Interval]]:
    """Return the shares of a reader's lead and pattern that are lost without a writer's position.

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
            "predicted": direct_share(asked, writer),
            "held": gram.share({"linear": 1.0, "held": -1.0}, whole),
            "direct": gram.share({"intact": 1.0, "direct": -1.0}, whole),
            "norm": gram.share({"intact": 1.0, "direct": -1.0, "linear": -1.0, "held": 1.0}, whole),
            "total": gram.share({"intact": 1.0, "total": -1.0}, whole),
        }
        for asked in reader.questions()
        if asked.question == "pattern" or not reader.kept_positions
        for gram in (grams[asked.question],)
    }


@dataclass(frozen=True, kw_only=True)
class TraceTables:
    """The tables and maps of who writes the position that each layer (or head) of a model reads.

    Attributes:
        terms: a row for each term of a reader's lead and pattern: its size in nats, its share, and
            the share of a pattern's term that is a function of the distance.
        writers: a row for each reader, lead or pattern, side (key or query) and writer: its share.
        clocks: a reader's mean keys and queries along their two principal axes, by position.
        maps: the patterns of the terms by name, such as `L1/rotation`, nats, with the lead of the
            first key in the first column; where only some queries have rows, also the
            `query_positions` of the rows.
        effects: for the writers before one reader, what its lead and pattern lose without their
            position; empty unless measured.
    """

    terms: pd.DataFrame
    writers: pd.DataFrame
    clocks: pd.DataFrame
    maps: dict[str, Float[np.ndarray, "row key_pos"] | Int[np.ndarray, " row"]]
    effects: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=EFFECTS_COLUMNS))

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by the names of a run's CSV files."""
        names = ("terms", "writers", "effects", "clocks")
        return {name: getattr(self, name) for name in names}

    def with_effects(
        self, engine: Engine, sums: PositionSums, confirm: int, reader: str | None = None
    ) -> TraceTables:
        """Return the trace with what a reader loses without the position of each writer.

        Args:
            engine: the model, on the sequences of the sums.
            sums: the writers' parts of each reader.
            confirm: how many heads to take one by one, after each attention and MLP; 0 takes
                nothing away.
            reader: the layer or head; by default the reader with the strongest lead or pattern.
        """
        shown = reader or strongest_reader(self.terms)
        if shown is None or not confirm:
            return self
        effects = measure_effects(engine, sums, self.writers, shown, n_heads=confirm)
        return replace(self, effects=effects)


def trace_of(sums: PositionSums) -> TraceTables:
    """Return the tables and maps of the writers' parts of each reader, without effects.

    Args:
        sums: the writers' parts of each reader.
    """
    writers = writer_table(sums)
    writers = writers.sort_values(
        [name for name in ("layer", "head", "of", "side", "writer") if name in writers],
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
            strongest lead or pattern.
    """
    settings, inputs = session.settings, session.sequences()
    counts = folds_of(len(inputs), settings.folds, inputs.documents).bincount()
    traced = Traced(
        kept_positions=settings.kept_positions_of(inputs),
        reader=reader or strongest_reader(trace.terms),
    )
    manifest = replace(
        session.manifest_of(inputs, settings.skip_keys_of(inputs), counts),
        layers=tuple(sorted(int(layer) for layer in trace.terms["layer"].unique())),
        results=asdict(traced),
    )
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
            order = rows["share"].abs().sort_values(ascending=False).index
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
