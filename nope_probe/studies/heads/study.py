"""The `heads` command's study: orders of heads, and what removals from the first heads cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.analyses.attention import split_attention
from nope_probe.analyses.behaviour import by_document, mean_interval
from nope_probe.analyses.head_changes import LEVEL, QUANTITIES, ROUNDING, holm
from nope_probe.analyses.head_measures import (
    first_key_attention,
    induction_attention,
    previous_token_attention,
)
from nope_probe.analyses.jackknife import Interval
from nope_probe.data.sequences import random_twice, repeated
from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.entry import Entry, entered, logits_from, run_to_enter
from nope_probe.hooks.layers.model import Given, attention_read, logits_of, read_attention
from nope_probe.hooks.reading.attention import capture_attention
from nope_probe.hooks.reading.batch_readings import keys_before, weights_on
from nope_probe.hooks.reading.capture import token_losses
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.folds import State, folds_of
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.session import Session
from nope_probe.run.settings import GIVEN
from nope_probe.studies.engine import Engine, validate_removable
from nope_probe.studies.from_python import ModelOrName, run_of, takes
from nope_probe.studies.heads.page import HeadsTested, report
from nope_probe.studies.heads.settings import LOWEST, Settings
from nope_probe.studies.page import with_page
from nope_probe.studies.study import Pass, Results, Study, run_study
from nope_probe.studies.tables import TableRow, interval_columns

STRONGEST = 8  # induction heads whose mean attention is a measure
MAP_BYTES = 2**30  # of the maps of heads that are captured at a time
PROBES = ("text", "copy_random", "copy_text")
MEASURES = (*PROBES, "induction")
HeadPlace = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class HeadCondition:
    """What is removed from which heads.

    Attributes:
        removed: rope, content or mask.
        order: the order whose first heads lose it, or from whose layers heads are drawn.
        k: how many heads.
        draw: the number of the draw; None for the first heads of the order.
        rank: of the only head that loses it; None for the first k.
    """

    removed: str
    order: str
    k: int
    draw: int | None = None
    rank: int | None = None

    @property
    def name(self) -> str:
        """The name in keys of the checkpoint."""
        of = "" if self.draw is None else f"/draw{self.draw}"
        alone = "" if self.rank is None else f"/rank{self.rank}"
        return f"{self.removed}/{Path(self.order).stem}/{self.k}{of}{alone}"

    def heads(self, ranked: Sequence[HeadPlace], n_heads: int, seed: int) -> list[HeadPlace]:
        """Return the heads: the first of an order, or as many of each of their layers, at random.

        Args:
            ranked: all heads in the order.
            n_heads: how many heads a layer has.
            seed: of the draws.
        """
        if self.rank is not None:
            return [ranked[self.rank]]
        first = list(ranked[: self.k])
        if self.draw is None:
            return first
        generator = np.random.default_rng([seed, self.draw, self.k])
        return [
            (layer, int(head))
            for layer, heads in sorted(by_layer(first).items())
            for head in generator.choice(n_heads, len(heads), replace=False)
        ]


def by_layer(heads: Iterable[HeadPlace]) -> dict[int, list[int]]:
    """Return heads by layer."""
    places: dict[int, list[int]] = {}
    for layer, head in heads:
        places.setdefault(layer, []).append(head)
    return places


@dataclass(frozen=True, kw_only=True, repr=False)
class HeadsStudy(Run):
    """What the heads at the top of an order do, by removing a part of them.

    Its `tables` are those of the run's CSV files: `cost`, `order`, `tests` and, with `single`,
    `single`.
    """

    kind = "heads"

    @property
    def cost(self) -> pd.DataFrame:
        """What each removal costs, for the orders' first heads and for the draws."""
        return self.tables["cost"]


