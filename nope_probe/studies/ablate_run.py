"""The `ablate` command's run: what is removed, one thing at a time, its passes, tables and maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import pandas as pd
from safetensors.torch import load_file
from torch.nn.functional import pad

from nope_probe.analyses.attribution import (
    conditions_of,
    contrast_grams,
    contrast_map,
    patterns_of,
    source_terms,
)
from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.pattern import query_stride
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import WITH_GAIN, Ablation
from nope_probe.hooks.removing.weights import Calibration
from nope_probe.maps.layers import windows_of
from nope_probe.maps.maps import Layers
from nope_probe.removal import (
    IN_HEADS,
    INTACT,
    MASK,
    NO_REPLACEMENT,
    SOURCES,
    WRITTEN,
    Component,
    Condition,
)
from nope_probe.run.checkpoint import tensor_writer, write_folds
from nope_probe.run.flags import refuse
from nope_probe.run.folder import Run
from nope_probe.run.manifest import Manifest
from nope_probe.run.processes import by_layer
from nope_probe.run.session import Session, input_arrays
from nope_probe.studies.ablate import DEFAULT_REMOVED, SHUFFLED, Settings, report
from nope_probe.studies.engine import (
    Engine,
    idle_sources,
    irreplaceable,
    validate_first_sequence,
    validate_removable,
)
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.page import with_page
from nope_probe.studies.readings import (
    Reading,
    captured_induction,
    heads_table,
    random_copies,
    read_scores,
)
from nope_probe.studies.study import (
    CALIBRATION,
    Pass,
    Results,
    Study,
    calibration,
    captured,
)
from nope_probe.studies.tables import (
    Maps,
    Row,
    head_pattern_table,
    means_table,
    offsets_table,
    pattern_table,
    terms_table,
)

if TYPE_CHECKING:
    from nope_probe.studies.options import AblateOptions as Options

MAPS_BYTES = 1 << 26  # of a block of rows of all maps
# The rows of the passes on shuffled tokens, by their keys.
OF_TOKENS = {f"shuffled/{name}": Row(Condition.parse(name)) for name in SHUFFLED}


def chosen(
    has: Sequence[str], settings: Settings, left_out: Mapping[str, str] = {}
) -> tuple[tuple[Component, ...], list[Condition], dict[str, str]]:
    """Return the sources of a model, what else is removed from it, one at a time, and what is not.

    Without the mask, window and position encodings that it has, the model is run in all
    combinations; there are no sources where nothing is removed.

    Args:
        has: the components that the model has.
        settings: name what is removed besides the sources, by default `DEFAULT_REMOVED`.
        left_out: components that by default are no sources or not removed here, and why; those
            that the run would remove are returned.

    Raises:
        UserError: for a name that does not exist.
    """
    if "mask" not in has and settings.removes:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    idle, in_heads = {name: left_out[name] for name in left_out if name in has}, settings.in_heads
    sources = tuple(name for name in SOURCES if name in has and name not in idle)
    if settings.remove is None:
        there = {*has, *(() if in_heads else ("written",))} - {*idle}
        named = [of for of in map(Condition.parse, DEFAULT_REMOVED) if of <= there]
    else:  # weights are named
        idle = {name: why for name, why in idle.items() if name in SOURCES}
        named = [of for of in settings.named if in_heads or not of <= {*sources}]
    return sources if settings.removes else (), named, idle


def ablations_of(
    sources: Sequence[Component], removed: Sequence[Condition], settings: Settings
) -> list[Ablation]:
    """Return the ablations of a run: nothing, other rows that replace no weight, and the rest.

    The sources are removed in all heads, what else is removed in the heads of the settings.
    """
    whole, ordered = replace(settings.ablations[0], heads=None), conditions_of(sources)
    if WRITTEN in removed:  # what the mask makes, in a model that keeps it
        ordered.insert(ordered.index(MASK) + 1, WRITTEN)
    others = sorted(removed, key=lambda condition: bool(condition.weights))
    of_others = [by.without(condition) for by in settings.ablations for condition in others]
    return [*map(whole.without, ordered), *of_others]


def runs_of(ablations: Iterable[Ablation]) -> dict[Row, Ablation]:
    """Return what is run for the row of each ablation.

    Behind a constant output W_V does not matter, so a row of both runs without W_O alone.
    """
    runs = dict[Row, Ablation]()
    for ablation in ablations:
        is_constant = "w_o" in ablation.condition and ablation.kind not in WITH_GAIN
        needed = ablation.condition - {"w_v"} if is_constant else ablation.condition
        runs[Row.of(ablation)] = ablation.without(needed)
    return runs


def key_of(ablation: Ablation) -> str:
    """Return the key of the pass of an ablation: the name of its maps, without the heads."""
    in_heads = f"{IN_HEADS}heads" * (ablation.heads is not None)
    return Row.of(replace(ablation, heads=None)).maps + in_heads


class Ablate(Study[Settings]):
    """The lead and the order of every layer without the sources, and with weights replaced."""

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded, self.inputs = self.settings, session.loaded, session.sequences()
        self.engine, model = Engine.of(session), loaded.model
        self.layers = settings.layers_with_maps(loaded.info)
        self.is_text = settings.removes and self.inputs.kind == "text"
        left_out = irreplaceable(model)
        left_out |= idle_sources(model, self.inputs.inputs, len(self.layers))
        self.sources, self.removed, self.left_out = chosen(components(model), settings, left_out)
        ablations = ablations_of(self.sources, self.removed, settings)
        nulls = [of.without(of.condition.null) for of in ablations]
        self.rows = [*dict.fromkeys(map(Row.of, ablations))]
        self.runs = runs_of([*ablations, *nulls])
        validate_removable(model, self.runs.values())
        if settings.removes:
            refuse(settings.wrong_conditions(self.removed))

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that map the scores of every condition."""
        settings, engine, layers = self.settings, self.engine, self.layers
        info = self.session.loaded.info
        validate_first_sequence(engine, Row().maps, layers)
        yield from calibration(engine, [*self.runs.values()])
        runs = {key_of(ablation): (ablation, engine) for ablation in self.runs.values()}
        if self.is_text:
            shuffled = self.inputs.shuffled(settings.seed)
            of_tokens = replace(engine, inputs=shuffled.inputs, documents=shuffled.documents)
            runs |= {key: (self.runs[row], of_tokens) for key, row in OF_TOKENS.items()}
        has_loss = self.is_text and settings.depth_in(info) == info.depth
        for key, (ablation, on) in runs.items():
            condition, of_text = ablation.condition, on is engine
            per_head = settings.per_head and condition.are_sources and of_text
            # Without the mask a token sees the next token, and its loss means nothing.
            loss = has_loss and "mask" not in condition and of_text
            read = partial(read_scores, layers=layers, per_head=per_head, loss=loss)
            yield Pass(
                key=key,
                engine=on,
                read=partial(read, attention=per_head and not self.sources),
                ablation=ablation,
                maps=len(layers) * (1 + per_head * info.n_heads),
                kind=f"scores{' of heads' * per_head}{' and loss' * loss}",
                reads_logits=loss,
            )
        if settings.per_head and not self.sources:
            copies, n_tokens = self._copies()
            induction = partial(captured_induction, layers=layers, n_tokens=n_tokens)
            yield Pass(key="induction", engine=copies, read=partial(captured, induction))

    def _copies(self) -> tuple[Engine, int]:
        """Return the engine on n random tokens twice, on which induction is measured, and n."""
        tokenizer, n_processes = self.session.loaded.tokenizer, self.session.processes.count
        return random_copies(self.engine, self.inputs, tokenizer, n_processes)

    def analyse(self, results: Results) -> Run:
        """Measure the lead and the pattern of every layer in every condition, return the run."""
        folder = self.session.checkpoint.folder
        readings = {row: results[key_of(ablation)] for row, ablation in self.runs.items()}
        maps = {row: readings[row].maps for row in self.rows}
        files = {f"{name}.safetensors": folder / f"{name}.partial" for name in ("folds", "maps")}
        write_folds(files["folds.safetensors"], {row.maps: of for row, of in maps.items()})
        write_maps(files["maps.safetensors"], self.sources, maps)
        run = Run(
            manifest=self._manifest(maps[Row()], results.get(CALIBRATION)),
            arrays={"tokens": input_arrays(self.inputs)},
            files=files,
            tables=self._tables(readings, results),
        )
        stored = load_file(files["maps.safetensors"])  # mapped
        shown = replace(run, arrays={"maps": {name: x.numpy() for name, x in stored.items()}})
        return with_page(self.session, run, lambda _: report(shown))

    def _tables(self, readings: Mapping[Row, Reading], results: Results) -> dict[str, pd.DataFrame]:
        """Return the tables of the run."""
        maps = {row: reading.maps for row, reading in readings.items()}
        of_tokens = {row: results[key].maps for key, row in OF_TOKENS.items() if key in results}
        layers = by_layer(self.layers, "analysing")
        of_layers = [self._tables_of(layer, maps, of_tokens) for layer in layers]
        tables = {
            name: pd.concat([of_layer[name] for of_layer in of_layers], ignore_index=True)
            for name in of_layers[0]
        }
        if "induction" in results:
            induction = results["induction"], self._copies()[0].fold_of
            tables["head_pattern"] = heads_table(readings[Row()], self.engine.fold_of, induction)
        if self.sources:
            losses = {row: of.losses for row, of in readings.items() if of.losses is not None}
            tables["over_layers"] = means_table(tables["pattern"], self.rows, losses)
        return tables

    def _tables_of(self, layer: int, maps: Maps, of_tokens: Maps) -> dict[str, pd.DataFrame]:
        """Return the tables of a layer; the last rows of its pattern are the controls."""
        sources = self.sources
        grams = contrast_grams(patterns_of(maps, layer)) if sources else {}
        controls = pattern_table(of_tokens, layer, {}).replace({"removed": SHUFFLED})
        pattern = pd.concat([pattern_table(maps, layer, grams), controls])
        tables = {"pattern": pattern, "offsets": offsets_table(sources, maps, layer)}
        if sources:
            tables["terms"] = terms_table(sources, layer, grams)
            if self.settings.per_head:
                tables["head_pattern"] = head_pattern_table(maps, layer)
        return tables

    def _manifest(self, intact: Layers, calibration: Calibration | None) -> Manifest:
        """Return the manifest, given the maps of the intact model."""
        heads, rows = self.settings.heads_by_layer, self.rows
        return replace(
            self.session.manifest_of(self.inputs),
            query_stride=query_stride(len(next(iter(intact.values())).queries)),
            layers=self.layers,
            removed=tuple(condition.in_heads(heads).name for condition in self.removed),
            results={
                "windows": windows_of(intact),
                "replacements": [*dict.fromkeys(by for _, by in rows if by != NO_REPLACEMENT)],
                "conditions": [*dict.fromkeys(condition.name for condition, _ in rows)],
                "positional_sources": self.sources,
                "left_out": self.left_out,
                "massive_outputs": self.massive_outputs(),
                "gains": {} if calibration is None else calibration.gains,
            },
        )


