"""The `ablate` command's run: what is removed, one thing at a time, its passes, tables and maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

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
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Given, layers_of
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import WITH_GAIN, Ablation
from nope_probe.hooks.removing.weights import Calibration
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import windows_of
from nope_probe.maps.maps import Layers
from nope_probe.removal import (
    IN_HEADS,
    INTACT,
    MASK,
    NO_REPLACEMENT,
    SOURCES,
    UNION,
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
from nope_probe.studies.conditions import parse_removed
from nope_probe.studies.engine import (
    Engine,
    idle_sources,
    irreplaceable,
    validate_first_sequence,
    validate_removable,
)
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.head_scores import (
    captured_induction,
    heads_table,
    random_copies,
    read_scores,
)
from nope_probe.studies.page import with_page
from nope_probe.studies.study import (
    CALIBRATION,
    Pass,
    Results,
    Study,
    calibration,
    captured,
)
from nope_probe.studies.tables import (
    INTACT_ROW,
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

UNSHUFFLED = INTACT_ROW, (MASK, NO_REPLACEMENT)  # rows that are run on shuffled tokens too
QUERIES = "query_positions"  # of maps whose rows are not all; exact in float32, below 2**24
MAPS_BYTES = 1 << 26  # of a block of rows of all maps


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is removed from a model, and how.

    Attributes:
        sources: the mask, and the window and position encodings that the model has as well. They
            are removed in all combinations.
        removed: what else is removed, one at a time.
        ablations: for each replacement of removed weights, an ablation that removes nothing yet.
        layers: the numbers of the layers to map.
        left_out: components that by default are no sources or not removed here, and why.
        per_head: whether the maps of each head are kept where sources alone are removed, and their
            attention where nothing is.
        losses: whether passes that keep the mask read the loss too.
    """

    sources: tuple[Component, ...]
    removed: tuple[Condition, ...] = ()
    ablations: tuple[Ablation, ...] = (Ablation(),)
    layers: tuple[int, ...] = (0,)
    left_out: Mapping[str, str] = field(default_factory=dict)
    per_head: bool = False
    losses: bool = False

    @property
    def rows(self) -> dict[Row, Ablation]:
        """The ablation of each row: the intact model, other rows that replace no weight, the rest.

        The sources are removed in all heads, what else is removed in the heads of the ablations.
        Behind a constant output W_V does not matter, so a row of both runs without W_O alone.
        """
        whole, ordered = replace(self.ablations[0], heads=None), conditions_of(self.sources)
        if WRITTEN in self.removed:  # what the mask makes, in a model that keeps it
            ordered.insert(ordered.index(MASK) + 1, WRITTEN)
        rows = {(condition, NO_REPLACEMENT): whole.without(condition) for condition in ordered}
        for by in self.ablations:
            for condition in sorted(self.removed, key=lambda removed: bool(removed.weights)):
                is_constant = "w_o" in condition and by.kind not in WITH_GAIN
                needed = Condition(condition - {"w_v"}) if is_constant else condition
                replacement = str(by.replacement) if condition.weights else NO_REPLACEMENT
                rows.setdefault((condition.in_heads(by.heads), replacement), by.without(needed))
        return rows

    @property
    def nulls(self) -> dict[Row, Ablation]:
        """The null of each row that removes written position: the same noise and no position."""
        return {
            (condition.null, by): ablation.without(ablation.condition.null)
            for (condition, by), ablation in self.rows.items()
            if condition.null != condition
        }

    def passes(self, engine: Engine, shuffled: Sequences | None = None) -> Iterator[Pass]:
        """Yield all passes, in the order in which they are run.

        Args:
            engine: the model on the run's sequences.
            shuffled: the same sequences with their tokens permuted, if they are a control.
        """
        yield from calibration(engine, [*self.rows.values()])
        runs = {key_of(*of): (of[1], engine) for of in (self.rows | self.nulls).items()}
        if shuffled is not None:
            of_tokens = replace(engine, inputs=shuffled.inputs, documents=shuffled.documents)
            runs |= {f"shuffled/{row[0].name}": (self.rows[row], of_tokens) for row in UNSHUFFLED}
        for key, (ablation, on) in runs.items():
            condition, is_shuffled = ablation.condition, on is not engine
            per_head = self.per_head and condition.are_sources and not is_shuffled
            # Without the mask a token sees the next token, and its loss means nothing.
            loss = self.losses and "mask" not in condition and not is_shuffled
            read = partial(read_scores, layers=self.layers, per_head=per_head, loss=loss)
            yield Pass(
                key=key,
                engine=on,
                read=partial(read, attention=per_head and not self.sources),
                ablation=ablation if condition else None,
                maps=len(self.layers) * (1 + per_head * layers_of(engine.model)[0].n_heads),
                kind=f"scores{' of heads' * per_head}{' and loss' * loss}",
                reads_logits=loss,
            )


def name_of(row: Row) -> str:
    """Return the name of a row's score maps in a run: `score/mask`, `score_mean/w_q`."""
    condition, replacement = row
    by = "" if replacement == NO_REPLACEMENT else f"_{replacement}"
    return f"score{by}/{condition.name}"


