"""Why a head looks at a key, steps back: what wrote it, from which tokens, and why from those.

A look is a head's score from a query to a key. Its strongest writers of the key and of the query
are shown. A writer that is a head moved its part from tokens that it looked at: these looks are the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import Any, get_args

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from nope_probe.analyses.one_text import Side, moved_terms, query_terms
from nope_probe.errors import UserError
from nope_probe.figures.names import OTHERS
from nope_probe.hooks.layers.attention import Attention, repeat_heads, upcast
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint, hooks_attached
from nope_probe.hooks.layers.model import numbered_layers, read_attention
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.folds import State, under
from nope_probe.maps.positions import PositionSums, ReaderSums
from nope_probe.removal import Writer
from nope_probe.studies.attention.on_text import Asked
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import Pass

LEAST_WRITTEN, MOST_WRITERS = 0.1, 3  # of a look's score; shown writers of its key, or its query
LEAST_MOVED, MOST_MOVED = 0.2, 2  # of a writer's term; tokens that the writer moved it from
SIDES: tuple[Side, ...] = get_args(Side)
COLUMNS = ["step", "layer", "head", "query", "key", "writer", "side", "moved_from", "nats"]
MEASURED = ["effect", "weight", "weight_without"]  # of a moved part that is taken out of the model


@dataclass(frozen=True)
class Look:
    """A head that looks from a query at a key; if `key` is None, at that of the highest score."""

    name: Writer
    query: int
    key: int | None = None

    @property
    def head(self) -> int:
        """The head's number in its layer."""
        assert self.name.head is not None
        return self.name.head

    @property
    def cells(self) -> list[int | None]:
        """The layer, head, query and key, as tables have them."""
        return [self.name.block, self.head, self.query, self.key]

    @property
    def prefix(self) -> str:
        """The beginning of the names of its terms, each a tensor over keys."""
        return f"{self.name}/{self.query}/"

    def token(self, side: Side) -> int:
        """Return the token into which the writers of its key or query wrote."""
        assert self.key is not None
        return self.key if side == "key" else self.query

    def moved(self, side: Side, writer: str) -> str:
        """Return the name of the terms of what a writer moved, a tensor over tokens."""
        return f"{self.prefix}moved/{self.key}/{side}/{writer}"

    def with_key(self, terms: State) -> Look:
        """Return the look with its key, found from the terms of looks by name."""
        if self.key is not None:
            return self
        scores = terms[f"{self.prefix}scores"].nan_to_num(-torch.inf)
        return replace(self, key=int(scores.argmax()))


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a head moved from one token into the key or query of a look; `nats` of its score."""

    step: int
    look: Look
    side: Side
    writer: Writer
    token: int
    nats: float

    @property
    def before(self) -> Look:
        """The look by which the head moved it."""
        return Look(self.writer, self.look.token(self.side), self.token)


@dataclass(kw_only=True, eq=False)
class LookSteps:
    """The steps back from one look, read one after the other.

    Attributes:
        first: the look.
        text: the tokens.
        n_steps: how many steps there are.
        looks: the looks of each step, with their terms by name.
        effects: what `captured_effects` measured of each moved part.
    """

    first: Look
    text: Int[Tensor, "1 pos"]
    n_steps: int = 1
    looks: list[tuple[list[Look], State]] = field(default_factory=list)
    effects: State = field(default_factory=dict)

    def passes(self, engine: Engine, ablation: Ablation | None) -> Iterator[Pass]:
        """Yield a pass for each step, and one that takes out the moved parts of all steps."""
        first = partial(self.read, step=1)
        one = Pass(key="why", engine=engine, read=first, ablation=ablation)
        yield one
        for step in range(2, self.n_steps + 1):  # whose layers the step before finds
            read = partial(self.read, step=step)
            yield replace(one, key=f"why-{step}", read=read, runs=None)
        if self.n_steps > 1:
            yield replace(one, key="why-effects", read=self.read_effects, runs=None)

    def read(self, engine: Engine, key: str, ablation: Ablation | None, step: int) -> State:
        """Return the terms of a step's looks, which the step before has found."""
        del self.looks[step - 1 :]
        if step == 1:
            looks = [self.first]
        else:
            seen = {look for looks, _ in self.looks for look in looks}
            found = dict.fromkeys(move.before for move in self.moved if move.step == step - 1)
            looks = [look for look in found if look not in seen]
        moves = step < self.n_steps
        capture = partial(captured_looks, looks=looks, text=self.text, moves=moves)
        state = engine.load_or_compute(key, capture, ablation)
        self.looks.append(([look.with_key(state) for look in looks], state))
        return state

    def read_effects(self, engine: Engine, key: str, ablation: Ablation | None) -> State:
        """Return what each look does without what was moved for it."""
        capture = partial(captured_effects, moves=self.moved, text=self.text)
        self.effects = engine.load_or_compute(key, capture, ablation)
        return self.effects

    @property
    def asked(self) -> Asked:
        """The look as the manifest has it."""
        return Asked(head=str(self.first.name), query=self.first.query)

    @property
    def moved(self) -> list[Moved]:
        """What the strongest writers of all looks moved."""
        return [
            move
            for step, (looks, state) in enumerate(self.looks, 1)
            for look in looks
            for move in moved_of(step, look, state)
        ]

    @property
    def table(self) -> pd.DataFrame:
        """`why_steps.csv`: the rows of each look that are of no moved part add up to its score."""
        places = [(move.look, str(move.writer), move.side, move.token) for move in self.moved]
        effects: dict[tuple[Look, str, str, int | None], list[float]]
        effects = dict(zip(places, self.effects["measured"].tolist(), strict=True))
        rows = [
            [step, *look.cells, *row, *effects.get((look, *row[:3]), [nan] * len(MEASURED))]
            for step, (looks, state) in enumerate(self.looks, 1)
            for look in looks
            for row in step_rows(look, state)
        ]
        return pd.DataFrame(rows, columns=[*COLUMNS, *MEASURED]).astype({"moved_from": "Int64"})


