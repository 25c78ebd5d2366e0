"""Why a head looks where it looks: the exact terms of one query's scores in the run's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.one_text import query_terms
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.figures.attention import Why
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.folds import State
from nope_probe.maps.positions import PositionSums, ReaderSums
from nope_probe.models.info import LoadedModel
from nope_probe.run.folder import Run
from nope_probe.run.identity import changes_of_model
from nope_probe.studies.attention.on_text import shown_pieces, text_of
from nope_probe.studies.attention.settings import Settings
from nope_probe.studies.engine import Engine, ablation_of

MOST_WRITERS = 10  # with rows of their own: those whose terms differ most between keys
OTHERS = "other writers"


def explained(run: Run, settings: Settings, loaded: LoadedModel) -> Why:
    """Compute the terms of a query of a finished run, on the run's text and sequences.

    Args:
        run: the run, with a text.
        settings: its settings, which ask about a head and a query.
        loaded: its model.

    Raises:
        UserError: for a head or token that does not exist, another model or another ablation than
            the run's, or a model whose queries and keys are no sums over writers.
    """
    settings.validate_layers(loaded.info)
    asked, of_run = settings.asked, text_of(settings, loaded)
    assert asked is not None
    assert of_run is not None
    assert run.manifest.text is not None
    text, about = of_run.tokens, run.manifest.data
    (layer, head), query = asked, query_of(settings, text)
    tokens = torch.from_numpy(run.arrays["tokens"]["tokens"])
    inputs = Sequences(inputs=tokens, name=about.name, bos=bool(about.bos))
    changes = changes_of_model(run.manifest, loaded)
    if changes:
        raise UserError(
            f"{' and '.join(changes)} of the model differ from those of the run: give the model, "
            "or the ablation, of the run"
        )
    engine = Engine(
        model=loaded.model,
        inputs=tokens if settings.reads_corpus else text,
        batch_size=settings.seqs_per_batch,
        skip_keys=settings.skip_keys_of(inputs),
        kept_positions=settings.kept_positions_of(inputs),
    )
    ablation = ablation_of(loaded.model, settings)
    engine = engine.calibrated(None, [ablation])
    kept_weights = run.maps["text_weights"][run.manifest.layers.index(layer), head, query]

    capture = partial(captured_terms, engine, head=asked, text=text, query=query)
    terms = engine.load_or_compute(None, capture, ablation if settings.remove else None)
    table = why_table(terms, torch.from_numpy(kept_weights), shown_pieces(run.manifest.text))
    return Why(head=str(settings.why), query=query, table=table)


def query_of(settings: Settings, text: Int[Tensor, "1 pos"]) -> int:
    """Return the position of the query that `why` asks about.

    Raises:
        UserError: for a token that the text does not have.
    """
    n = text.shape[1]
    if not -n <= settings.query < n:
        raise UserError(f"--query {settings.query}: the text has {n} tokens, 0 to {n - 1}")
    return settings.query % n


def captured_terms(
    engine: Engine,
    stream: StreamCheckpoint | None,
    *,
    head: tuple[int, int],
    text: Int[Tensor, "1 pos"],
    query: int,
) -> State:
    """Return the terms of one query's scores by name, such as `key/L1H0`, nats; see `query_terms`.

    Args:
        engine: the model on the sequences that the text is compared with, or on the text alone.
            Means over positions leave out its `kept_positions`.
        stream: deals out batches and saves sums.
        head: the number of the layer, and of the head in it.
        text: the tokens.
        query: the position of the query in the text.

    Raises:
        UserError: for a model whose queries and keys are no sums over writers.
    """
    (layer, number), kept = head, engine.kept_positions or 0
    capture = partial(capture_positions, layers=[layer], per_head=True, kept_positions=kept)
    whole = replace(engine, n_folds=1, documents=None)
    is_alone = engine.inputs is text
    try:
        others = None if is_alone else whole.by_fold(capture, stream)
        own = capture(engine.model, text, n_folds=1, query_rows=text.shape[1])
    except NotImplementedError as error:
        raise UserError(f"--why L{layer}H{number}: {error}") from error
    of_others = None if others is None else _head(others, layer, number)
    terms = query_terms(_head(own, layer, number), of_others, query, kept_positions=kept)
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
    writers = [name for name in sorted(terms) if name.startswith(("key/", "query/"))]
    strongest = sorted(writers, key=lambda name: -float(terms[name][seen].norm()))[:MOST_WRITERS]
    shown = {name: terms[name] for name in sorted(terms) if name.startswith("position/")}
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
