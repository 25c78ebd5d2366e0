"""What `trace` runs: the writers' parts of each reader, and the reader without their positions.

The exact part of a writer is its direct path, through the reader's norm, W_Q and W_K, with the
norm's scale of every token kept. `measure_effects` runs the model without the writer's
position, so that the blocks between the writer and the reader respond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from nope_probe.analyses.attribution import contrast_grams
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.positions import direct_part, readers, scores_without, term_maps
from nope_probe.analyses.reader import Reader
from nope_probe.analyses.verdicts import strongest_row
from nope_probe.errors import UserError
from nope_probe.figures.words import reader_of, with_readers
from nope_probe.hooks.ablation import directly_ablated
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.hooks.removing.weights import AS_INTACT
from nope_probe.hooks.removing.written import WrittenPositions
from nope_probe.maps.layers import LayerMaps, Question, shared_patterns
from nope_probe.maps.positions import PositionSums
from nope_probe.removal import Writer
from nope_probe.run.folder import Run
from nope_probe.run.processes import by_layer
from nope_probe.run.session import input_arrays
from nope_probe.studies.engine import NOTHING, Engine, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.page import with_page
from nope_probe.studies.study import Pass, Results, Study
from nope_probe.studies.tables import (
    TableRow,
    interval_columns,
    interval_names,
    term_table,
    writer_table,
)
from nope_probe.studies.trace import LEAST, Settings, numbers_of, report

if TYPE_CHECKING:
    from nope_probe.studies.options import TraceOptions as Options

EFFECTS = ("predicted", "held", "direct", "norm", "total")
EFFECTS_COLUMNS = ["layer", "head", "of", "writer", *interval_names(*EFFECTS)]


class TracePosition(Study[Settings]):
    """The writers of the position that each layer or head reads, and what it loses without them."""

    def passes(self) -> Iterator[Pass]:
        """Yield the pass that sums the writers' parts, and those that take positions away."""
        settings, engine, info = self.settings, Engine.of(self.session), self.session.loaded.info
        layers = settings.layers_with_maps(info)
        validate_first_sequence(engine, "positions", layers)
        of_sums = settings.bytes_of_sums(info) // (8 * settings.folds * settings.seq_len**2)
        n_maps = len(layers) + of_sums
        yield Pass(key="positions", engine=engine, read=self._read_positions, maps=n_maps)
        yield Pass(key="effects", engine=engine, read=self._read_effects, runs=None)

    def _read_positions(self, engine: Engine, key: str, ablation: Ablation) -> PositionSums:
        info = self.session.loaded.info
        try:
            return engine.positions(
                key,
                ablation,
                layers=self.settings.layers_with_maps(info),
                writers=self.settings.writers,
                per_head=self.settings.traces_heads,
            )
        except NotImplementedError as error:
            raise UserError(f"{info.name} cannot be traced: {error}") from error

    def _read_effects(
        self, engine: Engine, key: str, ablation: Ablation
    ) -> tuple[str | None, dict[str, pd.DataFrame]]:
        """Return the reader of the headline, by default the strongest, and the tables."""
        sums: PositionSums = engine.results["positions"]
        of_layers = [replace(sums, readers={layer: of}) for layer, of in sums.readers.items()]
        tables = [(term_table(x), writer_table(x)) for x in by_layer(of_layers, "splitting scores")]
        terms, writers = (pd.concat(of, ignore_index=True) for of in zip(*tables, strict=True))
        reader = self.settings.reader or strongest_reader(terms, sums.counts.tolist())
        effects, n_heads = pd.DataFrame(columns=EFFECTS_COLUMNS), self.settings.confirm
        if reader is not None and n_heads:
            effects = measure_effects(engine, sums, writers, reader, n_heads=n_heads)
        return reader, {"terms": terms, "writers": writers, "effects": effects}

    def analyse(self, results: Results) -> Run:
        """Return the run of the trace."""
        session, settings, (reader, tables) = self.session, self.settings, results["effects"]
        inputs, sums = session.sequences(), results["positions"]
        manifest = replace(
            session.manifest_of(inputs),
            layers=tuple(sorted(int(layer) for layer in tables["terms"]["layer"].unique())),
            results={"reader": reader, "kept_positions": settings.n_first(inputs.bos)},
        )
        arrays = {"maps": map_arrays(sums), "tokens": input_arrays(inputs)}
        return with_page(session, Run(manifest=manifest, arrays=arrays, tables=tables), report)


