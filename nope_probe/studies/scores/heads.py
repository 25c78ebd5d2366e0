"""Each head's attention to the first key and the previous token, induction, position, content."""

from __future__ import annotations

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
    induction_scores,
    moved_scores,
    position_and_content,
    previous_token_attention,
    sink_share,
)
from nope_probe.analyses.jackknife import jackknife
from nope_probe.data.sequences import Sequences, random_twice, repeated
from nope_probe.hooks.layers.attention import Attention, repeat_heads
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given, Inputs, numbered_layers, traits_of
from nope_probe.hooks.layers.objects import Model, model_of
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.batch_readings import keys_before, rotation_of, weights_on
from nope_probe.hooks.reading.streaming import stream
from nope_probe.maps.estimates import Estimates, fold_weights, leave_one_out
from nope_probe.maps.folds import folds_of, pooled, sum_parts
from nope_probe.maps.rotation import Rotation
from nope_probe.run.sources import as_sequences, first_layers, folds_for_intervals
from nope_probe.studies.tables import interval_columns

N_OTHER = 32  # number of the run's sequences that are read with BOS added or left out
N_REPEATED = 16  # number of sequences of repeated random tokens
N_CELLS = 2**18  # query-key cells of a head that are in memory at once
MEANS = ("first_key", "previous_token", "induction")
SHARES = ("positional", "symbolic")
PerHead = Float[Tensor, "fold layer head"]


class HeadScores(Accumulator):
    """Sums one layer's measures of heads over sequences, per fold.

    The measures are `first_key` and `previous_token`, and the variances `positional`, `symbolic`
    and `total` of the last query's scores, in squared nats, or NaN where the rotation was not
    recognised. Attention is the softmax of the scores, so a learned sink outside them (as in
    gpt-oss) is left out.

    Args:
        model: the model.
        layer: the layer.
        n_folds: parts of the sequences.
        kept_positions: how many first positions position and content leave out.
    """

    reads_attention = True

    def __init__(self, model: HookedModel, layer: Layer, n_folds: int, kept_positions: int) -> None:
        super().__init__(n_folds)
        self.layer, self.kept_positions = layer, kept_positions
        self.rotary = traits_of(model)[layer.index].rotary

    def read(self, attention: Attention) -> None:
        """Add one batch."""
        if self.already_counted:
            return
        measures = self.measures(attention)
        self.add(
            **{
                name: sum_parts(values.double(), self.fold_of, self.n_folds)
                for name, values in measures.items()
            }
        )

    def measures(self, attention: Attention) -> dict[str, Float[Tensor, "batch head"]]:
        """Return each measure of every sequence of a batch."""
        n_pos = attention.q.shape[1]
        keys = torch.stack((torch.zeros(n_pos, dtype=torch.long), keys_before(n_pos, 1)))
        weights = weights_on(attention, keys)
        first_key = first_key_attention(weights[..., 0])
        rotation = rotation_of(attention, self.rotary)
        parts = [
            position_and_content(moved)
            for moved in _moved(attention, rotation, slice(self.kept_positions, -1))
        ]
        if not parts:  # keys cannot be moved by a rotation that is not known
            parts = [(first_key * torch.nan,) * 3]
        return {
            "first_key": first_key,
            "previous_token": previous_token_attention(weights[..., 1]),
            **dict(zip((*SHARES, "total"), map(torch.cat, zip(*parts, strict=True)), strict=True)),
        }


class InductionScores(HeadScores):
    """Sums one layer's `induction` scores, on random tokens twice, with or without BOS before.

    Args:
        n_tokens: how many tokens are repeated.
    """

    def __init__(self, model: HookedModel, layer: Layer, n_folds: int, n_tokens: int) -> None:
        super().__init__(model, layer, n_folds, kept_positions=0)
        self.n_tokens = n_tokens

    def measures(self, attention: Attention) -> dict[str, Float[Tensor, "batch head"]]:
        """Return the induction score of every sequence of a batch."""
        return {"induction": induction_scores(attention, self.n_tokens)}