class Heads(Study[Settings, HeadsStudy]):
    """What the heads do that measures rank first."""

    command = "heads"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded = self.settings, session.loaded
        if loaded.tokenizer is None:
            raise UserError("copies of random tokens need a tokenizer, and the model has none")
        self.layers, self.n_heads = settings.layers_with_maps(loaded.info), loaded.info.n_heads
        self.places = [(layer, head) for layer in self.layers for head in range(self.n_heads)]
        self.text = session.sequences()
        self.means = self.text  # given sequences are all that there is
        if "content" in settings.remove and settings.data != GIVEN:
            others = replace(settings, n_seqs=settings.mean_seqs, seed=settings.seed + 1)
            self.means = session.sequences("mean-texts", settings=others)
        self.engine = Engine.of(session)
        validate_removable(loaded.model, [Ablation(remove=name) for name in settings.remove])
        self.ks = settings.counts_of(len(self.places))
        self.given_orders = {
            name: read_order(Path(name), self.places) for name in settings.by if is_file(name)
        }
        self.probes = self._make_probes()
        self.conditions = self._make_conditions()
        self.measures: dict[str, State] = {}  # of the heads of some layers, by pass
        self.calibration: Calibration | None = None
        self.entries: dict[str, Entry] = {}

    def _make_probes(self) -> dict[str, Int[Tensor, "seq pos"]]:
        """Return the sequences that costs are measured on."""
        tokens, start = self.text.inputs, int(self.text.bos)
        segment, tokenizer = self._segment(tokens), self.session.loaded.tokenizer
        probes = {
            "text": tokens,
            "copy_random": random_twice(
                tokens, segment, start, tokenizer=tokenizer, seed=self.settings.seed
            ),
            "copy_text": repeated(tokens, segment, start),
        }
        if self.means is not self.text:
            probes["text_of_means"] = self.means.inputs[: len(tokens)]
        return probes

    def _make_conditions(self) -> list[HeadCondition]:
        settings = self.settings
        conditions = []
        for removed, order in product(settings.remove, settings.by):
            for k in self.ks:
                conditions.append(HeadCondition(removed=removed, order=order, k=k))
                conditions += [
                    HeadCondition(removed=removed, order=order, k=k, draw=draw)
                    for draw in range(settings.draws)
                ]
            if settings.single:
                conditions += [
                    HeadCondition(removed=removed, order=order, k=1, rank=rank)
                    for rank in range(max(self.ks))
                ]
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
            if (one.removed, one.k, one.draw, one.rank) == ("content", k, None, None)
        ]

    def passes(self) -> Iterator[Pass]:
        """Yield the pass that orders the heads, that of mean attention, and those of the costs."""
        means = self.engine.with_sequences(self.means)
        if any(order.removeprefix(LOWEST) == "induction" for order in self.settings.by):
            random = replace(self.engine, inputs=self.probes["copy_random"], documents=None)
            yield Pass(key="induction", engine=random, read=self._read_induction)
        size = max(
            1, MAP_BYTES // (4 * self.settings.folds * self.n_heads * means.inputs.shape[1] ** 2)
        )
        for start in range(0, len(self.layers), size):
            layers = self.layers[start : start + size]
            read = partial(self._read_measures, layers=layers)
            yield Pass(key=f"order/L{layers[0]}", engine=means, read=read, kind="order")
        if "content" in self.settings.remove:
            yield Pass(key="means", engine=means, read=self._read_means, kind="means")
        for probe, tokens in self.probes.items():
            for start in range(0, len(tokens), self.engine.batch_size):
                batch = tokens[start : start + self.engine.batch_size]
                engine = replace(self.engine, inputs=batch, documents=None)
                place = f"{probe}/{start}"
                read_costs = partial(self._read_costs, probe=probe, place=place)
                yield Pass(key=f"intact/{place}", engine=engine, read=read_costs, kind="intact")
                for condition in self.conditions_on(probe):
                    yield Pass(
                        key=f"{condition.name}/{place}",
                        engine=engine,
                        read=partial(read_costs, condition=condition),
                        kind="without",
                    )

    def _read_measures(
        self, engine: Engine, key: str, ablation: Ablation | None, layers: Sequence[int]
    ) -> State:
        """Return the measures of the heads of some layers, by which heads are ordered."""

        def capture(stream: StreamCheckpoint | None) -> State:
            maps = engine.by_fold(
                capture_attention,
                stream,
                layers=layers,
                skip_keys=engine.skip_keys,
                keeps_scores=False,
            )
            weights = rearrange(maps.mean, "layer head row key -> (layer head) row key")
            to_previous = pad(weights.diagonal(-1, -2, -1), (1, 0))
            parts = {
                name: torch.stack(
                    [getattr(s, name).values[0] for s in split_attention(maps).values()]
                )
                for name in QUANTITIES
            }
            among = parts["others_position"] + parts["others_content"]
            position = parts["first_position"] + parts["others_position"]
            return {
                "positional": position / parts["information"],
                "others": parts["others_position"] / among,
                "information": parts["information"],
                "first_key": first_key_attention(weights[..., 0]).double(),
                "previous_token": previous_token_attention(to_previous).double(),
            }

        self.measures[key] = engine.load_or_compute(key, capture)
        return self.measures[key]

    def _read_induction(self, engine: Engine, key: str, ablation: Ablation | None) -> State:
        """Return the induction scores of all heads on random tokens twice."""

        def capture(stream: StreamCheckpoint | None) -> State:
            batch = engine.inputs[: engine.batch_size]
            scores = dict(read_attention(engine.model, batch, self._reader(batch)))
            return {"induction": torch.cat([scores[n].mean(0) for n in self.layers]).double()}

        self.measures[key] = engine.load_or_compute(key, capture)
        return self.measures[key]

    def _reader(
        self, batch: Int[Tensor, "batch pos"]
    ) -> Callable[[Layer, Attention], tuple[int, Float[Tensor, "batch head"]]]:
        """Return the reader of a block's number and of its heads' induction scores."""
        n_tokens = self._segment(batch)
        keys = keys_before(batch.shape[1], n_tokens - 1)[None]

        def read(layer: Layer, attention: Attention) -> tuple[int, Float[Tensor, "batch head"]]:
            to_next = weights_on(attention, keys)[..., 0]
            return layer.index, induction_attention(to_next, n_tokens)

        return read

    def _segment(self, batch: Int[Tensor, "batch pos"]) -> int:
        """Return the length of a segment that fits twice behind BOS."""
        return (batch.shape[1] - int(self.text.bos)) // 2

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
        is_forecast = len(self.measured("information")) < len(self.places)  # any take as long
        ranked = self.places if is_forecast else [head for head, _ in self.ranked(condition.order)]
        return condition.heads(ranked, self.n_heads, self.settings.seed)

    def _read_means(self, engine: Engine, key: str, ablation: Ablation | None) -> None:
        """Measure the mean attention of all heads that lose their content in some condition."""
        losing = [one for one in self.conditions if one.removed == "content"]
        heads = {place for one in losing for place in self._heads_of(one)}
        ablation = Ablation(remove="content", heads=by_layer(heads))
        self.calibration = engine.calibrated(key, [ablation]).calibration

    def _read_costs(
        self,
        engine: Engine,
        key: str,
        ablation: Ablation | None,
        probe: str,
        place: str,
        condition: HeadCondition | None = None,
    ) -> State:
        """Return what a batch costs in a condition, which begins from the intact model's pass."""
        if condition is None:
            self.entries.clear()

        def capture(stream: StreamCheckpoint | None) -> State:
            return self._costs(engine, probe, place, condition)

        return engine.load_or_compute(key, capture)

    def _entered_from(self, engine: Engine, probe: str) -> tuple[Entry, Tensor]:
        """Run a batch of a probe intact: return what its conditions begin from, and the logits."""
        first = {min(by_layer(self._heads_of(one))) for one in self.conditions_on(probe)}
        return run_to_enter(engine.model, engine.inputs, first)

    def _costs(
        self, engine: Engine, probe: str, place: str, condition: HeadCondition | None
    ) -> State:
        """Return the loss of each sequence of a batch, and its induction scores, of a condition."""
        model, tokens = engine.model, engine.inputs
        reads, is_copy = probe == "copy_random", probe.startswith("copy")
        first = tokens.shape[1] - self._segment(tokens) if is_copy else 0
        with torch.inference_mode(), ExitStack() as stack:
            if condition is not None:
                if place not in self.entries:  # of an interrupted run
                    self.entries[place], _ = self._entered_from(engine, probe)
                heads = by_layer(self._heads_of(condition))
                removal = Ablation(remove=condition.removed, heads=heads)
                stack.enter_context(ablated(model, removal, self.calibration))
                stack.enter_context(entered(model, self.entries[place], min(heads)))
            stack.enter_context(logits_from(model, first))
            reading: AbstractContextManager[list[tuple[int, Tensor]]] = (
                attention_read(model, self._reader(tokens)) if reads else nullcontext([])
            )
            readings = stack.enter_context(reading)
            if condition is None:
                self.entries[place], logits = self._entered_from(engine, probe)
            else:
                logits = logits_of(model, tokens)
            losses = token_losses(logits, tokens[:, first:]).double().cpu()
        state = {"loss": losses.mean(1)}
        if reads:
            # Blocks that were not run attend as in the intact model: NaN, and filled from there.
            scores, unread = dict(readings), torch.full((len(tokens), self.n_heads), torch.nan)
            induction = [scores.get(layer, unread) for layer in self.layers]
            state["induction"] = torch.cat(induction, 1).double()
        return state

    def analyse(self, results: Results) -> Run:
        """Return the run: the orders, and what each condition costs."""
        session, settings = self.session, self.settings
        costs = self._costs_of(results)
        order = pd.DataFrame(
            {"order": name_of(by), "rank": rank, "layer": layer, "head": head, "value": value}
            for by in settings.by
            for rank, ((layer, head), value) in enumerate(self.ranked(by))
        )
        alone = costs["rank"].notna()
        tables = {"cost": costs[~alone].drop(columns="rank"), "order": order}
        if alone.any():
            both = costs[alone].merge(order, on=["order", "rank"])
            tables["single"] = both[["removed", "order", "layer", "head", *COLUMNS]]
        tables["tests"] = against_chance(tables["cost"])
        tested = HeadsTested(
            n_heads=len(self.places),
            induction_heads=tuple(
                "L{}H{}".format(*self.places[at]) for at in self._inductive(results)
            ),
            intact={name: float(self._values(results, None, name).mean()) for name in MEASURES},
            cost_of_means=tuple(self._cost_of_means(results)),
        )
        counts = folds_of(len(self.text), settings.folds, self.text.documents).bincount()
        manifest = replace(
            session.manifest_of(self.text, settings.skip_keys_of(self.text), counts),
            layers=self.layers,
            removed=settings.remove,
            results=asdict(tested),
        )
        kept = {"tokens": input_arrays(self.text)}
        return with_page(session, Run(manifest=manifest, arrays=kept, tables=tables), report)

    def _values(
        self, results: Results, condition: HeadCondition | None, measure: str
    ) -> Float[Tensor, " seq"]:
        """Return a measure of every sequence, in a condition or the intact model."""
        of_induction = measure == "induction"
        where = ("copy_random", "induction") if of_induction else (measure, "loss")
        values = intact = self._read(results, "intact", *where)
        if condition is not None:
            values = self._read(results, condition.name, *where)
            values = values.where(values.isfinite(), intact)
        return values[:, self._inductive(results)].mean(1) if of_induction else values

    def _inductive(self, results: Results) -> Int[Tensor, " strongest"]:
        """Return the places of the strongest induction heads of the intact model."""
        induction = self._read(results, "intact", "copy_random", "induction").mean(0)
        return induction.argsort(descending=True, stable=True)[:STRONGEST]

    def _read(
        self, results: Results, condition: str, probe: str, name: str
    ) -> Float[Tensor, "seq *head"]:
        """Return what was read in a condition, of all batches of a probe."""
        starts = range(0, len(self.probes[probe]), self.engine.batch_size)
        return torch.cat([results[f"{condition}/{probe}/{start}"][name] for start in starts])

    def _cost(self, results: Results, condition: HeadCondition, measure: str) -> Interval:
        """Return what a condition costs: a rise of a loss, or a fall of induction scores."""
        cost = self._values(results, condition, measure) - self._values(results, None, measure)
        if measure == "induction":
            cost = -cost
        documents = self.text.documents if measure in ("text", "copy_text") else None
        return mean_interval(cost if documents is None else by_document(cost, documents))

    def _costs_of(self, results: Results) -> pd.DataFrame:
        rows: list[TableRow] = [
            {
                **{"removed": one.removed, "order": name_of(one.order), "k": one.k},
                **{"draw": one.draw, "rank": one.rank, "measure": measure},
                **interval_columns(cost=self._cost(results, one, measure)),
            }
            for one in self.conditions
            for measure in MEASURES
        ]
        table = pd.DataFrame(rows)
        return table.astype({"draw": "Int64", "rank": "Int64"})

    def _cost_of_means(self, results: Results) -> list[float]:
        """Return what the most heads without content cost on other texts, and on their means'.

        The first order's heads lose their content; empty where content is not removed.
        """
        found = self.conditions_on("text_of_means") if "text_of_means" in self.probes else []
        return [
            float(self._cost(results, found[0], probe).value)
            for probe in ("text", "text_of_means")
            if found
        ]