def captured_looks(
    engine: Engine,
    stream: StreamCheckpoint | None,
    *,
    looks: Sequence[Look],
    text: Int[Tensor, "1 pos"],
    moves: bool,
) -> State:
    """Return the terms of looks by name, nats; see `query_terms` and `moved_terms`.

    Args:
        engine: the model on the sequences that the text is compared with, or on the text alone.
            Means over positions leave out its `kept_positions`.
        stream: deals out batches and saves sums.
        looks: the looks.
        text: the tokens.
        moves: whether the terms of the strongest writers are split by token.

    Raises:
        UserError: for a model whose queries and keys are no sums over writers.
    """
    if not looks:
        return {}
    kept, state = engine.kept_positions or 0, dict[str, Tensor]()
    options: dict[str, Any] = {"per_head": True, "kept_positions": kept}
    whole, is_alone = replace(engine, n_folds=1, documents=None), engine.inputs is text
    layers = sorted({look.name.block for look in looks})
    read = partial(
        capture_positions, engine.model, text, n_folds=1, query_rows=text.shape[1], **options
    )
    try:
        others = (
            None if is_alone else whole.by_fold(capture_positions, stream, layers=layers, **options)
        )
        of_text = read(layers=layers)
        for look in looks:
            pair = _head(of_text, look), None if others is None else _head(others, look)
            terms = query_terms(*pair, look.query, kept_positions=kept)
            parts = {"position": terms.position, "key": terms.of_key, "query": terms.of_query}
            named = {f"{side}/{name}": x for side, of in parts.items() for name, x in of.items()}
            named["scores"] = terms.scores
            state |= {f"{look.prefix}{name}": x for name, x in named.items()}
            if moves:
                state |= _moved(look.with_key(state), pair, named, read)
    except NotImplementedError as error:
        raise UserError(f"--why {looks[0].name}: {error}") from error
    return state


def _moved(
    look: Look,
    pair: tuple[ReaderSums, ReaderSums | None],
    terms: State,
    read: Callable[..., PositionSums],
) -> State:
    """Return the terms of what a look's strongest writers moved, by name."""
    assert look.key is not None
    state: State = {}
    for side in SIDES:
        heads = [name for name in strongest_writers(terms, look.key, side) if name.head is not None]
        if not heads:
            continue
        moved = _head(read(layers=[look.name.block], moved_to=look.token(side)), look)
        parts = moved.first_keys if side == "key" else moved.first_queries
        for writer in heads:
            state[look.moved(side, writer)] = moved_terms(
                *pair, look.query, look.key, parts[writer], side
            )
    return state


def _head(sums: PositionSums, look: Look) -> ReaderSums:
    return dict(sums.readers[look.name.block].heads())[look.head]