def strongest_reader(terms: pd.DataFrame, fold_sizes: Sequence[int]) -> str | None:
    """Return the reader with the largest lead, by the rule of all pages.

    Args:
        terms: `terms.csv`.
        fold_sizes: sequences per fold.

    Returns:
        None if no pattern exceeds the noise.
    """
    whole = with_readers(terms[terms["term"] == "all"]).set_index("reader")
    rows = whole.query("of == 'pattern'").rename(columns=lambda x: x.replace("size", "amplitude"))
    rows = rows.assign(lead=whole[whole["of"] == "lead"]["size"])
    row = strongest_row(rows, fold_sizes)
    return None if row is None else str(row.name)


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
    place = dict(zip(("layer", "head"), numbers_of(reader), strict=False))
    read = next(of_reader for names, of_reader in readers(sums) if names == place)
    known = writers[(writers[[*place]] == pd.Series(place)).all(axis=1)]
    names = {Writer(name) for name in read.sums.keys if name != "bias"}
    least = {
        asked.question: LEAST * abs(asked.size_of(asked.scores).nats.value)
        for asked in read.questions()
    }
    whole = sorted({writer.whole for writer in names}, key=lambda writer: writer.order)
    intact = scores_of(engine, place, "intact")
    of_blocks = engine.with_positions("effects-blocks", whole)
    rows = [*_effects(of_blocks, place, read, intact, whole)]
    direct = direct_parts(known, least)
    matter = {writer.whole for writer in direct} | {
        row["writer"]
        for row in rows
        if max(abs(row["total_low"]), abs(row["total_high"])) >= least[row["of"]]
    }
    heads = sorted(name for name in names if name.head is not None and name.whole in matter)
    if heads and n_heads:
        of_heads = engine.with_positions("effects-heads", heads)
        sizes = {name: positions_of(of_heads).size(name) for name in heads}
        heads.sort(key=lambda head: (-direct.get(head, 0.0), -sizes[head]))
        rows += _effects(of_heads, place, read, intact, heads[:n_heads])
    rows.sort(key=lambda row: (row["of"], row["writer"].order))
    return pd.DataFrame(rows)


def positions_of(engine: Engine) -> WrittenPositions:
    """Return the position of the writers that an engine was calibrated for."""
    assert engine.calibration is not None  # a position that is removed was measured
    return engine.calibration.positions[AS_INTACT]


def _effects(
    engine: Engine,
    place: Mapping[str, int],
    reader: Reader,
    intact: LayerMaps,
    writers: Iterable[Writer],
) -> Iterator[TableRow]:
    """Yield the rows of the losses without the position of each writer in turn."""
    for writer in writers:
        total = scores_of(engine, place, writer, Ablation(remove=[writer.removal]))
        with directly_ablated(engine.model, writer, positions_of(engine), place["layer"]):
            direct = scores_of(engine, place, f"{writer}-to-L{place['layer']}")
        for question, lost in losses(intact, direct, total, reader, writer).items():
            yield {**place, "of": question, "writer": writer, **interval_columns(**lost)}


def scores_of(
    engine: Engine, place: Mapping[str, int], key: str, ablation: Ablation = NOTHING
) -> LayerMaps:
    """Return the scores of a layer, or of a head, of the model without what an ablation removes."""
    layer, head = place["layer"], place.get("head")
    by_head = head is not None
    maps = engine.scores(f"effects-{key}", ablation, layers=[layer], per_head=by_head)[layer]
    return maps if head is None else maps.heads[head]


def direct_parts(writers: pd.DataFrame, least: Mapping[Question, float]) -> dict[Writer, float]:
    """Return the writers whose part could matter, with its size over the least that matters.

    A part is that in keys and queries together, of the lead or of the pattern.

    Args:
        writers: one reader's rows of `writers.csv`.
        least: the least part that matters of the lead and of the pattern, nats.
    """
    columns = ["part", "part_low", "part_high"]
    sums = writers.dropna(subset=columns).groupby(["of", "writer"], sort=False)[columns].sum()
    sizes = sums.abs().div(pd.Series(least, dtype=float), axis=0, level="of")
    matter = sizes[sizes[columns[1:]].max(axis=1) >= 1]["part"].groupby("writer").max()
    return {Writer(str(name)): size for name, size in matter.items()}


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
    about = reader.counts, reader.sums.query_positions, reader.skip_keys
    linear = LayerMaps.of(reader.scores, *about)
    fixed = LayerMaps.of(scores_without(reader, writer), *about, across_halves=True)
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


@partial(takes_options, Settings)
def run_trace(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Unpack[Options]
) -> Run:
    """Find who writes the position that each layer reads, as the `trace` command does.

    Inside `ablated`, the ablated model is traced, with `confirm=0`.

    Args:
        model: a name, as the command takes it, or a model that `load` takes or returns, of which
            all layers are studied by default.
        inputs: what `capture_scores` takes; by default the sequences that the options describe.
        out: a new folder for the run, or that of the same run; by default nothing is kept.
        options: the flags of `python -m nope_probe.trace --help`, as in `seq_len=32`.

    Raises:
        UserError: for too few sequences or folds, or for a family whose residual stream is no sum,
            whose RoPE turns no pairs, or whose projections are no linear maps between norms.

    Example:
        >>> from nope_probe import load, run_trace, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=24)
        >>> trace = run_trace(loaded, data, confirm=0)
        >>> of_pattern = trace.tables["writers"].query("layer == 2 and of == 'pattern'")
        >>> parts = of_pattern.groupby("writer")["part"].sum()
        >>> sorted(parts[parts > 1].index)
        ['L1H0', 'L1H1']
    """
    return run_of(TracePosition, Settings, model, inputs, out, options)
