"""`heads`, run: orders of heads, and what a removal from the first of them costs.

A head is its layer and its number in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attention import PARTS, split_parts
from nope_probe.analyses.behaviour import by_document, cost_of, mean_interval
from nope_probe.analyses.jackknife import Interval
from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.layers.model import Given, numbered_layers
from nope_probe.hooks.layers.passes import Entry
from nope_probe.hooks.reading.attention import HeadSums, capture_attention
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.hooks.removing.weights import Calibration
from nope_probe.maps import MIN_KEYS
from nope_probe.maps.folds import State
from nope_probe.removal import INTACT
from nope_probe.run.folder import Run
from nope_probe.run.session import Session, input_arrays
from nope_probe.run.settings import GIVEN
from nope_probe.studies.engine import Engine, validate_removable
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.heads import MEASURES, Settings, against_chance, is_file, name_of, report
from nope_probe.studies.page import with_page
from nope_probe.studies.readings import (
    Probe,
    captured_entry,
    captured_induction,
    captured_losses,
    copies,
    costs,
    head_sums,
    induction,
    read_need,
)
from nope_probe.studies.study import CALIBRATION, Pass, Results, Study, captured
from nope_probe.studies.tables import TableRow, interval_columns

if TYPE_CHECKING:
    from nope_probe.studies.options import HeadsOptions as Options

HeadPlace = tuple[int, int]
STRONGEST = 8  # induction heads whose mean attention is a measure
MAP_BYTES = 2**30  # of the maps of all heads: of longer sequences, fewer queries have rows
ENTRY_BYTES = 2**29  # of a probe's residual streams, from which passes begin


@dataclass(frozen=True, kw_only=True)
class HeadCondition:
    """What is removed from which heads.

    Attributes:
        removed: rope, content or mask.
        order: the order whose first heads lose it, or next to whose first heads others are drawn;
            empty for a single head.
        k: how many heads.
        draw: the number of the draw, or of the single head; None for the first heads of the order.
        of_all: whether a draw is of all heads, those of smaller draws among them.
    """

    removed: str
    order: str = ""
    k: int = 1
    draw: int | None = None
    of_all: bool = False

    @property
    def name(self) -> str:
        """The name of its passes."""
        if not self.order:
            return f"{self.removed} head {self.draw}"
        drawn = "" if self.draw is None else f" draw {self.draw}"
        return f"{self.removed} {self.k} by {name_of(self.order)}{drawn}"

    def heads(
        self, ranked: Sequence[HeadPlace], places: Sequence[HeadPlace], seed: int
    ) -> list[HeadPlace]:
        """Return the heads: the first of an order, or as many others of their layers, at random.

        Where a layer has too few others, heads of any layer are drawn.

        Args:
            ranked: the heads in the order.
            places: all heads.
            seed: of the draws.
        """
        first = list(ranked[: self.k])
        if self.draw is None:
            return first
        if not self.order:
            return [places[self.draw]]
        if self.of_all:
            drawn = np.random.default_rng([seed, self.draw]).permutation(len(places))[: self.k]
            return sorted(places[at] for at in drawn)
        others = [place for place in places if place not in first]
        shuffled = np.random.default_rng([seed, self.draw, self.k]).permutation(len(others))
        left, alike = [others[at] for at in shuffled], list[HeadPlace]()
        for layer, of_layer in by_layer(first).items():
            alike += [place for place in left if place[0] == layer][: len(of_layer)]
        spare = [place for place in left if place not in alike]
        return sorted([*alike, *spare[: self.k - len(alike)]])


class Heads(Study[Settings]):
    """What the heads do that measures rank first."""

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded = self.settings, session.loaded
        if loaded.tokenizer is None:
            raise UserError("copies of random tokens need a tokenizer, and the model has none")
        self.layers = settings.layers_with_maps(loaded.info)
        self.places = [*product(self.layers, range(loaded.info.n_heads))]
        self.text = self.means = session.sequences()  # given sequences are all that there is
        if settings.data != GIVEN:
            others = replace(settings, n_seqs=settings.mean_seqs, seed=settings.seed + 1)
            self.means = session.sequences("mean-texts", settings=others)
        self.removed = settings.removed_of(components(loaded.model))
        validate_removable(loaded.model, [Ablation(remove=name) for name in self.removed])
        self.files = {
            name: read_order(Path(name), self.places) for name in settings.by if is_file(name)
        }
        self.probes = {
            "text": Probe.of(self.text),
            **copies(self.text, loaded.tokenizer, settings.seed),
        }
        ks = settings.counts_of(len(self.places))
        self.conditions = {one.name: one for one in self._conditions(ks)}

    def _conditions(self, ks: Sequence[int]) -> Iterator[HeadCondition]:
        settings, n_heads = self.settings, len(self.places)
        n_single = n_heads if settings.singles else settings.draws + 1
        single = np.random.default_rng(settings.seed).permutation(n_heads)[:n_single]
        for removed in self.removed:
            for order, k in product(settings.by, ks):
                for draw in (None, *range(settings.draws if k > 1 else 0)):
                    yield HeadCondition(
                        removed=removed, order=order, k=k, draw=draw, of_all=settings.least
                    )
            for number in sorted(single.tolist()) if 1 in ks else ():
                yield HeadCondition(removed=removed, draw=number)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that order the heads, that of mean attention, and those of the costs."""
        settings, session = self.settings, self.session
        means, info = Engine.of(session, self.means), session.loaded.info
        of_heads = info.n_heads * (1 + info.n_layers // settings.folds)  # of a layer, and all means
        n_maps = -(-of_heads * settings.seq_len // settings.n_rows)
        for name in settings.by:
            engine, capture = means, partial(positional_shares, layers=self.layers, name=name)
            if name == "need":
                few = means.inputs[: len(self.text)]
                engine = replace(means, inputs=few, documents=None, n_folds=1)
                removal = Ablation(remove=self.removed, layers=self.layers)
                capture = partial(read_need, removal=removal)
            elif name == "induction":
                engine = replace(self.probes["copy_random"].engine(session), n_folds=1)
                n_tokens = self.text.segment
                capture = partial(captured_induction, layers=self.layers, n_tokens=n_tokens)
            if not is_file(name):
                read = partial(captured, capture)
                yield Pass(key=f"order/{name}", engine=engine, read=read, maps=n_maps)
        if "content" in self.removed:
            yield Pass(key=CALIBRATION, engine=means, read=self._mean_attention)
        yield from costs(session, {INTACT.name: Ablation()}, self.probes, self._losses)
        for name, probe in self.probes.items():
            engine = probe.engine(session)
            kind = f"loss of {engine.inputs.shape[1]} tokens"
            yield Pass(key=f"enter/{name}", engine=engine, read=self._enter, kind=kind)
        removals = {
            name: Ablation(remove=condition.removed) for name, condition in self.conditions.items()
        }
        yield from costs(session, removals, self.probes, self._losses)

    def ranked(self, order: str, results: Results) -> list[tuple[HeadPlace, float]]:
        """Return all heads with their values, the highest first; in no order before a measure."""
        if order in self.files:
            return self.files[order]
        unknown = {"mean": torch.zeros(len(self.places))}
        [values] = results.get(f"order/{order}", unknown).values()
        values = values.flatten().nan_to_num()
        ranks = values.argsort(descending=True, stable=True)
        return [(self.places[at], float(values[at])) for at in ranks]

    def heads_of(self, condition: HeadCondition, results: Results) -> list[HeadPlace]:
        """Return the heads of a condition."""
        ranked = self.ranked(condition.order, results) if condition.order else []
        heads = [head for head, _ in ranked][:: -1 if self.settings.least else 1]
        return condition.heads(heads, self.places, self.settings.seed)

    def _mean_attention(self, engine: Engine, key: str, ablation: Ablation) -> Calibration | None:
        """Measure the mean attention of all heads that lose their content in some condition."""
        losing = [
            Ablation(remove="content", heads=by_layer(self.heads_of(condition, engine.results)))
            for condition in self.conditions.values()
            if condition.removed == "content"
        ]
        return engine.calibrated(key, losing).calibration

    def _enter(self, engine: Engine, key: str, ablation: Ablation) -> Entry:
        """Return the residual streams from which passes begin: as many blocks' as fit."""
        heads = (self.heads_of(one, engine.results) for one in self.conditions.values())
        blocks = sorted({min(of_condition)[0] for of_condition in heads})
        n_bytes = len(blocks) * engine.inputs.numel() * self.session.loaded.info.d_model * 4
        blocks = blocks[:: -(-n_bytes // ENTRY_BYTES)]
        assert engine.checkpoint is not None
        with engine.checkpoint.stream(key) as progress:
            return captured_entry(engine, blocks, progress)

    def _losses(self, name: str, probe: str, engine: Engine, key: str, ablation: Ablation) -> State:
        """Return the losses of each sequence, and of random tokens twice the scores of induction.

        A pass begins at the first block that loses something.
        """
        block, layers, also = 0, self.layers, list[HeadSums]()
        if name != INTACT.name:
            heads = by_layer(self.heads_of(self.conditions[name], engine.results))
            ablation = Ablation(remove=self.conditions[name].removed, heads=heads)
            block = min(heads)
            layers = tuple(sorted(by_layer(self._strongest(engine.results))))
        if probe == "copy_random":
            measure = induction(self.text.segment)
            also = head_sums(engine.model, layers, len(engine.inputs), measure)
        first, entry = self.probes[probe].prefix or 0, engine.results.get(f"enter/{probe}")
        return captured_losses(
            engine, key, ablation, first=first, entry=entry, block=block, also=also
        )

    def analyse(self, results: Results) -> Run:
        """Return the run: the orders, and what each condition costs."""
        session = self.session
        order = pd.DataFrame(
            {"order": name_of(by), "rank": rank, "layer": layer, "head": head, "value": value}
            for by in self.settings.by
            for rank, ((layer, head), value) in enumerate(self.ranked(by, results))
        )
        cost = pd.DataFrame(self._costs(results, alone=False)).astype({"draw": "Int64"})
        single = pd.DataFrame(self._costs(results, alone=True))
        tables = {"cost": cost, "order": order, "tests": against_chance(cost, single)}
        if len(single):
            tables["single"] = single
        manifest = replace(
            session.manifest_of(self.text),
            layers=self.layers,
            removed=self.removed,
            results={
                "n_heads": len(self.places),
                "induction_heads": [named([head]) for head in self._strongest(results)],
            },
        )
        kept = {"tokens": input_arrays(self.text)}
        return with_page(session, Run(manifest=manifest, arrays=kept, tables=tables), report)

    def _strongest(self, results: Results) -> list[HeadPlace]:
        """Return the heads with the highest induction scores in the intact model."""
        intact = results[f"loss/{INTACT.name}/copy_random"]
        scores = torch.cat([intact[str(layer)] for layer in self.layers], 1).mean(0)
        return [self.places[at] for at in scores.argsort(descending=True, stable=True)[:STRONGEST]]

    def _measured(self, name: str, measure: str, results: Results) -> Float[Tensor, " seq"]:
        """Return a measure of every sequence in a condition.

        Blocks that are not run again attend as in the intact model.
        """
        if measure != "induction":
            return results[f"loss/{name}/{measure}"]["losses"].mean(1)
        intact, changed = (results[f"loss/{of}/copy_random"] for of in (INTACT.name, name))
        scores = intact | changed
        heads = self._strongest(results)
        return torch.stack([scores[str(layer)][:, head] for layer, head in heads], 1).mean(1)

    def _cost(self, name: str, measure: str, results: Results) -> Interval:
        """Return what a condition costs: a rise of a loss, or a fall of attention."""
        changed, intact = (self._measured(of, measure, results) for of in (name, INTACT.name))
        pair = (intact, changed) if measure == "induction" else (changed, intact)
        cost = cost_of(*pair)["cost"]
        if measure in ("text", "copy_text"):
            cost = by_document(cost, self.probes[measure].documents)
        return mean_interval(cost)

    def _costs(self, results: Results, *, alone: bool) -> Iterator[TableRow]:
        """Yield what single heads cost, or the heads of orders and those drawn next to them."""
        chosen = {name: one for name, one in self.conditions.items() if alone == (not one.order)}
        for (name, one), measure in product(chosen.items(), MEASURES):
            heads, cost = self.heads_of(one, results), self._cost(name, measure, results)
            (layer, head), of_order = heads[0], {"order": name_of(one.order), "k": one.k}
            place = {"layer": layer, "head": head} if alone else {}
            drawn = {} if alone else {**of_order, "draw": one.draw, "heads": named(heads)}
            removed = {**place, "removed": one.removed, **drawn, "measure": measure}
            yield removed | interval_columns(cost=cost)


def positional_shares(
    engine: Engine, checkpoint: Stream | None, *, layers: Sequence[int], name: str
) -> State:
    """Return the share of position in each head's attention; see `split_attention`.

    Args:
        engine: the model on the sequences.
        checkpoint: of the stream.
        layers: whose heads are measured.
        name: `others`: among the keys after the first; `positional`: among all keys.
    """
    n = engine.inputs.shape[1]
    of_all = (
        4 * engine.n_folds * n * sum(at.n_heads for at in numbered_layers(engine.model, layers))
    )
    rows = engine.query_rows or min(n, max(MIN_KEYS, MAP_BYTES // of_all))
    maps = replace(engine, query_rows=rows).by_fold(
        capture_attention, checkpoint, layers=layers, skip_keys=engine.skip_keys, keeps_scores=False
    )
    parts = dict(zip(PARTS, split_parts(maps)[0][..., 0].unbind(-1), strict=True))
    position, whole = parts["others_position"], parts["others_position"] + parts["others_content"]
    if name == "positional":
        position, whole = parts["first_position"] + position, parts["information"]
    return {"mean": (position / whole).flatten()}


def by_layer(heads: Sequence[HeadPlace]) -> dict[int, list[int]]:
    """Return heads by layer."""
    return {layer: [head for at, head in heads if at == layer] for layer, _ in heads}


def named(heads: Sequence[HeadPlace]) -> str:
    """Return the names of heads, in order.

    Example:
        >>> named([(3, 0), (1, 2)])
        'L1H2 L3H0'
    """
    return " ".join(f"L{layer}H{head}" for layer, head in sorted(heads))


def read_order(path: Path, heads: Sequence[HeadPlace]) -> list[tuple[HeadPlace, float]]:
    """Return the heads of a CSV file in its order, with the value of a third column if it has one.

    Raises:
        UserError: for a file without the columns layer and head, a head that does not exist or is
            named twice, or too few heads.
    """
    with reading(f"cannot read --by {path}"):
        table = pd.read_csv(path)
    if not {"layer", "head"} <= {*table.columns}:
        raise UserError(f"--by {path}: expected the columns layer and head, got {[*table.columns]}")
    ranked = [(int(layer), int(head)) for layer, head in table[["layer", "head"]].to_numpy()]
    unknown = [head for head in ranked if head not in heads]
    if unknown or len({*ranked}) < len(ranked):
        wrong = f"{named(unknown[:1])} is no head" if unknown else "a head comes twice"
        raise UserError(f"--by {path}: {wrong} of the ordered layers")
    others = [name for name in table if name not in ("layer", "head")]
    numbers = table[others].select_dtypes("number")
    values = numbers.iloc[:, 0] if numbers.shape[1] else pd.Series(np.nan, index=table.index)
    return list(zip(ranked, values.astype(float).tolist(), strict=True))


@partial(takes_options, Settings)
def run_heads(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Unpack[Options]
) -> Run:
    """Test what the heads at the top of an order do, as the `heads` command does.

    Args:
        model: a name, as the command takes it, or a model that `load` takes or returns, of which
            all layers are studied by default.
        inputs: what `capture_scores` takes; by default the sequences that the options describe.
        out: a new folder for the run, or that of the same run; by default nothing is kept.
        options: the flags of `python -m nope_probe.heads --help`, as in `seq_len=32`.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_heads
        >>> run = run_heads("rope-tiny", by="others", k=[1], mean_seqs=64)
        >>> row = run.tables["tests"].set_index("measure").loc["copy_random"]
        >>> bool(row["beyond"]), int(row["rank"]), int(row["of"])
        (True, 1, 16)
    """
    return run_of(Heads, Settings, model, inputs, out, options)
