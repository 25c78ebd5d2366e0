"""Why a head looks where it looks: the exact terms of one query's scores in the run's text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.figures.attention import Why
from nope_probe.figures.names import OTHERS
from nope_probe.maps.folds import under
from nope_probe.models.info import LoadedModel
from nope_probe.removal import Writer
from nope_probe.run.folder import Run
from nope_probe.run.identity import changes_of_model
from nope_probe.studies.attention.on_text import shown_pieces, why_of
from nope_probe.studies.attention.settings import Settings
from nope_probe.studies.attention.steps import Look, LookSteps
from nope_probe.studies.attention.text import text_of
from nope_probe.studies.engine import Engine, ablation_of
from nope_probe.studies.study import calibration, run_passes

MOST_TOKENS = 60  # that an error lists
MOST_WRITERS = 10  # that have a row each: those whose terms differ most between keys


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
    of_run = text_of(settings, loaded)
    assert of_run is not None
    assert run.manifest.text is not None
    text, about = of_run.tokens, run.manifest.data
    steps = steps_of(settings, text, run.manifest.text.pieces)
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
        skip_keys=settings.skip_keys_of(inputs.kind),
        kept_positions=settings.kept_positions_of(inputs.bos),
    )
    ablation = ablation_of(loaded.model, settings)
    passes = steps.passes(engine, ablation if settings.remove else None)
    run_passes([*calibration(engine, [ablation]), *passes])  # the steps keep them
    look = steps.first
    place = run.manifest.layers.index(look.name.block)
    weights = torch.from_numpy(run.maps["text_weights"][place, look.head, look.query])
    tables = why_tables(steps, weights, shown_pieces(run.manifest.text))
    return why_of(steps.asked, tables)


def query_in(query: int | str, pieces: Sequence[str]) -> int:
    """Return the number of a text's token, given by its number or by the word that it ends.

    Args:
        query: a number, below 0 from the end; or a word.
        pieces: the part of the text that each token adds.

    Raises:
        UserError: listing the tokens, for a number that does not exist, or a word that does not
            stand there once.

    Example:
        >>> pieces = ["", "def", " wid", "th", "("]
        >>> query_in("width", pieces), query_in(-1, pieces)
        (3, 4)
    """
    n, ends, places = len(pieces), list(accumulate(map(len, pieces))), list[int]()
    if isinstance(query, int):
        places = [query % n] if -n <= query < n else []
    elif query:
        found = re.finditer(rf"(?<!\w){re.escape(query)}(?!\w)", "".join(pieces))
        places = [bisect_left(ends, match.end()) for match in found]
    if len(places) == 1:
        return places[0]
    shown = [place for place in places or range(n) if pieces[place].strip()]
    tokens = ", ".join(f"{place} {pieces[place].strip()!r}" for place in shown[:MOST_TOKENS])
    more = ", ..." if len(shown) > MOST_TOKENS else ""
    raise UserError(
        f"--query {query}: the text has {n} tokens, 0 to {n - 1}: take the number of one: "
        f"{tokens}{more}"
    )


def steps_of(settings: Settings, text: Int[Tensor, "1 pos"], pieces: Sequence[str]) -> LookSteps:
    """Return the steps that `why` asks for, which have not been read.

    Raises:
        UserError: for a token that the text does not have.
    """
    look = Look(Writer(str(settings.why)), query_in(settings.query, pieces))
    return LookSteps(first=look, text=text, n_steps=settings.steps)


def why_tables(
    steps: LookSteps, weights: Float[Tensor, " key_pos"], pieces: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """Return the tables of steps by name: of the first look, and of all steps.

    Args:
        steps: which have been read.
        weights: the first query's attention weights.
        pieces: the part of the text that each token adds.
    """
    terms = under(steps.looks[0][1], steps.first.prefix)
    tables = {"why": why_table(terms, weights, pieces)}
    if steps.n_steps > 1:
        tables["why_steps"] = steps.table
    return tables


def why_table(
    terms: Mapping[str, Float[Tensor, " key_pos"]],
    weights: Float[Tensor, " key_pos"],
    pieces: Sequence[str],
) -> pd.DataFrame:
    """Return the table of one query: a row for each key that it sees and each term.

    Args:
        terms: the result of `captured_looks`, of the query alone.
        weights: the query's attention weights.
        pieces: the part of the text that each token adds.

    Returns:
        `key`, its `token` and attention `weight`; `score`, less its mean over the keys, nats;
        `side` (position, key, query) and `term`: of position, or the writer of content; and
        `nats`. The rows of a key add up to its score. The ten strongest writers have one
        row each on a side, the other writers one row together.
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