COLUMNS = ("measure", "cost", "cost_low", "cost_high")


def against_chance(costs: pd.DataFrame) -> pd.DataFrame:
    """Test whether an order's first heads cost more or less than heads drawn from their layers.

    A cost is compared with the draws' by t for one more draw, and all tests together by Holm's
    rule. The noise of the cost itself adds to the spread of the draws: a few heads of one layer can
    cost nearly the same.

    Args:
        costs: the rows of the orders' first heads, and those of the draws.

    Returns:
        removed, order, k, measure, cost, chance (the draws' mean) with the ends of where 95% of
        draws are expected, p_holm and differs.
    """
    groups = costs.groupby(["removed", "order", "k", "measure"], sort=False)
    rows: list[TableRow] = []
    for names, group in groups:
        draws = group.loc[group["draw"].notna(), "cost"].to_numpy(float)
        first = group[group["draw"].isna()].iloc[0]
        cost, noise = float(first["cost"]), float(first["cost_high"] - first["cost_low"]) / 2
        mean, spread = draws.mean(), draws.std(ddof=1) * (1 + 1 / len(draws)) ** 0.5
        half = spread * student.ppf(0.975, len(draws) - 1)
        far, error = abs(cost - mean), np.hypot(spread, noise / student.ppf(0.975, np.inf))
        t = far / error if error > 0 else (np.inf if far > ROUNDING else 0.0)
        rows.append(
            {
                **dict(zip(("removed", "order", "k", "measure"), names, strict=True)),
                **{"cost": cost, "chance": mean, "chance_low": mean - half},
                **{"chance_high": mean + half, "p": 2 * student.sf(t, len(draws) - 1)},
            }
        )
    table = pd.DataFrame(rows)
    table["p_holm"] = holm(table.pop("p").tolist())
    return table.assign(differs=table["p_holm"] <= LEVEL)


