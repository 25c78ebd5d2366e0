"""What `ablate` removes from a model, one thing at a time, and what passes read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attribution import conditions_of
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Inputs
from nope_probe.hooks.reading.accumulators import Cut
from nope_probe.hooks.reading.attention import AttentionAccumulator, attended
from nope_probe.hooks.reading.capture import LossAccumulator
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.maps import Layers
from nope_probe.maps.rows import choose_rows
from nope_probe.models.info import LoadedModel
from nope_probe.removal import (
    INTACT,
    MASK,
    NO_REPLACEMENT,
    SOURCES,
    UNION,
    WRITTEN,
    Component,
    Condition,
)
from nope_probe.studies.engine import (
    Engine,
    idle_sources,
    irreplaceable,
    validate_removable,
)
from nope_probe.studies.head_scores import (
    HeadSums,
    head_sums,
)
from nope_probe.studies.removing import parse_removed
from nope_probe.studies.study import (
    Pass,
    Results,
    calibration,
)

# Position that blocks write; constant queries, keys, both, and output.
DEFAULT_REMOVED = ("written", "w_q", "w_k", "w_q+w_k", "w_o")
Row = tuple[Condition, str]  # what is removed, and what the weights among it are replaced by
INTACT_ROW: Row = (INTACT, NO_REPLACEMENT)
QUERIES = "query_positions"  # of maps whose rows are not all; exact in float32, below 2**24
Maps = dict[Row, Layers]


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
        per_head: whether the maps of each head are kept where sources alone are removed.
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

        Behind a constant output W_V does not matter, so a row of both runs without W_O alone.
        """
        plain = [condition for condition in self.removed if not condition.weights]
        first, rows = self.ablations[0], dict[Row, Ablation]()
        ordered = conditions_of(self.sources, plain)
        if WRITTEN in ordered:  # what the mask makes, in a model that keeps it
            ordered.remove(WRITTEN)
            ordered.insert(ordered.index(MASK) + 1 if MASK in ordered else 1, WRITTEN)
        for condition in ordered:
            rows[condition, NO_REPLACEMENT] = first.without(condition)
        for by in self.ablations:
            for condition in self.removed:
                is_constant = "w_o" in condition and not by.stand_in.gain
                needed = Condition(condition - {"w_v"}) if is_constant else condition
                if condition.weights:
                    rows[condition, str(by.replacement)] = by.without(needed)
        return rows

    @property
    def nulls(self) -> dict[Row, Ablation]:
        """The null of each row that removes written position: the same noise and no position."""
        return {
            (condition.null, by): ablation.without(ablation.condition.null)
            for (condition, by), ablation in self.rows.items()
            if condition.null != condition
        }

    @property
    def replacements(self) -> tuple[str, ...]:
        """The names of the replacements; none where no weight is removed."""
        return tuple(dict.fromkeys(by for _, by in self.rows if by != NO_REPLACEMENT))

    def passes(self, engine: Engine, shuffled: Sequences | None = None) -> Iterator[Pass]:
        """Yield all passes, in the order in which they are run.

        Args:
            engine: the model on the run's sequences.
            shuffled: the same sequences with their tokens permuted, if they are a control.
        """
        yield from calibration(engine, [*self.rows.values()])
        rows = {key_of(row, by): (row, by) for row, by in (self.rows | self.nulls).items()}
        for key, ((condition, by), ablation) in rows.items():
            # Without the mask a token sees the next token, and its loss means nothing.
            loss = self.losses and "mask" not in condition and (condition, by) not in self.nulls
            yield self._pass(key, engine, ablation, self.keeps_heads(condition), loss)
        if shuffled is not None:
            of_tokens = replace(engine, inputs=shuffled.inputs, documents=shuffled.documents)
            for condition in (INTACT, MASK):
                ablation = self.rows[condition, NO_REPLACEMENT]
                yield self._pass(f"shuffled/{condition.name}", of_tokens, ablation)

    def _pass(
        self,
        key: str,
        engine: Engine,
        ablation: Ablation,
        per_head: bool = False,
        loss: bool = False,
    ) -> Pass:
        return Pass(
            key=key,
            engine=engine,
            read=partial(read_scores, layers=self.layers, per_head=per_head, loss=loss),
            ablation=ablation if ablation.condition else None,
            maps=engine.n_maps(self.layers, per_head=per_head),
            kind=f"scores{' of heads' * per_head}{' and loss' * loss}",
            reads_logits=loss,
        )

    def keeps_heads(self, condition: Condition) -> bool:
        """Return whether the maps of each head are kept in a condition."""
        return self.per_head and condition.are_sources

    def maps(self, results: Results) -> Maps:
        """Return the score maps of every row from the results of the passes, by key."""
        return {row: results[key_of(row, by)].maps for row, by in self.rows.items()}

    def loss_estimates(self, results: Results) -> dict[Row, Estimates]:
        """Return the mean loss in every row that has one, nats."""
        read = {row: results[key_of(row, by)] for row, by in self.rows.items()}
        return {
            row: Estimates.of_means(reading.losses, next(iter(reading.maps.values())).weights)
            for row, reading in read.items()
            if reading.losses is not None
        }

    def controls(self, results: Results) -> Iterator[tuple[str, Maps]]:
        """Yield the maps of the controls, with what their tokens are: of nulls, and shuffled."""
        if self.nulls:
            intact = {INTACT_ROW: results[name_of(INTACT_ROW)].maps}
            nulls = {row: results[key_of(row, by)].maps for row, by in self.nulls.items()}
            yield "in order", intact | nulls
        keys = {condition: f"shuffled/{condition.name}" for condition in (INTACT, MASK)}
        if {*keys.values()} <= {*results}:
            yield "shuffled", {(c, NO_REPLACEMENT): results[key].maps for c, key in keys.items()}


