"""What passes read that several studies take: score maps and measures of heads, and losses.

A probe is a set of sequences. A cost is a condition's number less the intact model's on the same
sequences, so it is paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nope_probe.analyses.attention import AttentionSplit, split_attention
from nope_probe.analyses.jackknife import mean_intervals
from nope_probe.analyses.pattern import measure_heads
from nope_probe.data.sequences import InputKind, Sequences, random_twice, repeated
from nope_probe.errors import UserError
from nope_probe.figures.words import HEAD_MEASURES
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import (
    Given,
    as_inputs,
    begins_alike,
    blocks_of,
    layers_of,
    numbered_layers,
)
from nope_probe.hooks.layers.objects import Model, model_of
from nope_probe.hooks.layers.passes import Entry, entered, logits_from, run_to_enter
from nope_probe.hooks.need import capture_need
from nope_probe.hooks.reading.accumulators import Cut
from nope_probe.hooks.reading.attention import (
    AttentionAccumulator,
    HeadMeasures,
    HeadSums,
    attended,
    attention_maps,
    induction_scores,
    means_of,
)
from nope_probe.hooks.reading.capture import LossAccumulator
from nope_probe.hooks.reading.streaming import Stream, stream
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.estimates import Estimates, fold_weights
from nope_probe.maps.folds import State
from nope_probe.maps.maps import Layers
from nope_probe.maps.rows import choose_rows
from nope_probe.run.folder import without_replicates
from nope_probe.run.session import Session, folds_for_intervals
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import Pass
from nope_probe.studies.tables import (
    WEIGHTS,
    Row,
    attention_table,
    columns_of,
    mean_columns,
)

N_REPEATED = 16  # number of sequences of repeated random tokens
N_CELLS = 2**18  # query-key cells of a head that are in memory at once


def induction(n_tokens: int) -> HeadMeasures:
    """Return what measures induction in n random tokens twice."""
    return lambda attention: {"induction": induction_scores(attention, n_tokens)}


def head_scores(
    model: Model, tokens: Given, *, n_layers: int | None = None, n_folds: int | None = None
) -> pd.DataFrame:
    """Measure each head's attention, as `ablate --remove none --per-head` does, without its map.

    The columns are shares of attention: `first_key` (an attention sink), `previous_token` and
    `induction` (on repeated random tokens). Bounds of 95% intervals end in `_low` and `_high`.

    Args:
        model: in any form that `load` takes in memory, or what it returns, ablated or not.
        tokens: `Sequences`, or any inputs of `capture_scores`, 4 sequences or more.
        n_layers: how many first layers to measure, if they attend; all by default.
        n_folds: parts of the data behind the intervals, 4 or more; by default 8, or the number of
            documents if it is lower.

    Returns:
        A row for each layer and head. `run_attention` splits attention into position and content.

    Raises:
        UserError: for too few sequences, folds or layers, or inputs that the model cannot take.

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
    engine = Engine(
        model=model,
        inputs=data.inputs,
        documents=data.documents,
        batch_size=max(1, N_CELLS // data.inputs.shape[1] ** 2),
        n_folds=folds_for_intervals(data, n_folds),
    )
    on_text = head_sums(model, layers, engine.n_folds, attended)
    stream(model, data.inputs, on_text, engine.fold_of, engine.batch_size)
    copies, n_tokens = random_copies(engine, data, getattr(model, "tokenizer", None))
    induced = captured_induction(copies, None, layers=layers, n_tokens=n_tokens)
    places = [(sums.layer.index, head) for sums in on_text for head in range(sums.layer.n_heads)]
    of_text = means_of(on_text, engine.fold_of), engine.fold_of
    columns = without_replicates(head_columns(of_text, (induced, copies.fold_of)))
    return pd.concat([pd.DataFrame(places, columns=["layer", "head"]), columns], axis=1)


def as_sequences(model: HookedModel, given: Given) -> Sequences:
    """Return sequences with their properties; a first token that all share is a BOS token.

    Raises:
        UserError: for inputs of another kind, or that the model cannot take.
    """
    inputs = as_inputs(model, given)
    if isinstance(given, Sequences):
        return given
    kind: InputKind = "vectors" if inputs.is_floating_point() else "text"
    return Sequences(inputs=inputs.cpu(), name="tokens", bos=begins_alike(inputs), kind=kind)


def first_layers(model: HookedModel, n_layers: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that attend, among some first layers or all.

    Raises:
        UserError: for more layers than there are, or no attention.
    """
    attending, depth = [layer.index for layer in layers_of(model)], len(blocks_of(model))
    if n_layers is not None and not 1 + attending[0] <= n_layers <= depth:
        raise UserError(f"expected from {1 + attending[0]} to {depth} layers, got {n_layers}")
    return tuple(layer for layer in attending if layer < (n_layers or depth))


def head_sums(
    model: HookedModel, layers: Sequence[int], n_folds: int, measure: HeadMeasures
) -> list[HeadSums]:
    """Return the sums that passes add the measures of heads to, by layer."""
    return [HeadSums(block, n_folds, measure) for block in numbered_layers(model, layers)]


def random_copies(
    engine: Engine, data: Sequences, tokenizer: PreTrainedTokenizerBase | None, n_processes: int = 1
) -> tuple[Engine, int]:
    """Return the engine on n random tokens twice, behind BOS if the sequences have it, and n.

    Args:
        engine: of the sequences.
        data: the sequences; vectors, which are random already, are repeated themselves.
        tokenizer: the model's; None for a model that takes vectors.
        n_processes: how many share the run; each gets a batch.
    """
    n_folds, n_tokens = engine.n_folds, max(2, data.segment)
    n_seqs = -(-max(N_REPEATED, n_processes) // n_folds) * n_folds
    if tokenizer is None:
        copies = repeated(replace(data, inputs=data.inputs[:n_seqs], documents=None), n_tokens)
    else:
        first = replace(data, inputs=data.inputs[:1].expand(n_seqs, -1), documents=None)
        copies = random_twice(first, n_tokens, tokenizer, seed=0)
    size = max(1, min(N_CELLS // copies.shape[1] ** 2, n_seqs // n_processes))
    return replace(engine, inputs=copies, documents=None, batch_size=size), n_tokens


def captured_induction(
    engine: Engine, checkpoint: Stream | None, *, layers: Sequence[int], n_tokens: int
) -> State:
    """Return the fold means of heads' induction scores on the engine's n random tokens twice."""
    sums = head_sums(engine.model, layers, engine.n_folds, induction(n_tokens))
    stream(engine.model, engine.inputs, sums, engine.fold_of, engine.batch_size, checkpoint)
    return means_of(sums, engine.fold_of)


def read_need(engine: Engine, stream: Stream | None, *, removal: Ablation) -> State:
    """Return fold means of how much each head needs what is removed, nats."""
    need = capture_need(
        engine.model,
        engine.inputs,
        removal,
        batch_size=engine.batch_size,
        n_folds=engine.n_folds,
        documents=engine.documents,
        checkpoint=stream,
    )
    return {"need": need.folds.movedim(0, -1)}


def head_columns(
    *parts: tuple[Mapping[str, Float[Tensor, "_fold layer head"]], Int[Tensor, " _seq"]],
) -> pd.DataFrame:
    """Return the columns of heads' measures, with 95% intervals; a row for each layer and head.

    Args:
        parts: fold means by measure, and the fold of each sequence behind them.
    """
    columns: dict[str, list[Any]] = {}
    for means, fold_of in parts:
        weights = fold_weights(len(fold_of.unique()), fold_of.bincount())
        for name, folds in means.items():
            columns |= mean_columns(name, mean_intervals(folds, weights))
    return pd.DataFrame(columns)


class Reading(NamedTuple):
    """What a pass reads: score maps and, if they are asked for, sums over heads and losses.

    Attributes:
        maps: the score maps of each layer.
        heads: the measures of the attention of each layer's heads.
        attention: the attention weights of each layer's heads.
        losses: the mean loss, nats.
    """

    maps: Layers
    heads: list[HeadSums]
    attention: list[AttentionAccumulator]
    losses: Estimates | None = None


def read_scores(
    engine: Engine,
    key: str,
    ablation: Ablation,
    *,
    layers: Sequence[int],
    per_head: bool = False,
    attention: bool = False,
    loss: bool = False,
) -> Reading:
    """Return the score maps of layers, their heads' attention and the losses, from one pass."""
    counts = engine.fold_of.bincount()
    cut = Cut(
        counts=counts,
        queries=choose_rows(engine.inputs.shape[1], engine.query_rows),
        skip_keys=engine.skip_keys or 0,
    )
    heads = head_sums(engine.model, layers, engine.n_folds, attended) if attention else []
    weights = [AttentionAccumulator(of.layer, cut, keeps_scores=False) for of in heads]
    losses = [LossAccumulator(engine.n_folds)] if loss else []
    also = [*heads, *weights, *losses]
    maps = engine.scores(key, ablation, layers=layers, per_head=per_head, also=also)
    means = [of.totals["losses"].cpu().mean(1) / counts for of in losses]
    of_folds = fold_weights(len(counts), counts)
    return Reading(maps, heads, weights, *(Estimates.of_means(mean, of_folds) for mean in means))


def heads_table(
    reading: Reading, fold_of: Int[Tensor, " seq"], induction: tuple[State, Int[Tensor, " copy"]]
) -> pd.DataFrame:
    """Return each head's lead and three measures of its pattern, and its attention's measures.

    Args:
        reading: of the intact model.
        fold_of: the fold of each sequence.
        induction: fold means of induction attention, and the fold of each sequence of copies.
    """
    rows = pd.DataFrame(
        {"layer": layer, "head": head, **Row().columns, **columns_of(measures, HEAD_MEASURES)}
        for (layer, head), measures in measure_heads(reading.maps).items()
    )
    measured = head_columns((means_of(reading.heads, fold_of), fold_of), induction)
    splits: dict[tuple[int, int], AttentionSplit] = {}
    for sums in reading.attention:  # a layer at a time: the fold means are in memory once
        splits |= split_attention(attention_maps([sums]))
    split = attention_table(splits, WEIGHTS).drop(columns=["layer", "head"])
    return pd.concat([rows, measured, split], axis=1)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Sequences of equal length on which conditions are compared.

    Attributes:
        tokens: the sequences.
        documents: the document of each.
        prefix: how many first positions see each other where the mask is removed: the first target
            that none of them has in sight. None where all see each other.
        texts: of the same length, whose mean is the position that blocks write; by default the
            sequences.
    """

    tokens: Int[Tensor, "seq pos"]
    documents: Int[Tensor, " seq"]
    prefix: int | None = None
    texts: Sequences | None = None

    @classmethod
    def of(cls, data: Sequences, prefix: int | None = None) -> Probe:
        """Return sequences with their documents; a sequence without a document is one."""
        documents = torch.arange(len(data)) if data.documents is None else data.documents
        return cls(tokens=data.inputs, documents=documents, prefix=prefix)

    def engine(self, session: Session[Any], which: Tensor | slice = slice(None)) -> Engine:
        """Return the engine of a run on these sequences or some of them.

        A batch has as many tokens as one of the run's, and every process gets a batch.
        """
        tokens, settings = self.tokens[which], session.settings
        same_tokens = settings.seqs_per_batch * settings.seq_len // tokens.shape[1]
        return replace(
            Engine.of(session),
            inputs=tokens,
            documents=self.documents[which],
            batch_size=max(1, min(same_tokens, len(tokens) // session.processes.count)),
            texts=self.texts,
        )


def copies(
    data: Sequences, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> dict[str, Probe]:
    """Return the first segment of each sequence twice, and random tokens twice, behind BOS.

    The prefix ends with the first copy. Blocks write the position that they write in the sequences.
    """
    drawn = replace(data, inputs=random_twice(data, data.segment, tokenizer, seed), documents=None)
    kinds = {"text": replace(data, inputs=repeated(data, data.segment)), "random": drawn}
    return {
        f"copy_{kind}": replace(
            Probe.of(of_kind, prefix=int(data.bos) + data.segment),
            texts=replace(data, inputs=data.inputs[:, : of_kind.inputs.shape[1]]),
        )
        for kind, of_kind in kinds.items()
    }


def costs(
    session: Session[Any],
    conditions: Mapping[str, Ablation],
    probes: Mapping[str, Probe],
    read: Callable[[str, str, Engine, str, Ablation], Any],
) -> Iterator[Pass]:
    """Yield a pass for every condition on every probe.

    Args:
        session: the run.
        conditions: what is removed, by name.
        probes: the sequences, by name.
        read: measures a pass, given the names of its condition and probe, and what every pass is
            given.
    """
    for name, ablation in conditions.items():
        for place, probe in probes.items():
            removed = ablation
            if "mask" in ablation.condition and probe.prefix is not None:
                removed = replace(ablation, prefix=probe.prefix)
            engine = probe.engine(session)
            yield Pass(
                key=f"loss/{name}/{place}",
                engine=engine,
                read=partial(read, name, place),
                ablation=removed,
                kind=f"loss of {engine.inputs.shape[1]} tokens",
                reads_logits=True,
            )


def captured_losses(
    engine: Engine,
    key: str,
    ablation: Ablation,
    *,
    first: int = 0,
    entry: Entry | None = None,
    block: int = 0,
    also: Sequence[HeadSums] = (),
) -> State:
    """Return the losses of every sequence, [seq, target], nats, float64 on the CPU.

    Args:
        engine: the model on the sequences.
        key: of the pass.
        ablation: what the model is run without.
        first: the first position whose prediction is scored; its target is the token after it.
        entry: the intact model's residual streams of the same sequences, if the pass may begin at
            the first block that loses something.
        block: that block.
        also: induction in every sequence, which the pass measures too: of the layers that run, by
            their numbers.
    """

    def capture(engine: Engine, checkpoint: Stream | None) -> State:
        sums = LossAccumulator(len(engine.inputs), first)
        with ExitStack() as stack:
            if first:
                stack.enter_context(logits_from(engine.model, first))
            if entry is not None:
                rows = partial(getattr, sums, "fold_of")
                stack.enter_context(entered(engine.model, entry, block, rows))
            every = torch.arange(len(engine.inputs))
            stream(engine.model, engine.inputs, [sums, *also], every, engine.batch_size, checkpoint)
        measured = {str(of.layer.index): of.totals["induction"] for of in also if of.totals}
        return {"losses": sums.totals["losses"], **measured}

    tensors = engine.load_or_compute(key, capture, ablation)
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def captured_entry(engine: Engine, blocks: Sequence[int], progress: Stream) -> Entry:
    """Return the intact model's residual streams before some blocks, of all sequences."""
    batches = list[Entry]()
    for batch in engine.inputs.split(engine.batch_size):
        batches.append(run_to_enter(engine.model, batch, blocks))
        progress.advance(len(batch))
    return Entry.joined(batches)