@dataclass(frozen=True, kw_only=True)
class HeadMeans:
    """Fold means of measures of heads.

    Attributes:
        means: by measure.
        counts: sequences per fold.
    """

    means: dict[str, PerHead]
    counts: Int[Tensor, " fold"]

    @classmethod
    def of(cls, sums: Sequence[HeadScores], fold_of: Int[Tensor, " seq"]) -> HeadMeans:
        """Return the means of sums over sequences of given folds, a layer after the other."""
        counts = fold_of.bincount()
        means = {
            name: torch.stack([layer.totals[name].cpu() for layer in sums], 1)
            / counts[:, None, None]
            for name in sums[0].totals
        }
        return cls(means=means, counts=counts)

    @classmethod
    def captured(
        cls,
        model: HookedModel,
        inputs: Inputs,
        sums: Sequence[HeadScores],
        fold_of: Int[Tensor, " seq"],
    ) -> HeadMeans:
        """Return the means over sequences that are run for them."""
        stream(model, inputs, sums, fold_of, max(1, N_CELLS // inputs.shape[1] ** 2))
        return cls.of(sums, fold_of)


def head_scores(
    model: Model, tokens: Given, *, n_layers: int | None = None, n_folds: int | None = None
) -> pd.DataFrame:
    """Measure the attention of each head, as `scores --per-head` does, without maps of heads.

    Three columns are shares of attention: `first_key` (an attention sink), `previous_token` and
    `induction` (on repeated random tokens). Two are shares of the variance of the last query's
    scores: `positional` stays in place when keys are moved, `symbolic` moves with the keys; they
    are empty where RoPE's pairs of coordinates were not recognised (GPT-J, CodeGen). Bounds
    of 95% intervals end in `_low` and `_high`. If the tokenizer has a BOS token, further columns
    repeat the measures on the sequences without BOS (`_without_bos`), or with BOS added
    (`_with_bos`), of which 32 are read.

    Args:
        model: in any form that `load` takes in memory, or what it returns, ablated or not.
        tokens: `Sequences`, or any inputs of `capture_scores`, 4 sequences or more.
        n_layers: how many first layers to measure, if they attend; all by default.
        n_folds: parts of the data behind the intervals, 4 or more; by default 8, or the number of
            documents if it is lower.

    Returns:
        A row for each layer and head. `run_attention` splits attention into position and content.

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
    model = model_of(model)
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
    unchanged: HeadMeans | None = None,
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
        unchanged: the means over the sequences as they are; by default, they are captured here.
    """
    blocks = numbered_layers(model, layers)
    fold_of = folds_of(len(inputs), n_folds, inputs.documents)
    if unchanged is None:
        sums = head_sums(model, layers, inputs, n_folds)
        unchanged = HeadMeans.captured(model, inputs.inputs, sums, fold_of)
    measured = {"": (inputs, unchanged)}
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        other, n_each = _other_bos(inputs, tokenizer.bos_token_id), -(-N_OTHER // n_folds)
        folds = [(fold_of == fold).nonzero().flatten()[:n_each] for fold in fold_of.unique()]
        chosen = torch.cat(folds)
        sums = head_sums(model, layers, other, n_folds)
        means = HeadMeans.captured(model, other.inputs[chosen], sums, fold_of[chosen])
        measured["_without_bos" if inputs.bos else "_with_bos"] = other, means
    columns, sinks = [], []
    for suffix, (variant, text) in measured.items():
        copies, n_tokens = _repeated(variant, tokenizer, n_folds)
        induction = HeadMeans.captured(
            model,
            copies,
            [InductionScores(model, block, n_folds, n_tokens) for block in blocks],
            torch.arange(len(copies)) % n_folds,
        )
        columns.append(_columns((text, induction), suffix))
        shares = sink_share(pooled(text.means["first_key"], text.counts)).tolist()
        bos = "with" if variant.bos else "without"
        sinks.append({"layer": layers, "bos": bos, "threshold": SINK, "sink_score": shares})
    return pd.concat(columns, axis=1), pd.concat(map(pd.DataFrame, sinks), ignore_index=True)


def head_sums(
    model: HookedModel, layers: Sequence[int], inputs: Sequences, n_folds: int
) -> list[HeadScores]:
    """Return the sums that passes over sequences add the measures of heads to."""
    blocks = numbered_layers(model, layers)
    return [HeadScores(model, block, n_folds, int(inputs.bos)) for block in blocks]


def layers_without_shares(model: HookedModel, layers: Sequence[int]) -> list[int]:
    """Return the layers whose rotation was not recognised, so that no key can be moved."""
    rotations = {layer: traits_of(model)[layer].rotary for layer in layers}
    return [layer for layer, rotary in rotations.items() if rotary and rotary.pairs is None]


def _other_bos(inputs: Sequences, bos_token_id: int) -> Sequences:
    """Return sequences without their BOS token, or with BOS added before them."""
    if inputs.bos:
        return replace(inputs, inputs=inputs.inputs[:, 1:], bos=False)
    longer = torch.nn.functional.pad(inputs.inputs[:, :-1], (1, 0), value=bos_token_id)
    return replace(inputs, inputs=longer, bos=True)


def _repeated(
    variant: Sequences, tokenizer: PreTrainedTokenizerBase | None, n_folds: int
) -> tuple[Inputs, int]:
    """Return n random tokens twice, behind BOS if the sequences have it, and n."""
    n_seqs, n_tokens = -(-N_REPEATED // n_folds) * n_folds, max(2, variant.segment)
    inputs = variant.inputs
    if tokenizer is None:  # vectors are random already
        some = replace(variant, inputs=inputs[:n_seqs], documents=None)
        return repeated(some, n_tokens), n_tokens
    first = replace(variant, inputs=inputs[:1].expand(n_seqs, -1), documents=None)
    return random_twice(first, n_tokens, tokenizer, seed=0), n_tokens


def _moved(
    attention: Attention, rotation: Rotation, kept: slice
) -> Iterator[Float[Tensor, "batch head place key"]]:
    """Yield the last query's scores with every kept key moved to every place, nats.

    The batches are small. There are none if the rotation was not recognised.
    """
    if rotation.pairs is None:
        return
    size, rotation = max(1, N_CELLS // attention.q.shape[1] ** 2), rotation.among(kept)
    last, keys = attention.q[:, -1].cpu(), repeat_heads(attention.k[:, kept], attention.n_heads)
    for q, k in zip(last.split(size), keys.cpu().split(size), strict=True):
        moved = attention.scale * moved_scores(q.double(), k.double(), rotation)
        if attention.soft_cap is not None:
            moved = attention.soft_cap * torch.tanh(moved / attention.soft_cap)
        yield moved


def _columns(parts: Sequence[HeadMeans], suffix: str) -> pd.DataFrame:
    values: dict[str, Float[Tensor, "one_plus_folds layer head"]] = {}
    weights: dict[str, Float[Tensor, " fold"]] = {}
    for part in parts:
        of_folds = fold_weights(len(part.counts), part.counts)
        values |= {name: leave_one_out(mean, of_folds) for name, mean in part.means.items()}
        weights |= dict.fromkeys(part.means, of_folds)
    names, (n_layers, n_heads) = (*MEANS, *SHARES), values["total"].shape[1:]
    values |= {name: values[name] / values["total"] for name in SHARES}
    rows = [
        {
            name + suffix: jackknife(
                Estimates(values=values[name][:, layer, head], weights=weights[name])
            )
            for name in names
        }
        for layer, head in product(range(n_layers), range(n_heads))
    ]
    return pd.DataFrame([interval_columns(**row) for row in rows])
