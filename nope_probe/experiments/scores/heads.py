"""Each head's attention to the first key and the previous token, induction, position, content."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nope_probe.analyses.head_measures import (
    SINK,
    first_key_attention,
    induction_attention,
    moved_scores,
    position_and_content,
    previous_token_attention,
    sink_share,
)
from nope_probe.analyses.jackknife import jackknife
from nope_probe.data.sequences import Sequences, sequences
from nope_probe.experiments.engine import as_sequences, first_layers, folds_for_intervals
from nope_probe.experiments.tables import interval_columns
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given, Inputs, numbered_layers
from nope_probe.hooks.reading.batch_readings import HeadReading, read_heads
from nope_probe.maps.estimates import Estimates, fold_weights, leave_one_out
from nope_probe.maps.folds import folds_of, pooled

N_SEQS = 64  # number of the run's sequences that are read again
N_CELLS = 2**18  # query-key cells of a head that are held at once
MEANS = ("first_key", "previous_token", "induction")
SHARES = ("positional", "symbolic")
PerHead = Float[Tensor, "fold layer head"]


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """The sequences that heads are measured on.

    Attributes:
        inputs: the run's sequences.
        repeated: n random tokens twice, with or without BOS before them.
        n_tokens: n.
        skip_keys: first keys that position and content leave out.
        fold_of: the fold of each sequence.
    """

    inputs: Inputs
    repeated: Tensor
    n_tokens: int
    skip_keys: int
    fold_of: Int[Tensor, " seq"]


def head_scores(
    model: HookedModel,
    tokens: Given,
    *,
    n_layers: int | None = None,
    n_folds: int | None = None,
) -> pd.DataFrame:
    """Measure the attention of each head, as `scores --per-head` does.

    Three columns are shares of attention: `first_key` (an attention sink), `previous_token` and
    `induction` (on repeated random tokens). Two are shares of the variance of the last query's
    scores: `positional` stays in place when keys are moved, `symbolic` moves with the keys. Bounds
    of 95% intervals end in `_low` and `_high`. If the tokenizer has a BOS token, further columns
    repeat the measures on the sequences without BOS (`_without_bos`), or with BOS added
    (`_with_bos`). About 64 of the sequences are read.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        tokens: `Sequences`, or any inputs of `capture_scores`, 4 sequences or more.
        n_layers: how many first layers to measure, if they attend; all by default.
        n_folds: parts of the data behind the intervals, 4 or more; by default 8, or the number of
            documents if it is lower.

    Returns:
        A row for each layer and head.

    Raises:
        ValueError: for too few sequences, folds or layers, or inputs that the model cannot take.

    Example:
        >>> from nope_probe import head_scores, load, sequences
        >>> loaded = load("rope-tiny")
        >>> data = sequences(tokenizer=loaded.tokenizer, n_seqs=32)
        >>> heads = head_scores(loaded.model, data).set_index(["layer", "head"])
        >>> layer, head = heads["previous_token"].idxmax()
        >>> f"L{layer}H{head}"
        'L1H3'
    """
    data, layers = as_sequences(model, tokens), first_layers(model, n_layers)
    tokenizer = getattr(model, "tokenizer", None)
    columns, _ = head_columns(model, data, tokenizer, layers, folds_for_intervals(data, n_folds))
    blocks = numbered_layers(model, layers)
    places = [(block.index, head) for block in blocks for head in range(block.n_heads)]
    return pd.concat([pd.DataFrame(places, columns=["layer", "head"]), columns], axis=1)


def head_columns(
    model: HookedModel,
    inputs: Sequences,
    tokenizer: PreTrainedTokenizerBase | None,
    layers: Sequence[int],
    n_folds: int,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return further columns of the heads' table, and the table of sinks.

    If the tokenizer has a BOS token, columns that end in `_without_bos` (or `_with_bos`) measure
    the same sequences without BOS (or with BOS added).

    Args:
        model: the model.
        inputs: the run's sequences.
        tokenizer: the model's tokenizer; None for a parameter-free model.
        layers: the numbers of the layers to measure, the first that attend.
        n_folds: parts of the sequences behind the intervals.
    """
    variants = {"": inputs}
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        suffix = "_without_bos" if inputs.bos else "_with_bos"
        variants[suffix] = _other_bos(inputs, tokenizer.bos_token_id)
    fold_of = folds_of(len(inputs), n_folds, inputs.documents)
    n_each, folds = -(-N_SEQS // n_folds), fold_of.unique()
    chosen = torch.cat([(fold_of == fold).nonzero().flatten()[:n_each] for fold in folds])
    columns, sinks = [], []
    for suffix, variant in variants.items():
        given = _head_inputs(variant, tokenizer, chosen, fold_of)
        measured, counts = measure_heads(model, given, len(layers)), given.fold_of.bincount()
        columns.append(_columns(measured, fold_weights(n_folds, counts), suffix))
        shares = sink_share(pooled(measured["first_key"], counts)).tolist()
        bos = "with" if variant.bos else "without"
        sinks.append({"layer": layers, "bos": bos, "threshold": SINK, "sink_score": shares})
    return pd.concat(columns, axis=1), pd.concat(map(pd.DataFrame, sinks), ignore_index=True)


def _other_bos(inputs: Sequences, bos_token_id: int) -> Sequences:
    """Return sequences without their BOS token, or with BOS added before them."""
    if inputs.bos:
        return replace(inputs, inputs=inputs.inputs[:, 1:], bos=False)
    longer = torch.nn.functional.pad(inputs.inputs[:, :-1], (1, 0), value=bos_token_id)
    return replace(inputs, inputs=longer, bos=True)


def _head_inputs(
    variant: Sequences,
    tokenizer: PreTrainedTokenizerBase | None,
    chosen: Int[Tensor, " chosen"],
    fold_of: Int[Tensor, " seq"],
) -> HeadInputs:
    inputs, skip = variant.inputs[chosen], int(variant.bos)
    n_tokens = max(2, (inputs.shape[1] - skip) // 2)
    once = inputs[:, :n_tokens]
    if tokenizer is not None:
        random = sequences(
            "random", tokenizer=tokenizer, n_seqs=len(chosen), seq_len=n_tokens, bos="never"
        )
        once = random.inputs
    return HeadInputs(
        inputs=inputs,
        repeated=torch.cat([inputs[:, :skip], once, once], 1),
        n_tokens=n_tokens,
        skip_keys=skip,
        fold_of=fold_of[chosen],
    )


def measure_heads(model: HookedModel, given: HeadInputs, n_layers: int) -> dict[str, PerHead]:
    """Return each measure per fold, layer and head.

    The measures are `first_key`, `previous_token` and `induction`, and the variances `positional`,
    `symbolic` and `total` of the last query's scores, in squared nats. Attention is the softmax of
    the scores, so a learned sink outside them (as in gpt-oss) is left out.
    """
    batches: dict[str, list[Float[Tensor, "batch layer head"]]] = defaultdict(list)
    n_pos = given.inputs.shape[1]
    keys = torch.stack((torch.zeros(n_pos, dtype=torch.long), _keys_before(n_pos, 1)))
    for readings in _readings(model, given.inputs, keys, n_layers):
        weights = torch.stack([reading.weights for reading in readings], 1)
        batches["first_key"].append(first_key_attention(weights[..., 0]))
        batches["previous_token"].append(previous_token_attention(weights[..., 1]))
        moved = [_moved(reading, given.skip_keys) for reading in readings]
        parts = zip(*map(position_and_content, moved), strict=True)
        for name, layers in zip((*SHARES, "total"), parts, strict=True):
            batches[name].append(torch.stack(layers, 1))
    keys = _keys_before(given.repeated.shape[1], given.n_tokens - 1)[None]
    for readings in _readings(model, given.repeated, keys, n_layers):
        weights = torch.stack([reading.weights[..., 0] for reading in readings], 1)
        batches["induction"].append(induction_attention(weights, given.n_tokens))
    folds = range(int(given.fold_of.max()) + 1)
    per_seq = {name: torch.cat(values).double() for name, values in batches.items()}
    return {
        name: torch.stack([values[given.fold_of == fold].mean(0) for fold in folds])
        for name, values in per_seq.items()
    }


def _readings(
    model: HookedModel, inputs: Tensor, keys: Int[Tensor, "which query_pos"], n_layers: int
) -> Iterator[list[HeadReading]]:
    for batch in inputs.split(max(1, N_CELLS // inputs.shape[1] ** 2)):
        yield read_heads(model, batch, keys, n_layers)


def _keys_before(n_pos: int, distance: int) -> Int[Tensor, " query_pos"]:
    """Return the key at a distance before each query; 0 for queries without such a key."""
    return (torch.arange(n_pos) - distance).clamp_min(0)


def _moved(reading: HeadReading, skip_keys: int) -> Float[Tensor, "batch head place key"]:
    """Return the last query's scores with every key moved to every place, nats."""
    kept = slice(skip_keys, -1)
    q, k, rotation = reading.q, reading.k[:, kept], reading.rotation[kept]
    moved = reading.scale * moved_scores(q.double(), k.double(), rotation.double())
    if reading.soft_cap is not None:
        moved = reading.soft_cap * torch.tanh(moved / reading.soft_cap)
    return moved


def _columns(
    measured: dict[str, PerHead], weights: Float[Tensor, " fold"], suffix: str
) -> pd.DataFrame:
    estimates = {name: leave_one_out(values, weights) for name, values in measured.items()}
    estimates |= {name: estimates[name] / estimates["total"] for name in SHARES}
    names, (n_layers, n_heads) = (*MEANS, *SHARES), measured["total"].shape[1:]
    rows = [
        {
            name + suffix: jackknife(
                Estimates(values=estimates[name][:, layer, head], weights=weights)
            )
            for name in names
        }
        for layer, head in product(range(n_layers), range(n_heads))
    ]
    return pd.DataFrame([interval_columns(**row) for row in rows])
