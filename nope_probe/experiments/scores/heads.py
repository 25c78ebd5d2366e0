"""Each head's attention to the first key and the previous token, induction, position, content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.head_measures import (
    SINK,
    first_key_attention,
    induction_attention,
    moved_scores,
    position_and_content,
    previous_token_attention,
    sink_share,
)
from nope_probe.analyses.jackknife import jackknife, leave_one_out
from nope_probe.data.sequences import Sequences, sequences
from nope_probe.experiments.tables import Row, interval_columns
from nope_probe.hooks.layers.model import Inputs
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.batch_readings import HeadReading, read_heads
from nope_probe.maps.folds import folds_of, pooled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

N_SEQS = 64  # as many of the run's sequences are read again
N_CELLS = 2**18  # query-key cells of a layer's head that are held at once
MEANS = ("first_key", "previous_token", "induction")
SHARES = ("positional", "symbolic")
PerHead = Float[Tensor, "fold layer head"]


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """The sequences that heads are measured on.

    Attributes:
        inputs: sequences as the run has them.
        repeated: n random tokens twice, after a BOS token or not.
        n_tokens: n.
        skip_keys: first keys that position and content leave out.
        fold_of: the fold of each sequence.
    """

    inputs: Inputs
    repeated: Tensor
    n_tokens: int
    skip_keys: int
    fold_of: Int[Tensor, " seq"]

    @property
    def counts(self) -> Int[Tensor, " fold"]:
        """Sequences per fold."""
        return self.fold_of.bincount()


def head_columns(
    model: HookedModel,
    inputs: Sequences,
    tokenizer: PreTrainedTokenizerBase | None,
    n_layers: int,
    n_folds: int,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return further columns of the heads' table, and the table of sinks.

    Where the tokenizer has a BOS token, columns that end in `_without_bos` (or `_with_bos`) are of
    the same sequences without theirs (or with one).

    Args:
        model: the model.
        inputs: the run's sequences.
        tokenizer: the model's; None for a parameter-free model.
        n_layers: how many first layers to measure.
        n_folds: parts of the sequences that intervals are made from.
    """
    variants = {"": inputs}
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        suffix = "_without_bos" if inputs.bos else "_with_bos"
        variants[suffix] = _other_bos(inputs, tokenizer.bos_token_id)
    fold_of = folds_of(len(inputs), n_folds, inputs.documents)
    chosen = _first_of_folds(fold_of, -(-N_SEQS // n_folds))
    columns, sinks = [], []
    for suffix, some in variants.items():
        given = _head_inputs(some, tokenizer, chosen, fold_of)
        measured = measure_heads(model, given, n_layers)
        columns.append(_columns(measured, given.counts, suffix))
        first_key = pooled(measured["first_key"], given.counts)
        sinks.append(_sinks_table(first_key, "with" if some.bos else "without"))
    return pd.concat(columns, axis=1), pd.concat(sinks, ignore_index=True)


def measure_heads(model: HookedModel, given: HeadInputs, n_layers: int) -> dict[str, PerHead]:
    """Return each measure per fold, layer and head.

    These are `first_key`, `previous_token` and `induction`, and the variances `positional`,
    `symbolic` and `total` of the last query's scores, in squared nats. Attention is the softmax of
    the scores: a learned sink outside them (as in gpt-oss) is left out.
    """
    sums: dict[str, list[Tensor]] = {}
    n_pos = given.inputs.shape[1]
    keys = torch.stack((torch.zeros(n_pos, dtype=torch.long), _keys_before(n_pos, 1)))
    for readings in _batches(model, given.inputs, keys, n_layers):
        weights = torch.stack([each.weights for each in readings], 1)
        _append(sums, "first_key", first_key_attention(weights[..., 0]))
        _append(sums, "previous_token", previous_token_attention(weights[..., 1]))
        parts = [_position_and_content(each, given.skip_keys) for each in readings]
        for name, values in zip((*SHARES, "total"), zip(*parts, strict=True), strict=True):
            _append(sums, name, torch.stack(values, 1))
    keys = _keys_before(given.repeated.shape[1], given.n_tokens - 1)[None]
    for readings in _batches(model, given.repeated, keys, n_layers):
        weights = torch.stack([each.weights[..., 0] for each in readings], 1)
        _append(sums, "induction", induction_attention(weights, given.n_tokens))
    per_seq = {name: torch.cat(some).double() for name, some in sums.items()}
    return {
        name: torch.stack(
            [values[given.fold_of == fold].mean(0) for fold in range(len(given.counts))]
        )
        for name, values in per_seq.items()
    }


def _batches(
    model: HookedModel, inputs: Tensor, keys: Int[Tensor, "which query_pos"], n_layers: int
) -> Iterator[list[HeadReading]]:
    size = max(1, N_CELLS // inputs.shape[1] ** 2)
    for batch in inputs.split(size):
        yield read_heads(model, batch, keys, n_layers)


def _keys_before(n_pos: int, distance: int) -> Int[Tensor, " query_pos"]:
    """Return the key at a distance before each query; 0 for queries that have none."""
    return (torch.arange(n_pos) - distance).clamp_min(0)


def _append(sums: dict[str, list[Tensor]], name: str, values: Tensor) -> None:
    sums.setdefault(name, []).append(values)


def _position_and_content(reading: HeadReading, skip_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the variances of the last query's scores by place and by key."""
    kept = slice(skip_keys, -1)
    moved = reading.scale * moved_scores(
        reading.q.double(),
        reading.k[:, kept].double(),
        reading.rotation[kept].double(),
    )
    if reading.soft_cap is not None:
        moved = reading.soft_cap * torch.tanh(moved / reading.soft_cap)
    return position_and_content(moved)


def _head_inputs(
    some: Sequences,
    tokenizer: PreTrainedTokenizerBase | None,
    chosen: Int[Tensor, " chosen"],
    fold_of: Int[Tensor, " seq"],
) -> HeadInputs:
    inputs, skip, n_seqs = some.inputs[chosen], int(some.bos), len(chosen)
    n_tokens = max(2, (inputs.shape[1] - skip) // 2)
    if tokenizer is None:
        once = inputs[:, :n_tokens]
    else:
        random = sequences(
            "random", tokenizer=tokenizer, n_seqs=n_seqs, seq_len=n_tokens, bos="never"
        )
        once = random.inputs
    repeated = torch.cat([inputs[:, :skip], once, once], 1)
    return HeadInputs(
        inputs=inputs,
        repeated=repeated,
        n_tokens=n_tokens,
        skip_keys=skip,
        fold_of=fold_of[chosen],
    )


def _first_of_folds(fold_of: Int[Tensor, " seq"], n_each: int) -> Int[Tensor, " chosen"]:
    """Return the numbers of the first sequences of each fold."""
    folds = range(int(fold_of.max()) + 1)
    return torch.cat([(fold_of == fold).nonzero().flatten()[:n_each] for fold in folds])


def _other_bos(inputs: Sequences, bos_token_id: int) -> Sequences:
    """Return sequences without their BOS token, or with one before them."""
    if inputs.bos:
        return replace(inputs, inputs=inputs.inputs[:, 1:], bos=False)
    longer = torch.nn.functional.pad(inputs.inputs[:, :-1], (1, 0), value=bos_token_id)
    return replace(inputs, inputs=longer, bos=True)


def _columns(
    measured: dict[str, PerHead], counts: Int[Tensor, " fold"], suffix: str
) -> pd.DataFrame:
    n_layers, n_heads = measured["first_key"].shape[1:]
    return pd.DataFrame(
        [
            _row(measured, counts, suffix, layer, head)
            for layer in range(n_layers)
            for head in range(n_heads)
        ]
    )


def _row(
    measured: dict[str, PerHead],
    counts: Int[Tensor, " fold"],
    suffix: str,
    layer: int,
    head: int,
) -> Row:
    row: Row = {}
    for name in MEANS:
        means = leave_one_out(measured[name][:, layer, head], counts)
        row |= interval_columns(jackknife(means, counts), name + suffix)
    total = leave_one_out(measured["total"][:, layer, head], counts)
    for name in SHARES:
        part = leave_one_out(measured[name][:, layer, head], counts)
        row |= interval_columns(jackknife(part / total, counts), name + suffix)
    return row


def _sinks_table(first_key: Float[Tensor, "layer head"], bos: str) -> pd.DataFrame:
    """Return per layer the share of heads that are sinks, on sequences with or without BOS."""
    shares = sink_share(first_key).tolist()
    return pd.DataFrame(
        {"layer": range(len(shares)), "bos": bos, "threshold": SINK, "sink_score": shares}
    )
