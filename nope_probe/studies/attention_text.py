"""A text of the user's, and why a head looks where it looks in it: terms of its scores, steps back.

A look is a head's score from a query to a key. Its strongest writers of the key and of the query
are shown. A writer that is a head moved its part from tokens that it looked at: these looks are the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.one_text import Side, moved_terms, query_terms
from nope_probe.data.sequences import Sequences
from nope_probe.data.tokenizing import TextReader, first_token, pieces_of
from nope_probe.errors import UserError
from nope_probe.figures.names import OTHERS
from nope_probe.figures.text_view import mark_of
from nope_probe.figures.words import reader_of
from nope_probe.hooks.layers.model import validate_inputs
from nope_probe.hooks.reading.attention import Cell, ScoreWithout, score_without
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.folds import State, under
from nope_probe.maps.positions import PositionSums, ReaderSums
from nope_probe.models.info import LoadedModel
from nope_probe.removal import Writer
from nope_probe.run.flags import refuse
from nope_probe.run.manifest import ShownText
from nope_probe.studies.attention import ALONE, SAID, TEXT_TOKENS, Settings
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import Pass, Results, captured

MOST_ROWS = 10  # writers that have a row each in `why.csv`: those whose terms differ most
LEAST_WRITTEN, MOST_WRITERS = 0.1, 3  # of a look's score; shown writers of its key, or its query
LEAST_MOVED, MOST_MOVED = 0.2, 2  # of a writer's term; tokens that the writer moved it from
SIDES: tuple[Side, ...] = get_args(Side)
UNMEASURED = ScoreWithout(nan, nan, nan)
COLUMNS = ["step", "layer", "head", "query", "key", "writer", "side", "moved_from", "nats"]


class Text(NamedTuple):
    """The text of a run: its tokens, BOS included, and what is shown of them."""

    tokens: Int[Tensor, "1 pos"]
    shown: ShownText

    @property
    def alone(self) -> Sequences:
        """The text as the only sequence of a run."""
        return Sequences(inputs=self.tokens, name=ALONE, bos=bool(self.shown.bos))


def read_text(settings: Settings, loaded: LoadedModel) -> Text | None:
    """Return the run's text, with BOS as in the sequences; None without a text.

    Raises:
        UserError: for a model without tokenizer, or a text that has no tokens, is longer than the
            sequences, or without the mask shorter; for a text alone, one beyond the context or 512
            tokens.
    """
    text, tokenizer = settings.text, loaded.tokenizer
    if text is None:
        return None
    if tokenizer is None:
        raise UserError("the model has no tokenizer, so it takes no --text")
    first = first_token(tokenizer, settings.bos)
    reader = TextReader(tokenizer, bos=first is not None)
    [ids] = reader.tokens([text])
    begin = [] if first is None else [first]
    n, seq_len, most = len(begin) + len(ids), settings.seq_len, min(TEXT_TOKENS, loaded.info.n_ctx)
    compared, unmasked = settings.reads_corpus, "mask" in settings.removed
    mistakes = {
        "no_token": not ids,
        "too_long": not compared and n > most,
        "longer": compared and n > seq_len,
        "shorter": compared and unmasked and n < seq_len,
    }
    numbers = {"n": n, "most": most, "seq_len": seq_len, "length": settings.length_of(n)}
    refuse((is_so, SAID[name].format(**numbers)) for name, is_so in mistakes.items())
    tokens = torch.tensor([[*begin, *ids]])
    validate_inputs(loaded.model, tokens)
    shown = ShownText(
        pieces=("",) * len(begin) + tuple(pieces_of(ids, tokenizer)),
        bos=tokenizer.decode(begin) if begin else "",
        notes=reader.notes,
    )
    return Text(tokens, shown)


class Look(NamedTuple):
    """A head that looks from a query at a key; without a key, at that of the highest score."""

    layer: int
    head: int
    query: int
    key: int | None = None

    @property
    def prefix(self) -> str:
        """The beginning of the names of its terms, each a tensor over keys."""
        return f"{reader_of(self._asdict())}/{self.query}/"

    @property
    def cell(self) -> Cell:
        """The cell of the head's scores."""
        assert self.key is not None
        return Cell(self.layer, self.head, self.query, self.key)

    def token(self, side: str) -> int:
        """Return the token into which the writers of its key or query wrote."""
        return self.cell.key if side == "key" else self.query

    def moved(self, side: str, writer: str) -> str:
        """Return the name of the terms of what a writer moved, a tensor over tokens."""
        return f"{self.prefix}moved/{self.key}/{side}/{writer}"

    def with_key(self, terms: State) -> Look:
        """Return the look with its key, found from the terms of looks by name."""
        if self.key is not None:
            return self
        scores = terms[f"{self.prefix}scores"].nan_to_num(-torch.inf)
        return self._replace(key=int(scores.argmax()))


