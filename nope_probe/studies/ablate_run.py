"""The `ablate` command's run: its passes, its maps, and the run of what they captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from nope_probe.analyses.attribution import (
    conditions_of,
    patterns_of,
    values_in,
)
from nope_probe.analyses.contrasts import contrast_grams, contrast_map, source_terms
from nope_probe.analyses.jackknife import (
    standard_error,
)
from nope_probe.analyses.pattern import (
    query_stride,
)
from nope_probe.hooks.layers.model import Given
from nope_probe.maps.layers import LayerMaps, windows_of
from nope_probe.maps.maps import Layers
from nope_probe.removal import INTACT, NO_REPLACEMENT
from nope_probe.run.checkpoint import tensor_writer, write_folds
from nope_probe.run.flags import refuse
from nope_probe.run.folder import Run
from nope_probe.run.manifest import Manifest
from nope_probe.run.session import Session, input_arrays
from nope_probe.studies.ablate import Settings, report
from nope_probe.studies.ablate_plan import (
    INTACT_ROW,
    QUERIES,
    Maps,
    Plan,
    Reading,
    name_of,
    plan_of,
    read_scores,
)
from nope_probe.studies.ablate_tables import (
    controls_table,
    head_pattern_table,
    heads_table,
    means_table,
    offsets_table,
    pattern_table,
    terms_table,
)
from nope_probe.studies.engine import Engine, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.head_scores import captured_induction, random_copies
from nope_probe.studies.page import with_page
from nope_probe.studies.study import CALIBRATION, Pass, Results, Study, captured, run_study

if TYPE_CHECKING:
    from nope_probe.studies.options import AblateOptions as Options

MAPS_BYTES = 1 << 26


class Ablate(Study[Settings]):
    """The lead and the order of every layer without the sources, and with weights replaced."""

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded, self.inputs = self.settings, session.loaded, session.sequences()
        self.engine, layers = Engine.of(session), settings.layers_with_maps(loaded.info)
        self.plan = plan_of(
            loaded,
            self.inputs.inputs,
            settings.removed_names,
            ablations=settings.ablations,
            layers=layers,
            per_head=settings.per_head,
            losses=self.inputs.kind == "text"
            and settings.depth_in(loaded.info) == loaded.info.depth,
        )
        if settings.removes:
            refuse(settings.wrong_conditions(self.plan.removed))

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that map the scores of every condition."""
        engine, layers = self.engine, self.plan.layers
        if f"score/{INTACT.name}" not in self.session.checkpoint:
            validate_first_sequence(engine.model, engine.inputs, layers)
        if self.settings.removes:
            is_text = self.inputs.kind == "text"
            shuffled = self.inputs.shuffled(self.settings.seed) if is_text else None
            yield from self.plan.passes(engine, shuffled)
            return
        per_head = self.settings.per_head
        read = partial(read_scores, layers=layers, per_head=per_head, attention=per_head)
        n_maps = engine.n_maps(layers, per_head=self.settings.per_head)
        yield Pass(key=f"score/{INTACT.name}", engine=engine, read=read, maps=n_maps)
        if self.settings.per_head:
            copies, n_tokens = self._copies()
            induction = partial(captured_induction, layers=layers, n_tokens=n_tokens)
            yield Pass(key="induction", engine=copies, read=partial(captured, induction))

    def _copies(self) -> tuple[Engine, int]:
        """Return the engine on n random tokens twice, on which induction is measured, and n."""
        tokenizer, n_processes = self.session.loaded.tokenizer, self.session.processes.count
        return random_copies(self.engine, self.inputs, tokenizer, n_processes)

    def analyse(self, results: Results) -> Run:
        """Measure the lead and the pattern of every layer in every condition, return the run."""
        plan, session, removes = self.plan, self.session, self.settings.removes
        maps = plan.maps(results)
        folds = session.checkpoint.scratch("folds")
        write_folds(folds, {name_of(row): layers for row, layers in maps.items()})
        run = Run(
            manifest=self._manifest(maps[INTACT_ROW], results),
            arrays={"tokens": input_arrays(self.inputs)},
            files={"folds.safetensors": folds},
            tables={
                "offsets": offsets_table(plan, maps),
            },
        )
        return self._of_conditions(run, maps, results) if removes else self._of_intact(run, results)

    def _of_conditions(self, run: Run, maps: Maps, results: Results) -> Run:
        """Return the run of a model from which components are removed."""
        plan, session, place = self.plan, self.session, self.session.checkpoint.scratch("maps")
        grams = [contrast_grams(patterns_of(maps, layer)) for layer in plan.layers]
        values = [{row: values_in(of, row, INTACT_ROW) for row in maps} for of in grams]
        tables = {
            **run.tables,
            "pattern": pattern_table(maps, plan.layers, values),
            "terms": terms_table(plan, grams),
        }
        if controls := [*plan.controls(results)]:
            tables["controls"] = controls_table(controls, plan.layers)
        tables["over_layers"] = means_table(tables["pattern"], plan.loss_estimates(results))
        if self.settings.per_head:
            tables["head_pattern"] = head_pattern_table(plan, maps)
        write_maps(place, plan, maps)
        run = replace(run, tables=tables, files={**run.files, "maps.safetensors": place})
        stored = {name: array.numpy() for name, array in load_file(place).items()}  # mapped
        shown = replace(run, arrays={"maps": stored})
        return with_page(session, run, lambda _: report(shown))

    def _of_intact(self, run: Run, results: Results) -> Run:
        """Return the run of a model from which nothing is removed."""
        reading: Reading = results[f"score/{INTACT.name}"]
        pattern = pattern_table({INTACT_ROW: reading.maps}, self.plan.layers)
        tables = {**run.tables, "pattern": pattern}
        if self.settings.per_head:
            fold_of = self.engine.fold_of, self._copies()[0].fold_of
            tables["head_pattern"] = heads_table(reading, results["induction"], *fold_of)
        maps = intact_maps(reading.maps)
        run = replace(run, tables=tables, arrays={**run.arrays, "maps": maps})
        return with_page(self.session, run, report)

    def _manifest(self, intact: Layers, results: Results) -> Manifest:
        """Return the manifest, given the maps of the intact model."""
        session, plan, calibration = self.session, self.plan, results.get(CALIBRATION)
        return replace(
            session.manifest_of(self.inputs),
            query_stride=query_stride(len(next(iter(intact.values())).queries)),
            layers=plan.layers,
            removed=tuple(condition.name for condition in plan.removed),
            results={
                "windows": windows_of(intact),
                "replacements": plan.replacements,
                "conditions": [*dict.fromkeys(condition.name for condition, _ in plan.rows)],
                "positional_sources": plan.sources,
                "left_out": dict(plan.left_out),
                "massive_outputs": self.massive_outputs(),
                "gains": {} if calibration is None else calibration.gains,
            },
        )