def write_maps(path: Path, sources: Sequence[str], maps: Maps) -> None:
    """Write a run's maps [layer, row, key_pos], in float32, nats, by blocks of rows; NaN if masked.

    Those of `map_name` are score maps. `pattern/intact` and `term/<term>` are patterns, whose first
    column holds the lead of the first key; the terms add up to the pattern. Where nothing is
    removed, `se/intact` is the standard error of scores, from folds, and `score_per_head/intact`
    [layer, head, row, key_pos] has the heads that were kept. Where maps do not have the rows of all
    queries, `query_positions` are the queries of their rows.

    Args:
        path: of the file.
        sources: what is removed in all combinations.
        maps: the score maps of every row.

    Raises:
        StorageError: if it cannot be written.
    """
    intact, of_sources = maps[Row()], conditions_of(sources)
    first, terms = next(iter(intact.values())), source_terms(sources)
    contrasts = {"pattern/intact": {INTACT: 1.0}, **{f"term/{x}": of for x, of in terms.items()}}
    size, heads = (len(first.queries), first.n), () if sources else first.heads
    names = [*(row.maps for row in maps), *contrasts, *(() if sources else ("se/intact",))]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (len(intact), *size))
    if heads:
        shapes["score_per_head/intact"] = len(intact), len(heads), *size
    if size[0] < size[1]:
        shapes["query_positions"] = size[:1]  # exact in float32, below 2**24
    n_maps = len(maps) + 1 + len(heads) + first.folds.n_folds * (not sources)
    with tensor_writer(path, shapes) as write:
        of_layers = enumerate(by_layer([*intact.items()], "writing maps"))
        for place, (layer, of_layer) in of_layers:
            pattern, row = of_layer.pattern, 0  # the intact model sees the fewest keys
            for start, stop in of_layer.folds.where.blocks(n_maps, MAPS_BYTES):
                rows = slice(row, row + stop - start)
                means = {of: of_row[layer].mean(rows) for of, of_row in maps.items()}
                patterns = {of: pattern.with_lead(means[Row(of)], start) for of in of_sources}
                blocks = {of.maps: mean for of, mean in means.items()}
                blocks |= {x: contrast_map(of, patterns) for x, of in contrasts.items()}
                if not sources:
                    errors = standard_error(of_layer.folds.rows(start, stop), of_layer.weights)
                    blocks["se/intact"] = pad(errors, (0, first.n - stop), value=nan)
                for name, block in blocks.items():
                    write(name, (place, row), block.float().numpy())
                for head, of_head in enumerate(of_layer.heads if heads else ()):
                    block = of_head.mean(rows)
                    write("score_per_head/intact", (place, head, row), block.float().numpy())
                row = rows.stop
        if "query_positions" in shapes:
            write("query_positions", (0,), first.queries.float().numpy())


@partial(takes_options, Settings)
def run_ablations(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Unpack[Options]
) -> Run:
    """Find where a model's lead and pattern come from, and which weights they need.

    Runs the model with and without its mask, position encoding and weights, as the `ablate` command
    does. A progress bar goes to stderr.

    Args:
        model: a name, as the command takes it, or a model that `load` takes or returns, of which
            all layers are studied by default.
        inputs: what `capture_scores` takes; by default the sequences that the options describe.
        out: a new folder for the run, or that of the same run; by default nothing is kept.
        options: the flags of `python -m nope_probe.ablate --help`, as in `seq_len=32`.

    Raises:
        UserError: for what cannot be done, such as components that the model lacks, too few
            sequences, or a folder that holds another run.

    Example:
        >>> from nope_probe import load, run_ablations, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=64, seq_len=16)
        >>> study = run_ablations(loaded, data, remove=["w_k"])
        >>> order = study.tables["pattern"].query("layer == 2").set_index("removed")["order"]
        >>> bool(order["intact"] > 10 * abs(order["w_k"]))
        True
        >>> study.maps["term/mask"].shape
        (3, 16, 16)
    """
    return run_of(Ablate, Settings, model, inputs, out, options)
