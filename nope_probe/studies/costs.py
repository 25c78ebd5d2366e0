"""What removals cost: conditions times probes, each read as the losses of a model's predictions.

A probe is a set of sequences. A cost is a condition's number less the intact model's on the same
sequences, so it is paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nope_probe.data.sequences import Sequences, random_twice, repeated
from nope_probe.hooks.layers.passes import Entry, entered, logits_from, run_to_enter
from nope_probe.hooks.reading.attention import HeadSums
from nope_probe.hooks.reading.capture import LossAccumulator
from nope_probe.hooks.reading.streaming import Stream, stream
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.folds import State
from nope_probe.run.session import Session
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import Pass

Reading = Callable[[str, str, Engine, str, Ablation], Any]


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
    read: Reading,
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