def is_file(order: str) -> bool:
    """Return whether an order is a file of the user's, and no measure."""
    return order.endswith(".csv")


def name_of(order: str) -> str:
    """Return the name of an order in tables: a file's without its folder and ending."""
    return Path(order).stem if is_file(order) else order


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
        named = f"L{unknown[0][0]}H{unknown[0][1]} is no head" if unknown else "a head comes twice"
        raise UserError(f"--by {path}: {named} of the ordered layers")
    others = [name for name in table if name not in ("layer", "head")]
    numbers = table[others].select_dtypes("number")
    values = numbers.iloc[:, 0] if numbers.shape[1] else pd.Series(np.nan, index=table.index)
    return list(zip(ranked, values.astype(float).tolist(), strict=True))


run = partial(run_study, Heads)


@takes(Heads)
def run_heads(
    model: ModelOrName,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Any,
) -> HeadsStudy:
    """Test what the heads at the top of an order do, as the `heads` command does.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_heads
        >>> run = run_heads("rope-tiny", remove="rope", k=[1, 4], draws=4, n_seqs=32)
        >>> table = run.cost[run.cost["draw"].isna()].set_index(["k", "measure"])["cost"]
        >>> bool(table[4, "copy_text"] > table[1, "text"] > 0)
        True
    """
    return run_of(Heads, model, inputs, out, options)