def strongest_writers(terms: State, key: int, side: Side) -> list[Writer]:
    """Return the writers of a look's key or query whose terms are not small, the largest first.

    Args:
        terms: of the look, by name, for every key.
        key: the look's key.
        side: whether the writers wrote into the key or the query.
    """
    sizes = {Writer(name): abs(float(x[key])) for name, x in under(terms, f"{side}/").items()}
    least = LEAST_WRITTEN * abs(float(terms["scores"][key]))
    return sorted([w for w in sizes if sizes[w] > least], key=lambda w: -sizes[w])[:MOST_WRITERS]


def moved_of(step: int, look: Look, state: State) -> Iterator[Moved]:
    """Yield what the strongest writers of a look moved, if that was read."""
    assert look.key is not None
    terms = under(state, look.prefix)
    for side in SIDES:
        for writer in strongest_writers(terms, look.key, side):
            if (name := look.moved(side, writer)) in state:
                parts, least = state[name], LEAST_MOVED * terms[f"{side}/{writer}"][look.key].abs()
                for token in parts.abs().argsort(descending=True)[:MOST_MOVED].tolist():
                    if parts[token].abs() > least:
                        nats = float(parts[token])
                        yield Moved(
                            step=step, look=look, side=side, writer=writer, token=token, nats=nats
                        )


def step_rows(look: Look, state: State) -> Iterator[tuple[str, str, int | None, float]]:
    """Yield the writer, side, moved_from and nats of each row of a look; see `why_steps.csv`."""
    assert look.key is not None
    terms = {name: float(x[look.key]) for name, x in under(state, look.prefix).items()}
    rest = terms["scores"]
    for name in sorted(name for name in terms if name.startswith("position/")):
        yield name.removeprefix("position/"), "position", None, terms[name]
        rest -= terms[name]
    for side in SIDES:
        for writer in strongest_writers(under(state, look.prefix), look.key, side):
            term = terms[f"{side}/{writer}"]
            yield writer, side, None, term
            rest -= term
            parts = state.get(look.moved(side, writer))
            if parts is None:
                continue
            shown = [m for m in moved_of(0, look, state) if (m.side, m.writer) == (side, writer)]
            for move in shown:
                yield writer, side, move.token, move.nats
            left = float(parts.sum()) - sum(move.nats for move in shown)
            yield writer, "other", None, left
            yield writer, "mean", None, term - float(parts.sum())
    yield OTHERS, "other", None, rest


def captured_effects(
    engine: Engine,
    stream: StreamCheckpoint | None,
    *,
    moves: Sequence[Moved],
    text: Int[Tensor, "1 pos"],
) -> State:
    """Return the `MEASURED` of looks without what was moved for them, one moved part at a time.

    What the head moved from the token is taken out of its output at the token that it wrote into,
    and all later blocks respond. The effect is what the look's score loses, nats.

    Args:
        engine: the model.
        stream: unused: a text is one batch.
        moves: the moved parts.
        text: the tokens.
    """
    measured = [_without(engine.model, text, move) for move in moves]
    return {"measured": torch.tensor(measured, dtype=torch.float64).view(-1, len(MEASURED))}


def _without(model: HookedModel, text: Int[Tensor, "1 pos"], move: Moved) -> list[float]:
    """Return the `MEASURED` of a look without a moved part."""
    before, look = move.before, move.look
    [writing] = numbered_layers(model, [move.writer.block])

    def read(layer: Layer, attention: Attention) -> Tensor | None:
        if layer.index == writing.index:
            weight = attention.pattern(slice(before.query, before.query + 1), masked=None)
            values = repeat_heads(attention.v, attention.n_heads)
            return weight[0, before.head, 0, before.key] * values[0, before.key, before.head]
        if layer.index != look.name.block:
            return None
        row = slice(look.query, look.query + 1)
        weights = attention.hooked_weights(row)
        if weights is None:
            weights = upcast(attention.masked_scores(row)).softmax(-1)
        cells = upcast(weights), upcast(attention.scores(row))
        return torch.stack([x[0, look.head, 0, look.key] for x in cells])

    def run(hooks: Sequence[Attachment]) -> list[Tensor]:
        with torch.inference_mode(), hooks_attached(hooks):
            readings = read_attention(model, text, read)
        return [x for x in readings if x is not None]

    def take_out(z: Tensor, hook: HookPoint) -> Tensor:
        left = writing.by_head(z).clone()
        left[0, before.query, before.head] -= share.to(left)
        return left.reshape(z.shape)

    share, intact = run([])
    _, without = run([(writing.point("attn.hook_z"), take_out)])
    (weight, score), (weight_without, score_without) = intact.tolist(), without.tolist()
    return [score - score_without, weight, weight_without]
