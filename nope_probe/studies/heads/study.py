"""The `heads` command's study: orders of heads, and what removals from the first heads cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.behaviour import by_document, mean_interval
from nope_probe.analyses.head_measures import induction_scores
from nope_probe.analyses.jackknife import Interval
from nope_probe.data.sequences import random_twice, repeated
from nope_probe.errors import UserError
from nope_probe.figures.words import with_readers
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.entry import Entry, entered, logits_from, run_to_enter
from nope_probe.hooks.layers.model import Given, attention_read
from nope_probe.hooks.reading.capture import token_losses
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.folds import State
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.session import Session
from nope_probe.run.settings import GIVEN
from nope_probe.studies.engine import Engine, validate_removable
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes
from nope_probe.studies.heads.orders import (
    HeadCondition,
    HeadPlace,
    by_layer,
    head_measures,
    induction,
    is_file,
    name_of,
    read_order,
)
from nope_probe.studies.heads.page import HeadsTested, report
from nope_probe.studies.heads.settings import LOWEST, Settings
from nope_probe.studies.page import with_page
from nope_probe.studies.study import CALIBRATION, Capture, Pass, Results, Study, captured, run_study
from nope_probe.studies.tables import TableRow, interval_columns

STRONGEST = 8  # induction heads whose mean attention is a measure
MAP_BYTES = 2**30  # of the maps of heads that are captured at a time
COPIES = ("copy_random", "copy_text")  # whose second copies alone are scored
MEASURES = ("text", *COPIES, "induction")
COLUMNS = ("measure", "cost", "cost_low", "cost_high")


class Heads(Study[Settings]):
    """What the heads do that measures rank first."""

    command = "heads"
    function = "run_heads"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded = self.settings, session.loaded
        if loaded.tokenizer is None:
            raise UserError("copies of random tokens need a tokenizer, and the model has none")
        self.layers, self.n_heads = settings.layers_with_maps(loaded.info), loaded.info.n_heads
        self.places = [(layer, head) for layer in self.layers for head in range(self.n_heads)]
        self.text = self.means = session.sequences()  # given sequences are all that there is
        if settings.data != GIVEN:
            others = replace(settings, n_seqs=settings.mean_seqs, seed=settings.seed + 1)
            self.means = session.sequences("mean-texts", settings=others)
        self.engine = Engine.of(session)
        validate_removable(loaded.model, [Ablation(remove=name) for name in settings.remove])
        self.ks = settings.counts_of(len(self.places))
        self.given_orders = {
            name: read_order(Path(name), self.places) for name in settings.by if is_file(name)
        }
        segment, seed = self.text.segment, settings.seed
        self.probes = {
            "text": self.text.inputs,
            "copy_random": random_twice(self.text, segment, loaded.tokenizer, seed),
            "copy_text": repeated(self.text, segment),
        }
        if "content" in settings.remove and self.means is not self.text:
            self.probes["text_of_means"] = self.means.inputs[: len(self.text)]
        self.conditions = self._make_conditions()
        self.measures: dict[str, State] = {}  # of the heads of some layers, by pass

    def _make_conditions(self) -> list[HeadCondition]:
        settings, conditions = self.settings, list[HeadCondition]()
        for removed in settings.remove:
            for order, k in product(settings.by, self.ks):
                conditions += [
                    HeadCondition(removed=removed, order=order, k=k, draw=draw)
                    for draw in (None, *range(settings.draws if k > 1 else 0))
                ]
            if 1 in self.ks:
                conditions += [HeadCondition(removed=removed, alone=head) for head in self.places]
        return conditions

    def conditions_on(self, probe: str) -> list[HeadCondition]:
        """Return the conditions that are run on a probe.

        On the texts of the means, only the most heads lose their content.
        """
        if probe != "text_of_means":
            return self.conditions
        k = max(self.ks)
        return [
            one
            for one in self.conditions
            if (one.removed, one.k, one.draw, one.alone) == ("content", k, None, None)
        ]

    def passes(self) -> Iterator[Pass]:
        """Yield the pass that orders the heads, that of mean attention, and those of the costs."""
        means, batch_size = self.engine.with_sequences(self.means), self.engine.batch_size
        if any(order.removeprefix(LOWEST) == "induction" for order in self.settings.by):
            batch = self.probes["copy_random"][:batch_size]
            copies = replace(self.engine, inputs=batch, documents=None)
            read = partial(induction, layers=self.layers, n_tokens=self.text.segment)
            yield Pass(key="induction", engine=copies, read=partial(self._read_measures, read))
        cells = self.n_heads * means.inputs.shape[1] ** 2
        size = max(1, MAP_BYTES // (4 * self.settings.folds * cells))
        for start in range(0, len(self.layers), size):
            layers = self.layers[start : start + size]
            read = partial(self._read_measures, partial(head_measures, layers=layers))
            yield Pass(key=f"order/L{layers[0]}", engine=means, read=read, kind="order")
        if "content" in self.settings.remove:
            yield Pass(key=CALIBRATION, engine=means, read=self._read_means)
        for probe, tokens in self.probes.items():
            n_runs = 1 + len(self.conditions_on(probe))
            for start in range(0, len(tokens), batch_size):
                batch = tokens[start : start + batch_size]
                yield Pass(
                    key=f"{probe}/{start}",
                    engine=replace(self.engine, inputs=batch, documents=None),
                    read=partial(captured, partial(self._losses, probe)),
                    runs=n_runs,
                    kind=probe,
                )

    def _read_measures(
        self, capture: Capture, engine: Engine, key: str, ablation: Ablation | None
    ) -> State:
        """Return measures by which heads are ordered, and keep them for the passes after it."""
        self.measures[key] = captured(capture, engine, key, ablation)
        return self.measures[key]

    def measured(self, name: str) -> Float[Tensor, " head"]:
        """Return a measure of all heads; empty before it is measured."""
        parts = [measures[name] for measures in self.measures.values() if name in measures]
        return torch.cat(parts) if parts else torch.empty(0)

    def ranked(self, order: str) -> list[tuple[HeadPlace, float]]:
        """Return all heads with their values, in an order."""
        if order in self.given_orders:
            return self.given_orders[order]
        values = self.measured(order.removeprefix(LOWEST)).nan_to_num()
        ranks = values.argsort(descending=not order.startswith(LOWEST), stable=True)
        return [(self.places[at], float(values[at])) for at in ranks]

    def _heads_of(self, condition: HeadCondition) -> list[HeadPlace]:
        """Return the heads of a condition."""
        is_forecast = len(self.measured("information")) < len(self.places)  # any take as long
        is_unordered = is_forecast or condition.alone is not None
        ranked = self.places if is_unordered else [head for head, _ in self.ranked(condition.order)]
        return condition.heads(ranked, self.places, self.settings.seed)

    def _without(self, condition: HeadCondition) -> Ablation:
        """Return the ablation of a condition."""
        return Ablation(remove=condition.removed, heads=by_layer(self._heads_of(condition)))

    def _read_means(
        self, engine: Engine, key: str, ablation: Ablation | None
    ) -> Calibration | None:
        """Measure the mean attention of all heads that lose their content in some condition."""
        losing = [self._without(one) for one in self.conditions if one.removed == "content"]
        return engine.calibrated(key, losing).calibration

    def _losses(self, probe: str, engine: Engine, stream: StreamCheckpoint | None) -> State:
        """Return the loss of each sequence of a batch, intact and in each condition.

        The passes of conditions begin at the first block that loses something. Of copies of random
        tokens come the induction scores of all heads too; blocks that are not run again attend as
        in the intact model.
        """
        removals = [self._without(condition) for condition in self.conditions_on(probe)]
        if engine.calibration is None:  # in a forecast, which has measured no means
            removals = [removal.without(removal.condition - {"content"}) for removal in removals]
        model, stream = engine.model, stream or StreamCheckpoint()
        blocks = [min(removal.heads or ()) for removal in removals]
        with torch.inference_mode():
            entry, losses, scores = self._run(probe, engine, blocks)
            stream.advance(len(losses))
            all_losses, all_scores = [losses], [scores]
            for removal, block in zip(removals, blocks, strict=True):
                with ablated(model, removal, engine.calibration), entered(model, entry, block):
                    _, losses, changed = self._run(probe, engine)
                stream.advance(len(losses))
                all_losses.append(losses)
                all_scores.append(scores | changed)
        state = {"loss": torch.stack(all_losses)}
        if scores:
            stacked = [torch.cat([of[n] for n in self.layers], 1) for of in all_scores]
            state["induction"] = torch.stack(stacked).double()
        return state

    def _run(
        self, probe: str, engine: Engine, blocks: Sequence[int] = ()
    ) -> tuple[Entry, Float[Tensor, " seq"], dict[int, Float[Tensor, "seq head"]]]:
        """Run a batch: return what passes from some blocks need, the losses, and induction scores.

        Scores are by block, of copies of random tokens alone.
        """
        model, tokens, segment = engine.model, engine.inputs, self.text.segment
        first = tokens.shape[1] - segment if probe in COPIES else 0

        def read(layer: Layer, attention: Attention) -> tuple[int, Float[Tensor, "seq head"]]:
            return layer.index, induction_scores(attention, segment)

        reading: AbstractContextManager[list[tuple[int, Tensor]]] = (
            attention_read(model, read) if probe == "copy_random" else nullcontext([])
        )
        with logits_from(model, first), reading as scores:
            entry, logits = run_to_enter(model, tokens, blocks)
            losses = token_losses(logits, tokens[:, first:]).double().cpu()
        return entry, losses.mean(1), dict(scores)

    def analyse(self, results: Results) -> Run:
        """Return the run: the orders, and what each condition costs."""
        session, settings = self.session, self.settings
        order = pd.DataFrame(
            {"order": name_of(by), "rank": rank, "layer": layer, "head": head, "value": value}
            for by in settings.by
            for rank, ((layer, head), value) in enumerate(self.ranked(by))
        )
        induction = self._of_all(results, "copy_random", "induction")
        strongest = induction[0].mean(0).argsort(descending=True, stable=True)[:STRONGEST]
        values = {probe: self._of_all(results, probe, "loss") for probe in self.probes}
        values["induction"] = induction[..., strongest].mean(-1)
        costs = self._costs_of(values)
        alone = costs["order"] == ""
        places = [one.alone for one in self.conditions if one.alone for _ in MEASURES]
        single = costs.loc[alone, ["removed", *COLUMNS]].reset_index(drop=True)
        single = pd.DataFrame(places, columns=["layer", "head"]).join(single)
        tables = {"cost": costs[~alone], "order": order}
        tables["tests"] = against_chance(tables["cost"], single)
        if alone.any():
            tables["single"] = single
        tested = HeadsTested(
            n_heads=len(self.places),
            induction_heads=tuple("L{}H{}".format(*self.places[at]) for at in strongest),
            intact={name: float(values[name][0].mean()) for name in MEASURES},
            cost_of_means=self._cost_of_means(values),
        )
        manifest = replace(
            session.manifest_of(self.text),
            layers=self.layers,
            removed=settings.remove,
            results=asdict(tested),
        )
        kept = {"tokens": input_arrays(self.text)}
        return with_page(session, Run(manifest=manifest, arrays=kept, tables=tables), report)

    def _of_all(self, results: Results, probe: str, name: str) -> Float[Tensor, "run seq *head"]:
        """Return what was read of all batches of a probe, intact and in each condition."""
        starts = range(0, len(self.probes[probe]), self.engine.batch_size)
        return torch.cat([results[f"{probe}/{start}"][name] for start in starts], 1)

    def _cost(self, values: Mapping[str, Float[Tensor, "run seq"]], name: str, at: int) -> Interval:
        """Return what a measure's condition costs: a rise of a loss, or a fall of attention.

        Args:
            values: the measures of every sequence, the intact model's first.
            name: the measure.
            at: the place of the condition, from 0.
        """
        cost = values[name][1 + at] - values[name][0]
        if name == "induction":
            cost = -cost
        documents = self.text.documents if name in ("text", "copy_text") else None
        return mean_interval(cost if documents is None else by_document(cost, documents))

    def _costs_of(self, values: Mapping[str, Float[Tensor, "run seq"]]) -> pd.DataFrame:
        rows: list[TableRow] = [
            {
                **{"removed": one.removed, "order": name_of(one.order), "k": one.k},
                **{"draw": one.draw, "heads": named(self._heads_of(one)), "measure": measure},
                **interval_columns(cost=self._cost(values, measure, at)),
            }
            for at, one in enumerate(self.conditions)
            for measure in MEASURES
        ]
        return pd.DataFrame(rows).astype({"draw": "Int64"})

    def _cost_of_means(self, values: Mapping[str, Float[Tensor, "run seq"]]) -> tuple[float, ...]:
        """Return what the most heads without content cost on other texts, and on their means'.

        The first order's heads lose their content; empty where content is not removed.
        """
        if "text_of_means" not in values:
            return ()
        first, *_ = self.conditions_on("text_of_means")
        places = {"text": self.conditions.index(first), "text_of_means": 0}
        return tuple(float(self._cost(values, probe, at).value) for probe, at in places.items())


def named(heads: Sequence[HeadPlace]) -> str:
    """Return the names of heads, in order.

    Example:
        >>> named([(3, 0), (1, 2)])
        'L1H2 L3H0'
    """
    return " ".join(f"L{layer}H{head}" for layer, head in sorted(heads))


def against_chance(costs: pd.DataFrame, single: pd.DataFrame) -> pd.DataFrame:
    """Compare what an order's first heads cost with other heads.

    The others are the draws of as many heads, each set of heads once, or for k = 1 all other single
    heads.

    Args:
        costs: the rows of the orders' first heads, and those of the draws.
        single: the rows of every head alone, if k = 1 was run.

    Returns:
        removed, order, k, measure, cost with its bounds; chance (the others' mean) with the others'
        lowest and highest cost; the cost's rank among `of` costs, 1 being the highest; and
        whether it is beyond all others with its 95% interval.
    """
    rows: list[TableRow] = []
    names = ["removed", "order", "k", "measure"]
    for keys, group in costs.groupby(names, sort=False):
        first = group[group["draw"].isna()].iloc[0]
        if first["k"] == 1:
            same = single["removed"].eq(first["removed"]) & single["measure"].eq(first["measure"])
            group = with_readers(single[same]).rename(columns={"reader": "heads"})
        others = group.drop_duplicates("heads")
        chance = others.loc[others["heads"] != first["heads"], "cost"].to_numpy(float)
        low, high = chance.min(), chance.max()
        rows.append(
            {
                **dict(zip(names, keys, strict=True)),
                **{name: float(first[name]) for name in COLUMNS[1:]},
                **{"chance": chance.mean(), "chance_low": low, "chance_high": high},
                **{"rank": 1 + int((chance > first["cost"]).sum()), "of": 1 + len(chance)},
                "beyond": bool(first["cost_low"] > high or first["cost_high"] < low),
            }
        )
    return pd.DataFrame(rows)


run = partial(run_study, Heads)


@takes(Heads)
def run_heads(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Any
) -> Run:
    """Test what the heads at the top of an order do, as the `heads` command does.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_heads
        >>> run = run_heads("rope-tiny", remove="rope", k=[1], mean_seqs=64)
        >>> row = run.tables["tests"].set_index("measure").loc["copy_random"]
        >>> bool(row["beyond"]), int(row["rank"]), int(row["of"])
        (True, 1, 16)
    """
    return run_of(Heads, model, inputs, out, options)
