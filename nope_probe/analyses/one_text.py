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

A head that wrote into k_j moved the sum of A[j,t] v_t W_O over the tokens t, and its term of k_j is
the sum of <R_i q_i, R_j m_t>, with m_t the part of k_j that it moved from t, less what the means
over texts and over keys subtract. The same holds of q_i, with <R_i m_t, R_j E k_j>.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.positions import TERMS
from nope_probe.analyses.reader import Side
from nope_probe.maps.centred import centred_rows
from nope_probe.maps.positions import ReaderSums

PositionVectors = Float[Tensor, "pos d_head"]


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