class Row(NamedTuple):
    """A term of a look in `why_steps.csv`; or the part of it that a head moved from a token."""

    look: Look
    writer: str
    side: str
    moved_from: int | None
    nats: float

    @property
    def before(self) -> Look | None:
        """The look by which a head moved it."""
        if self.moved_from is None:
            return None
        head = Writer(self.writer)
        return Look(head.block, head.head or 0, self.look.token(self.side), self.moved_from)


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """Why a head looks where it looks in a text.

    Attributes:
        first: the look.
        text: the text.
        n_steps: how many steps back to go.
        compared: whether the text is compared with the sequences of the engine.
    """

    first: Look
    text: Text
    n_steps: int = 1
    compared: bool = True

    @classmethod
    def of(cls, settings: Settings, text: Text) -> Question:
        """Return the question that the settings ask about a text.

        Raises:
            UserError: for a token that the text does not have.
        """
        name, query = Writer(settings.why or ""), text.shown.token(settings.query)
        look, compared = Look(name.block, name.head or 0, query), settings.reads_corpus
        return cls(first=look, text=text, n_steps=settings.steps, compared=compared)

    @property
    def keys(self) -> list[str]:
        """The keys of the passes of all steps."""
        return ["why", *(f"why-{step}" for step in range(2, self.n_steps + 1))]

    def passes(self, engine: Engine, ablation: Ablation | None) -> Iterator[Pass]:
        """Yield a pass for each step."""
        for step, key in enumerate(self.keys, 1):
            read = partial(captured, partial(captured_looks, question=self, step=step))
            yield Pass(key=key, engine=engine, read=read, ablation=ablation, kind="why")

    def follow(self, results: Results) -> tuple[list[list[Row]], list[Look]]:
        """Return the rows of the looks of each step, and the looks of the step to come.

        Args:
            results: of the passes of some first steps, by key.
        """
        steps, looks, seen = list[list[Row]](), [self.first], set[Look]()
        for state in (results[key] for key in self.keys if key in results):
            looks = [look.with_key(state) for look in looks]
            steps.append([row for look in looks for row in rows_of(look, state)])
            seen.update(looks)
            found = dict.fromkeys(row.before for row in steps[-1])
            looks = [look for look in found if look is not None and look not in seen]
        return steps, looks

    def tables(
        self, results: Results, weights: Float[Tensor, " key_pos"]
    ) -> dict[str, pd.DataFrame]:
        """Return the tables by name: `why` of the first look, and `why_steps` of all steps.

        Args:
            results: of the passes, by key.
            weights: the first query's attention weights.
        """
        shown = self.text.shown
        tokens = [mark_of(piece) or piece.strip() for piece in shown.pieces]
        tokens[0] = shown.bos or tokens[0]
        terms = under(results["why"], self.first.prefix)
        tables = {"why": why_table(terms, weights, tokens)}
        if self.n_steps > 1:
            measured = [results[key]["effects"] for key in self.keys if results[key]]
            effects = iter(torch.cat(measured).tolist())
            rows = [
                (step, *row.look, *row[1:], *(next(effects) if row.before else UNMEASURED))
                for step, of_step in enumerate(self.follow(results)[0], 1)
                for row in of_step
            ]
            table = pd.DataFrame(rows, columns=[*COLUMNS, *ScoreWithout._fields])
            tables["why_steps"] = table.astype({"moved_from": "Int64"})
        return tables


def captured_looks(
    engine: Engine, stream: Stream | None, *, question: Question, step: int
) -> State:
    """Return the terms of a step's looks by name, nats; see `query_terms` and `moved_terms`.

    `effects` are what the looks lose without what was moved for them, one moved part at a time.

    Args:
        engine: the model on the sequences that the text is compared with, or on the text alone,
            with the results of the steps before. Means over positions leave out its
            `kept_positions`.
        stream: deals out batches and saves sums.
        question: asks about the looks.
        step: of the looks. The terms of the strongest writers are split by token but in the last.

    Raises:
        UserError: for a model whose queries and keys are no sums over writers.
    """
    _, looks = question.follow(engine.results)
    if not looks:
        return {}
    state, text, whole = State(), question.text.tokens, replace(engine, n_folds=1, documents=None)
    read = partial(
        capture_positions,
        layers=sorted({look.layer for look in looks}),
        per_head=True,
        kept_positions=engine.kept_positions or 0,
    )
    of_one = replace(whole, inputs=text, query_rows=text.shape[1])
    try:
        of_text = of_one.by_fold(read, None)
        others = whole.by_fold(read, stream) if question.compared else None
        for look in looks:
            pair = _head(of_text, look), None if others is None else _head(others, look)
            terms = query_terms(*pair, look.query, kept_positions=engine.kept_positions or 0)
            state |= {f"{look.prefix}{name}": x for name, x in terms.items()}
            if step < question.n_steps:
                state |= _moved(
                    look.with_key(state), pair, terms, partial(of_one.by_fold, read, None)
                )
    except NotImplementedError as error:
        raise UserError(f"--why {reader_of(looks[0]._asdict())}: {error}") from error
    effects = [
        score_without(engine.model, text, row.look.cell, row.before.cell)
        for look in looks
        for row in rows_of(look.with_key(state), state)
        if row.before is not None
    ]
    measured = torch.tensor(effects, dtype=torch.float64).view(-1, len(UNMEASURED))
    return state | {"effects": measured}