run = partial(run_study, Ablate)


def write_maps(path: Path, plan: Plan, maps: Maps, n_bytes: int = MAPS_BYTES) -> None:
    """Write the maps of a run that removes components, in float32, nats, by blocks of rows.

    Those of `name_of` are score maps. `pattern/intact` and `term/<term>` are patterns, whose first
    column holds the lead of the first key; the terms add up to the pattern. Where maps do not have
    the rows of all queries, `query_positions` are the queries of their rows.

    Args:
        path: of the file.
        plan: the sources.
        maps: the score maps of every row.
        n_bytes: the size of a block of rows of all maps.

    Raises:
        StorageError: if it cannot be written.
    """
    intact, of_sources = maps[INTACT_ROW], conditions_of(plan.sources)
    first, terms = next(iter(intact.values())), source_terms(plan.sources)
    contrasts = {"pattern/intact": {INTACT: 1.0}, **{f"term/{x}": of for x, of in terms.items()}}
    size = (len(intact), len(first.queries), first.n)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys([*map(name_of, maps), *contrasts], size)
    if len(first.queries) < first.n:
        shapes[QUERIES] = (len(first.queries),)
    with tensor_writer(path, shapes) as write:
        for place, (layer, of_layer) in enumerate(intact.items()):
            pattern, row = of_layer.pattern, 0  # the intact model sees the fewest keys
            for start, stop in of_layer.folds.where.blocks(len(maps) + 1, n_bytes):
                rows = slice(row, row + stop - start)
                means = {name: of_row[layer].mean(rows) for name, of_row in maps.items()}
                patterns = {
                    condition: pattern.with_lead(means[condition, NO_REPLACEMENT], start)
                    for condition in of_sources
                }
                blocks = {name_of(name): mean for name, mean in means.items()}
                blocks |= {x: contrast_map(of, patterns) for x, of in contrasts.items()}
                for name, block in blocks.items():
                    write(name, (place, row), block.float().numpy())
                row = rows.stop
        if QUERIES in shapes:
            write(QUERIES, (0,), first.queries.float().numpy())


def intact_maps(layers: Layers) -> dict[str, np.ndarray]:
    """Return the maps of a run that removes nothing, float32, in nats, NaN where masked.

    `score/intact`, `se/intact` (its standard error, from folds) and `pattern/intact` (whose first
    column holds the lead) are [layer, row, key_pos]. `score_per_head/intact` is [layer, head, row,
    key_pos]. If some queries have no rows, `query_positions` are the queries of the rows.
    """
    first, of_layers = next(iter(layers.values())), layers.values()
    where, means = first.folds.where, [layer.mean() for layer in of_layers]
    arrays = {
        "score/intact": torch.stack([mean.float() for mean in means]),
        "se/intact": torch.stack([standard_errors(layer) for layer in of_layers]),
        "pattern/intact": torch.stack([layer.pattern.mean_with_lead() for layer in of_layers]),
    }
    if first.heads:
        arrays["score_per_head/intact"] = head_means(layers)
    if len(where.queries) < where.n:
        arrays[QUERIES] = where.queries
    return {name: array.float().numpy() for name, array in arrays.items()}


def standard_errors(layer: LayerMaps) -> Float[Tensor, "row key_pos"]:
    """Return the standard error of a layer's mean map in float32, nats, NaN for j > i."""
    errors, row = torch.full((len(layer.queries), layer.n), torch.nan), 0
    for start, stop in layer.folds.where.blocks(layer.folds.n_folds):
        rows = slice(row, row + stop - start)
        errors[rows, :stop] = standard_error(layer.folds.rows(start, stop), layer.weights).float()
        row = rows.stop
    return errors


def head_means(layers: Layers) -> Float[Tensor, "layer head row key_pos"]:
    """Return the mean scores of every head over all sequences, nats."""
    return torch.stack([torch.stack([x.mean() for x in maps.heads]) for maps in layers.values()])


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
        >>> kept = study.tables["pattern"].query("layer == 2").set_index("removed")["kept"]
        >>> bool(kept["intact"] > 10 * abs(kept["w_k"]))
        True
        >>> study.maps["term/mask"].shape
        (3, 16, 16)
    """
    return run_of(Ablate, model, inputs, out, options)