def key_of(row: Row, ablation: Ablation) -> str:
    """Return the key of the pass of a row: the name, without heads, of the row that is run."""
    in_heads = f"{IN_HEADS}heads" * (ablation.heads is not None)
    return name_of((ablation.condition, row[1])) + in_heads


def maps_of(rows: Mapping[Row, Ablation], results: Results) -> Maps:
    """Return the score maps of rows from the results of the passes, by key."""
    return {row: results[key_of(row, by)].maps for row, by in rows.items()}


def make_plan(
    has: Sequence[str],
    remove: Sequence[str] | None = None,
    *,
    left_out: Mapping[str, str] | None = None,
    **options: Any,
) -> Plan:
    """Return the plan for a model.

    Args:
        has: the components that the model has.
        remove: what to remove besides the sources, one at a time: components, circuits, bands of
            RoPE, positions of writers and unions of these; None for `DEFAULT_REMOVED`,
            `["sources"]` for the sources alone, `[]` for the intact model alone.
        left_out: components that are no source, and removed only where they are named, and why.
        options: further attributes of the plan.

    Raises:
        UserError: for a name that does not exist.
    """
    is_intact = remove is not None and not remove
    if "mask" not in has and not is_intact:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    left_out = {name: why for name, why in (left_out or {}).items() if name in has}
    in_heads = any(by.heads is not None for by in options.get("ablations", ()))
    sources = tuple(name for name in SOURCES if name in has and name not in left_out)
    if remove is None:
        there = {*has, *(() if in_heads else ("written",))} - {*left_out}
        remove = [name for name in DEFAULT_REMOVED if {*name.split(UNION)} <= there]
    else:  # weights are named
        left_out = {name: why for name, why in left_out.items() if name in SOURCES}
    named = [parse_removed(name) for name in remove if name != "sources"]
    return Plan(
        sources=() if is_intact else sources,
        removed=tuple(c for c in dict.fromkeys(named) if in_heads or not c <= {*sources}),
        left_out=left_out,
        **options,
    )