def _moved(
    look: Look,
    pair: tuple[ReaderSums, ReaderSums | None],
    terms: State,
    capture: Callable[..., PositionSums],
) -> State:
    """Return the terms of what a look's strongest writers moved, by name."""
    state, (*_, query, key) = State(), look.cell
    for side in SIDES:
        heads = [name for name in strongest_writers(terms, key, side) if name.head is not None]
        if heads:
            moved = _head(capture(layers=[look.layer], moved_to=look.token(side)), look)
            parts = moved.first_keys if side == "key" else moved.first_queries
            for writer in heads:
                of_writer = moved_terms(*pair, query, key, parts[writer], side)
                state[look.moved(side, writer)] = of_writer
    return state


def _head(sums: PositionSums, look: Look) -> ReaderSums:
    return dict(sums.readers[look.layer].heads())[look.head]


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


def rows_of(look: Look, state: State) -> Iterator[Row]:
    """Yield the rows of a look; those that are of no moved part add up to its score."""
    of_look, key = under(state, look.prefix), look.cell.key
    terms = {name: float(x[key]) for name, x in of_look.items()}
    rest = terms["scores"]
    for name in sorted(name for name in terms if name.startswith("position/")):
        yield Row(look, name.removeprefix("position/"), "position", None, terms[name])
        rest -= terms[name]
    for side in SIDES:
        for writer in strongest_writers(of_look, key, side):
            term = terms[f"{side}/{writer}"]
            yield Row(look, writer, side, None, term)
            rest -= term
            parts = state.get(look.moved(side, writer))
            if parts is None:
                continue
            least = LEAST_MOVED * of_look[f"{side}/{writer}"][key].abs()
            largest = parts.abs().argsort(descending=True)[:MOST_MOVED].tolist()
            moved = {token: float(parts[token]) for token in largest if parts[token].abs() > least}
            for token, nats in moved.items():
                yield Row(look, writer, side, token, nats)
            yield Row(look, writer, "other", None, float(parts.sum()) - sum(moved.values()))
            yield Row(look, writer, "mean", None, term - float(parts.sum()))
    yield Row(look, OTHERS, "other", None, rest)


def why_table(
    terms: Mapping[str, Float[Tensor, " key_pos"]],
    weights: Float[Tensor, " key_pos"],
    tokens: Sequence[str],
) -> pd.DataFrame:
    """Return the table of one query: a row for each key that it sees and each term.

    Args:
        terms: of the look, by name; see `captured_looks`.
        weights: the query's attention weights.
        tokens: of the text, as they are shown.

    Returns:
        `key`, its `token` and attention `weight`; `score`, less its mean over the keys, nats;
        `side` (position, key, query) and `term`: of position, or the writer of content; and
        `nats`. The rows of a key add up to its score. The ten strongest writers have one
        row each on a side, the other writers one row together.
    """
    scores = terms["scores"]
    seen = scores.isfinite()
    writers = [name for name in sorted(terms) if name.startswith(("key/", "query/"))]
    strongest = sorted(writers, key=lambda name: -float(terms[name][seen].norm()))[:MOST_ROWS]
    shown = {name: terms[name] for name in sorted(terms) if name.startswith("position/")}
    shown |= {name: terms[name] for name in strongest}
    for side in SIDES:
        rest = [terms[x] for x in writers if x.startswith(f"{side}/") and x not in strongest]
        if rest:
            shown[f"{side}/{OTHERS}"] = torch.stack(rest).sum(0)
    rows = [
        (key, tokens[key], float(weights[key]), float(scores[key]), *name.split("/"), float(x[key]))
        for key in np.flatnonzero(seen.numpy()).tolist()
        for name, x in shown.items()
    ]
    return pd.DataFrame(rows, columns=["key", "token", "weight", "score", "side", "term", "nats"])
