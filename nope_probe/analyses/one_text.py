"""Exact terms of one text's scores: the position that is in every text, and this text's content.

In a text q_i and k_j are a head's query and key before RoPE, E q_i and E k_j their means over other
texts, q0 and k0 the means of these over positions, dq_i and dk_j the differences from q0 and k0.
R_i is RoPE's rotation at position i. The score is exactly the sum of

    rotation        <R_i q0, R_j k0>        content of the key    <R_i q_i, R_j (k_j - E k_j)>
    written_key     <R_i q0, R_j dk_j>      content of the query  <R_i (q_i - E q_i), R_j E k_j>
    written_query   <R_i dq_i, R_j k0>
    written_both    <R_i dq_i, R_j dk_j>

and of ALiBi's bias. Keys and queries are sums over the writers before the head, and so are both
terms of content. Of a text alone, without other texts, the score is the sum of <R_i q_i, R_j k_j>
over the writers of k_j.

A look is a head's score from a query to a key. Its strongest writers of the key and of the query
are shown. A writer that is a head moved its part from tokens that it looked at: these looks are the
next step back.

A head that wrote into k_j moved the sum of A[j,t] v_t W_O over the tokens t, and its term of k_j is
the sum of <R_i q_i, R_j m_t>, with m_t the part of k_j that it moved from t, less what the means
over texts and over keys subtract. The same holds of q_i, with <R_i m_t, R_j E k_j>.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import nan
from typing import NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.positions import TERMS
from nope_probe.analyses.reader import Side
from nope_probe.hooks.reading.attention import Cell, ScoreWithout
from nope_probe.maps.folds import State, under
from nope_probe.maps.positions import ReaderSums
from nope_probe.maps.rows import centred_rows
from nope_probe.removal import OTHERS, Writer

PositionVectors = Float[Tensor, "pos d_head"]
SIDES: tuple[Side, ...] = get_args(Side)
UNMEASURED = ScoreWithout(nan, nan, nan)
MOST_ROWS = 10  # writers that have a row each in `why.csv`: those whose terms differ most
LEAST_WRITTEN, MOST_WRITERS = 0.1, 3  # of a look's score; shown writers of its key, or its query
LEAST_MOVED, MOST_MOVED = 0.2, 2  # of a writer's term; tokens that the writer moved it from


def query_terms(
    text: ReaderSums, others: ReaderSums | None, query: int, *, kept_positions: int = 0
) -> dict[str, Float[Tensor, " key_pos"]]:
    """Split one query's scores in one text into position, and content by writer.

    All are nats, less their mean over the keys that the query sees: `scores`, before a soft cap,
    NaN where masked; and terms by name, whose sum the scores are. `position/rotation`, those of
    the three written terms, and `position/alibi` where a model has it. `key/L0H1` and
    `query/L0H1` are what a writer writes of the content of keys and of the query. Of a text alone,
    there are the whole keys by writer, and ALiBi at most.

    Args:
        text: a head's queries, keys and scores in the text, in one fold.
        others: its means over other texts, in one fold, as long as the text or longer; None for a
            text alone, whose scores are split by the keys' writers.
        query: the query's position.
        kept_positions: how many first positions the means over positions leave out.
    """
    n = text.k.shape[1]
    seen = text.scores[0, query].isfinite()
    own_q = _vectors(text.q)[query]

    def turned(x: PositionVectors) -> PositionVectors:
        return text.rotation.turned(x[:, None])[:, 0]

    def products(of_query: Float[Tensor, " d_head"], turned_keys: PositionVectors) -> Tensor:
        return turned_keys @ turned(of_query.expand(n, -1))[query] * text.scale

    def centred(x: Float[Tensor, " key_pos"]) -> Tensor:
        return centred_rows(x[None], seen[None])[0]

    terms = dict[str, Tensor]()
    keys = {writer: _vectors(key) for writer, key in text.keys.items()}
    if others is not None:
        mean_q, mean_k = (_vectors(x) for x in (others.q, others.k))
        q0, k0 = (x[kept_positions:].mean(0) for x in (mean_q, mean_k))
        mean_k = mean_k[:n]
        dq, dk = mean_q[query] - q0, mean_k - k0
        constant, written, at_mean = map(turned, (k0.expand(n, -1), dk, mean_k))
        pairs = ((q0, constant), (q0, written), (dq, constant), (dq, written))
        for name, pair in zip(TERMS, pairs, strict=True):
            terms[f"position/{name}"] = products(*pair)
        for writer, written in text.queries.items():
            content = (_vectors(written) - _vectors(others.queries[writer])[:n])[query]
            terms[f"query/{writer}"] = products(content, at_mean)
        keys = {writer: key - _vectors(others.keys[writer])[:n] for writer, key in keys.items()}
    for writer, key in keys.items():
        terms[f"key/{writer}"] = products(own_q, turned(key))
    scores = text.scores[0, query].double()
    if text.bias is not None:
        terms["position/alibi"] = text.bias[query].double().where(seen, 0)
        scores = scores + terms["position/alibi"]
    of_scores = centred(scores.where(seen, 0)).where(seen, torch.nan)
    return {"scores": of_scores, **{name: centred(x) for name, x in terms.items()}}


def moved_terms(
    text: ReaderSums,
    others: ReaderSums | None,
    query: int,
    key: int,
    moved: Float[Tensor, "1 pos 1 d_head"],
    side: Side,
) -> Float[Tensor, " pos"]:
    """Return the term of what a head moved from each token into one key or query, nats.

    Nothing is subtracted: these are products of the parts that the head moved.

    Args:
        text: the reading head's queries, keys and scores in the text, in one fold.
        others: its means over other texts; None for a text alone.
        query: the query's position.
        key: the key's position.
        moved: the parts of the key (or query), by the token that the writing head moved them from.
        side: whether they are parts of the key or of the query.
    """
    if side == "key":
        met, start, stop = _vectors(text.q)[query], query, key
    else:
        assert others is not None
        met, start, stop = _vectors(others.k)[key], key, query
    at_start, at_stop = (text.rotation.among(slice(at, at + 1)) for at in (start, stop))
    facing = at_stop.turned_back(at_start.turned(met[None, None]))[0, 0]
    return _vectors(moved) @ facing * text.scale


def _vectors(x: Float[Tensor, "1 pos 1 d_head"]) -> PositionVectors:
    return x[0, :, 0].double()


class Look(Cell):
    """A head that looks from a query at a key; a key below 0 is that of the highest score."""

    @property
    def prefix(self) -> str:
        """The beginning of the names of its terms, each a tensor over keys."""
        return f"L{self.layer}H{self.head}/{self.query}/"

    def token(self, side: str) -> int:
        """Return the token into which the writers of its key or query wrote."""
        return self.key if side == "key" else self.query

    def moved(self, side: str, writer: str) -> str:
        """Return the name of the terms of what a writer moved, a tensor over tokens."""
        return f"{self.prefix}moved/{self.key}/{side}/{writer}"

    def with_key(self, terms: State) -> Look:
        """Return the look with its key, found from the terms of looks by name."""
        if self.key >= 0:
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


def strongest_writers(terms: State, key: int, side: Side) -> list[Writer]:
    """Return the writers of a look's key or query whose terms are not small, the largest first.

    Args:
        terms: of the look, by name, for every key.
        key: the look's key.
        side: whether the writers wrote into the key or the query.

    Example:
        >>> terms = {"scores": 10.0, "key/L0H0": 2.0, "key/MLP0": -7.0, "key/embed": 0.5}
        >>> strongest_writers({name: torch.tensor([x]) for name, x in terms.items()}, 0, "key")
        ['MLP0', 'L0H0']
    """
    sizes = {Writer(name): abs(float(x[key])) for name, x in under(terms, f"{side}/").items()}
    least = LEAST_WRITTEN * abs(float(terms["scores"][key]))
    return sorted([w for w in sizes if sizes[w] > least], key=lambda w: -sizes[w])[:MOST_WRITERS]


def rows_of(look: Look, state: State) -> Iterator[Row]:
    """Yield the rows of a look; those of its key, query and position and of others are its score.

    Args:
        look: with its key.
        state: terms of looks by name: of each look under its `prefix`, see `query_terms`, and of
            what the strongest writers moved, see `Look.moved` and `moved_terms`.
    """
    of_look, key = under(state, look.prefix), look.key
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


def steps_back(first: Look, states: Iterable[State]) -> tuple[list[list[Row]], list[Look]]:
    """Return the rows of the looks of each step, and the looks of the step to come.

    A step follows the looks by which heads moved what they wrote; no look is followed twice.

    Args:
        first: the look of the first step.
        states: the terms of the looks of each step so far; see `rows_of`.
    """
    steps, looks, seen = list[list[Row]](), [first], set[Look]()
    for state in states:
        looks = [look.with_key(state) for look in looks]
        steps.append([row for look in looks for row in rows_of(look, state)])
        seen.update(looks)
        found = dict.fromkeys(row.before for row in steps[-1])
        looks = [look for look in found if look is not None and look not in seen]
    return steps, looks


def steps_table(first: Look, states: Sequence[State]) -> pd.DataFrame:
    """Return `why_steps.csv`: the rows of all steps, those of moved parts with their effects.

    Args:
        first: the look of the first step.
        states: of each step; see `rows_of`. `effects` are of its moved parts, [moved,
            `ScoreWithout`].
    """
    effects = iter(torch.cat([state["effects"] for state in states if state]).tolist())
    rows = [
        (step, *row.look, *row[1:], *(next(effects) if row.before else UNMEASURED))
        for step, of_step in enumerate(steps_back(first, states)[0], 1)
        for row in of_step
    ]
    columns = ["step", *Look._fields, *Row._fields[1:], *ScoreWithout._fields]
    return pd.DataFrame(rows, columns=columns).astype({"moved_from": "Int64"})


def why_table(
    terms: State,
    weights: Float[Tensor, " key_pos"],
    tokens: Sequence[str],
) -> pd.DataFrame:
    """Return the table of one query: a row for each key that it sees and each term.

    Args:
        terms: of the look, by name; see `query_terms`.
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
        for key in seen.nonzero().flatten().tolist()
        for name, x in shown.items()
    ]
    return pd.DataFrame(rows, columns=["key", "token", "weight", "score", "side", "term", "nats"])