def name_of(row: Row) -> str:
    """Return the name of a row's score maps in a run: `score/mask`, `score_mean/w_q`."""
    condition, replacement = row
    by = "" if replacement == NO_REPLACEMENT else f"_{replacement}"
    return f"score{by}/{condition.name}"


def key_of(row: Row, ablation: Ablation) -> str:
    """Return the key of the pass of a row: the name of the row that is run for it."""
    return name_of((ablation.condition, row[1]))


def named(row: Row) -> dict[str, str]:
    """Return the columns that name a row of a table."""
    condition, replacement = row
    return {"removed": condition.name, "replacement": replacement}


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
            RoPE, positions of writers and unions of these; None for written position, W_Q, W_K,
            both, and W_O;
            `["sources"]` for the sources alone; `[]` for the intact model alone.
        left_out: components that are no source, and removed only where they are named, and why.
        options: further attributes of the plan.

    Raises:
        UserError: for a name that does not exist.
    """
    is_intact = remove is not None and not remove
    if "mask" not in has and not is_intact:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    left_out = {name: why for name, why in (left_out or {}).items() if name in has}
    sources = tuple(name for name in SOURCES if name in has and name not in left_out)
    if remove is None:
        there = {*has, "written"} - {*left_out}
        if any(by.heads is not None for by in options.get("ablations", ())):
            there.discard("written")
        remove = [name for name in DEFAULT_REMOVED if {*name.split(UNION)} <= there]
    else:  # weights are named
        left_out = {name: why for name, why in left_out.items() if name in SOURCES}
    named = [parse_removed(name) for name in remove if name != "sources"]
    return Plan(
        sources=() if is_intact else sources,
        removed=tuple(c for c in dict.fromkeys(named) if not c <= {*sources}),
        left_out=left_out,
        **options,
    )


def plan_of(
    loaded: LoadedModel,
    inputs: Inputs,
    remove: Sequence[str] | None,
    *,
    layers: Sequence[int],
    **options: Any,
) -> Plan:
    """Return the plan for a loaded model.

    Args:
        loaded: the model.
        inputs: the sequences, on which a source may do nothing.
        remove: as of `make_plan`.
        layers: the numbers of the layers to map.
        options: further arguments of `make_plan`.

    Raises:
        UserError: as `make_plan` does, and for what the model does not have.
    """
    model = loaded.model
    left_out = irreplaceable(model) | idle_sources(model, inputs, len(layers))
    options |= {"left_out": left_out, "layers": tuple(layers)}
    plan = make_plan(components(model), remove, **options)
    validate_removable(model, plan.rows.values())
    return plan


class Reading(NamedTuple):
    """What a pass reads: score maps and, if they are asked for, sums over heads and losses.

    Attributes:
        maps: the score maps of each layer.
        heads: the measures of the attention of each layer's heads.
        attention: the attention weights of each layer's heads.
        losses: the mean loss of each fold, nats.
    """

    maps: Layers
    heads: list[HeadSums]
    attention: list[AttentionAccumulator]
    losses: Float[Tensor, " fold"] | None = None


def read_scores(
    engine: Engine,
    key: str,
    ablation: Ablation | None,
    *,
    layers: Sequence[int],
    per_head: bool = False,
    attention: bool = False,
    loss: bool = False,
) -> Reading:
    """Return the score maps of layers, their heads' attention and the losses, from one pass."""
    counts = engine.fold_of.bincount()
    cut = Cut(
        counts=counts,
        queries=choose_rows(engine.inputs.shape[1], engine.query_rows),
        skip_keys=engine.skip_keys or 0,
    )
    heads = head_sums(engine.model, layers, engine.n_folds, attended) if attention else []
    weights = [AttentionAccumulator(of.layer, cut, keeps_scores=False) for of in heads]
    losses = [LossAccumulator(engine.n_folds)] if loss else []
    also = [*heads, *weights, *losses]
    maps = engine.scores(key, ablation, layers=layers, per_head=per_head, also=also)
    means = [of.totals["losses"].cpu().mean(1) / counts for of in losses]
    return Reading(maps, heads, weights, *means)
