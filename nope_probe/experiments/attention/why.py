"""Why a head looks where it looks: the exact terms of one query's scores in the run's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.one_text import query_terms
from nope_probe.experiments.engine import Engine
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.folds import State
from nope_probe.maps.positions import PositionSums, ReaderSums

MOST_WRITERS = 10  # with rows of their own: those whose terms differ most between keys
OTHERS = "other writers"


def captured_terms(
    engine: Engine,
    head: tuple[int, int],
    text: Int[Tensor, "1 pos"],
    query: int,
    kept: int,
    stream: StreamCheckpoint | None,
) -> State:
    """Return the terms of one query's scores by name, such as `key/L1H0`, nats; see `query_terms`.

    Args:
        engine: the model on the sequences of the run, which the text is compared with.
        head: the number of the layer, and of the head in it.
        text: the tokens.
        query: the position of the query in the text.
        kept: how many first positions means over positions leave out.
        stream: deals out batches and saves sums.

    Raises:
        NotImplementedError: for a model whose queries and keys are no sums over writers.
    """
    layer, number = head
    options: dict[str, Any] = {"layers": [layer], "per_head": True, "skip_keys": kept}
    whole = replace(engine, n_folds=1, documents=None)
    others = whole.by_fold(capture_positions, stream, **options)
    own = capture_positions(engine.model, text, n_folds=1, query_rows=text.shape[1], **options)
    of_text, of_others = (_head(sums, layer, number) for sums in (own, others))
    terms = query_terms(of_text, of_others, query, skip_keys=kept)
    named: dict[str, Mapping[str, Tensor]] = {
        "position": terms.position,
        "key": terms.of_key,
        "query": terms.of_query,
    }
    by_name = {f"{side}/{name}": x for side, own in named.items() for name, x in own.items()}
    return {"scores": terms.scores, **by_name}


def _head(sums: PositionSums, layer: int, number: int) -> ReaderSums:
    return dict(sums.readers[layer].heads())[number]


def why_table(
    terms: Mapping[str, Float[Tensor, " key_pos"]],
    weights: Float[Tensor, " key_pos"],
    pieces: Sequence[str],
) -> pd.DataFrame:
    """Return the table of one query: a row for each key that it sees and each term.

    Args:
        terms: the result of `captured_terms`.
        weights: the query's attention weights.
        pieces: the part of the text that each token adds.

    Returns:
        `key`, its `token` and attention `weight`; `score`, less its mean over the keys, nats;
        `side` (position, key, query) and `term`: of position, or the writer of content; and
        `nats`. The rows of a key add up to its score. The ten strongest writers have rows of
        their own, the other writers one row a side.
    """
    scores = terms["scores"]
    seen = scores.isfinite()
    writers = [name for name in terms if name.startswith(("key/", "query/"))]
    strongest = sorted(writers, key=lambda name: -float(terms[name][seen].norm()))[:MOST_WRITERS]
    shown = {name: x for name, x in terms.items() if name.startswith("position/")}
    shown |= {name: terms[name] for name in strongest}
    for side in ("key", "query"):
        rest = [terms[x] for x in writers if x.startswith(f"{side}/") and x not in strongest]
        if rest:
            shown[f"{side}/{OTHERS}"] = torch.stack(rest).sum(0)
    rows = [
        {
            "key": key,
            "token": pieces[key],
            "weight": float(weights[key]),
            "score": float(scores[key]),
            "side": name.partition("/")[0],
            "term": name.partition("/")[2],
            "nats": float(values[key]),
        }
        for key in np.flatnonzero(seen.numpy()).tolist()
        for name, values in shown.items()
    ]
    return pd.DataFrame(rows)
