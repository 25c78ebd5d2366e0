"""A text of the user's, and why a head looks where it looks in it: terms of its scores, steps back.

The looks, their terms and the steps are those of `analyses.one_text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.one_text import (
    SIDES,
    Look,
    moved_terms,
    query_terms,
    rows_of,
    steps_back,
    steps_table,
    strongest_writers,
    why_table,
)
from nope_probe.data.sequences import Sequences
from nope_probe.data.tokenizing import TextReader, first_token, pieces_of
from nope_probe.errors import UserError
from nope_probe.figures.attention import mark_of
from nope_probe.figures.words import reader_of
from nope_probe.hooks.layers.model import validate_inputs
from nope_probe.hooks.reading.attention import ScoreWithout, score_without
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
        look, compared = Look(name.block, name.head or 0, query, -1), settings.reads_corpus
        return cls(first=look, text=text, n_steps=settings.steps, compared=compared)

    @property
    def keys(self) -> list[str]:
        """The keys of the passes of all steps."""
        return ["why", *(f"why-{step}" for step in range(2, self.n_steps + 1))]

    def passes(self, engine: Engine, ablation: Ablation) -> Iterator[Pass]:
        """Yield a pass for each step."""
        for step, key in enumerate(self.keys, 1):
            read = partial(captured, partial(captured_looks, question=self, step=step))
            yield Pass(key=key, engine=engine, read=read, ablation=ablation, kind="why")

    def states(self, results: Results) -> list[State]:
        """Return the results of the steps so far, in order."""
        return [results[key] for key in self.keys if key in results]

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
            tables["why_steps"] = steps_table(self.first, self.states(results))
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
    _, looks = steps_back(question.first, question.states(engine.results))
    if not looks:
        return {}
    state, text, whole = State(), question.text.tokens, replace(engine, n_folds=1, documents=None)
    layers, kept = sorted({look.layer for look in looks}), engine.kept_positions or 0
    read = partial(capture_positions, layers=layers, per_head=True, kept_positions=kept)
    of_one = replace(whole, inputs=text, query_rows=text.shape[1])
    try:
        of_text = of_one.by_fold(read, None)
        others = whole.by_fold(read, stream) if question.compared else None
        for look in looks:
            pair = _head(of_text, look), None if others is None else _head(others, look)
            terms = query_terms(*pair, look.query, kept_positions=kept)
            state |= {f"{look.prefix}{name}": x for name, x in terms.items()}
            if step < question.n_steps:
                state |= _moved(
                    look.with_key(state), pair, terms, partial(of_one.by_fold, read, None)
                )
    except NotImplementedError as error:
        raise UserError(f"--why {reader_of(looks[0]._asdict())}: {error}") from error
    effects = [
        score_without(engine.model, text, row.look, row.before)
        for look in looks
        for row in rows_of(look.with_key(state), state)
        if row.before is not None
    ]
    measured = torch.tensor(effects, dtype=torch.float64).view(-1, len(ScoreWithout._fields))
    return state | {"effects": measured}


def _moved(
    look: Look,
    pair: tuple[ReaderSums, ReaderSums | None],
    terms: State,
    capture: Callable[..., PositionSums],
) -> State:
    """Return the terms of what a look's strongest writers moved, by name."""
    state, (*_, query, key) = State(), look
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