class Ablate(Study[Settings]):
    """The lead and the order of every layer without the sources, and with weights replaced."""

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded, self.inputs = self.settings, session.loaded, session.sequences()
        self.is_text = settings.removes and self.inputs.kind == "text"
        self.engine, model = Engine.of(session), loaded.model
        layers = tuple(settings.layers_with_maps(loaded.info))
        self.plan = make_plan(
            components(model),
            settings.remove if settings.removes else (),
            left_out=irreplaceable(model) | idle_sources(model, self.inputs.inputs, len(layers)),
            ablations=settings.ablations,
            layers=layers,
            per_head=settings.per_head,
            losses=self.is_text and settings.depth_in(loaded.info) == loaded.info.depth,
        )
        validate_removable(model, self.plan.rows.values())
        if settings.removes:
            refuse(settings.wrong_conditions(self.plan.removed))

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that map the scores of every condition."""
        engine, layers = self.engine, self.plan.layers
        validate_first_sequence(engine, name_of(INTACT_ROW), layers)
        shuffled = self.inputs.shuffled(self.settings.seed) if self.is_text else None
        yield from self.plan.passes(engine, shuffled)
        if self.settings.per_head and not self.settings.removes:
            copies, n_tokens = self._copies()
            induction = partial(captured_induction, layers=layers, n_tokens=n_tokens)
            yield Pass(key="induction", engine=copies, read=partial(captured, induction))

    def _copies(self) -> tuple[Engine, int]:
        """Return the engine on n random tokens twice, on which induction is measured, and n."""
        tokenizer, n_processes = self.session.loaded.tokenizer, self.session.processes.count
        return random_copies(self.engine, self.inputs, tokenizer, n_processes)

    def analyse(self, results: Results) -> Run:
        """Measure the lead and the pattern of every layer in every condition, return the run."""
        plan, folder = self.plan, self.session.checkpoint.folder
        maps = maps_of(plan.rows, results)
        files = {f"{name}.safetensors": folder / f"{name}.partial" for name in ("folds", "maps")}
        write_folds(files["folds.safetensors"], {name_of(row): of for row, of in maps.items()})
        write_maps(files["maps.safetensors"], plan.sources, maps)
        run = Run(
            manifest=self._manifest(maps[INTACT_ROW], results.get(CALIBRATION)),
            arrays={"tokens": input_arrays(self.inputs)},
            files=files,
            tables=self._tables(maps, results),
        )
        stored = load_file(files["maps.safetensors"])  # mapped
        shown = replace(run, arrays={"maps": {name: x.numpy() for name, x in stored.items()}})
        return with_page(self.session, run, lambda _: report(shown))

    def _tables(self, maps: Maps, results: Results) -> dict[str, pd.DataFrame]:
        """Return the tables of the run."""
        plan = self.plan
        nulls, shuffled = maps_of(plan.nulls, results), Maps()
        if self.is_text:
            shuffled = {row: results[f"shuffled/{row[0].name}"].maps for row in UNSHUFFLED}
        of_layers = [
            self._tables_of(layer, maps, nulls, shuffled)
            for layer in by_layer(plan.layers, "analysing")
        ]
        tables = {
            name: pd.concat([of_layer[name] for of_layer in of_layers], ignore_index=True)
            for name in of_layers[0]
        }
        if "induction" in results:
            induction = results["induction"], self._copies()[0].fold_of
            intact = results[name_of(INTACT_ROW)]
            tables["head_pattern"] = heads_table(intact, self.engine.fold_of, induction)
        if not plan.sources:
            return tables
        weights = next(iter(maps[INTACT_ROW].values())).weights
        losses = {
            row: Estimates.of_means(reading.losses, weights)
            for row, by in (plan.rows | plan.nulls).items()
            if (reading := results[key_of(row, by)]).losses is not None
        }
        is_row = tables["pattern"]["removed"].isin({condition.name for condition, _ in maps})
        return {**tables, "over_layers": means_table(tables["pattern"][is_row], losses)}

    def _tables_of(
        self, layer: int, maps: Maps, nulls: Maps, shuffled: Maps
    ) -> dict[str, pd.DataFrame]:
        """Return the tables of a layer; the last rows of its pattern are the controls."""
        sources = self.plan.sources
        grams = contrast_grams(patterns_of(maps, layer)) if sources else {}
        pattern = [pattern_table(maps, layer, grams)]
        if nulls:
            of_nulls = patterns_of({INTACT_ROW: maps[INTACT_ROW]} | nulls, layer)
            pattern.append(pattern_table(nulls, layer, contrast_grams(of_nulls)))
        if shuffled:
            pattern.append(pattern_table(shuffled, layer, {}).replace({"removed": SHUFFLED}))
        tables = {"offsets": offsets_table(sources, maps, layer), "pattern": pd.concat(pattern)}
        if sources and self.settings.per_head:
            tables["head_pattern"] = head_pattern_table(maps, layer)
        if sources:
            tables["terms"] = terms_table(sources, layer, grams)
        return tables

    def _manifest(self, intact: Layers, calibration: Calibration | None) -> Manifest:
        """Return the manifest, given the maps of the intact model."""
        plan = self.plan
        return replace(
            self.session.manifest_of(self.inputs),
            query_stride=query_stride(len(next(iter(intact.values())).queries)),
            layers=plan.layers,
            removed=tuple(
                condition.in_heads(plan.ablations[0].heads).name for condition in plan.removed
            ),
            results={
                "windows": windows_of(intact),
                "replacements": [*dict.fromkeys(by for _, by in plan.rows if by != NO_REPLACEMENT)],
                "conditions": [*dict.fromkeys(condition.name for condition, _ in plan.rows)],
                "positional_sources": plan.sources,
                "left_out": dict(plan.left_out),
                "massive_outputs": self.massive_outputs(),
                "gains": {} if calibration is None else calibration.gains,
            },
        )


def write_maps(path: Path, sources: Sequence[str], maps: Maps) -> None:
    """Write a run's maps [layer, row, key_pos], in float32, nats, by blocks of rows; NaN if masked.

    Those of `name_of` are score maps. `pattern/intact` and `term/<term>` are patterns, whose first
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
    intact, of_sources = maps[INTACT_ROW], conditions_of(sources)
    first, terms = next(iter(intact.values())), source_terms(sources)
    contrasts = {"pattern/intact": {INTACT: 1.0}, **{f"term/{x}": of for x, of in terms.items()}}
    size, heads = (len(first.queries), first.n), () if sources else first.heads
    names = [*map(name_of, maps), *contrasts, *(() if sources else ("se/intact",))]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (len(intact), *size))
    if heads:
        shapes["score_per_head/intact"] = len(intact), len(heads), *size
    if size[0] < size[1]:
        shapes[QUERIES] = size[:1]
    n_maps = len(maps) + 1 + len(heads) + first.folds.n_folds * (not sources)
    with tensor_writer(path, shapes) as write:
        of_layers = enumerate(by_layer([*intact.items()], "writing maps"))
        for place, (layer, of_layer) in of_layers:
            pattern, row = of_layer.pattern, 0  # the intact model sees the fewest keys
            for start, stop in of_layer.folds.where.blocks(n_maps, MAPS_BYTES):
                rows = slice(row, row + stop - start)
                means = {name: of_row[layer].mean(rows) for name, of_row in maps.items()}
                patterns = {
                    condition: pattern.with_lead(means[condition, NO_REPLACEMENT], start)
                    for condition in of_sources
                }
                blocks = {name_of(name): mean for name, mean in means.items()}
                blocks |= {x: contrast_map(of, patterns) for x, of in contrasts.items()}
                if not sources:
                    errors = standard_error(of_layer.folds.rows(start, stop), of_layer.weights)
                    blocks["se/intact"] = pad(errors, (0, first.n - stop), value=nan)
                for name, block in blocks.items():
                    write(name, (place, row), block.float().numpy())
                for head in range(len(heads)):
                    block = of_layer.heads[head].mean(rows)
                    write("score_per_head/intact", (place, head, row), block.float().numpy())
                row = rows.stop
        if QUERIES in shapes:
            write(QUERIES, (0,), first.queries.float().numpy())


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
