"""The plan of a run of `behaviour`, and what is measured in every condition of the plan.

A plan has the conditions, the sequences and the skipped measures. Measured are the losses of all
sequences and decodability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log, nan

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval
from nope_probe.data.sequences import Sequences, permuted, random_twice, repeated
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import numbered_layers, positions_of
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.removal import SOURCES, Condition
from nope_probe.run.session import Session
from nope_probe.studies.behaviour.settings import (
    MEASURES,
    QUANTITIES,
    Measure,
    Settings,
    make_conditions,
)
from nope_probe.studies.engine import irreplaceable, validate_first_sequence, validate_removable

MIN_DOCUMENTS = 8  # four to fit on and four to evaluate
DRAWN: tuple[Measure, ...] = ("copy", "bos")  # they take random tokens of the vocabulary
ProbeLosses = Float[Tensor, "_ _"]  # documents and targets, which differ among probes
Distances = Float[Tensor, "held_out layer fit"]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Sequences of equal length on which the model is run.

    Attributes:
        tokens: the sequences.
        documents: the document of each.
        prefix: how many first positions see each other where the mask is removed: the first target
            that none of them has in sight.
    """

    tokens: Int[Tensor, "seq pos"]
    documents: Int[Tensor, " seq"]
    prefix: int

    def subset(self, which: Int[Tensor, " chosen"]) -> Probe:
        """Return some of the sequences."""
        return replace(self, tokens=self.tokens[which], documents=self.documents[which])


@dataclass(frozen=True, kw_only=True)
class BehaviourPlan:
    """A run's plan.

    Attributes:
        conditions: the removals by name; the intact model first.
        heads: removals of the W_Q of a single head, by layer and head, if wanted.
        sources: the mask and the position encoding of the model.
        layers: the numbers of the layers in which position is read.
        measures: the names of the measures.
        probes: the sequences by name.
        skipped: per measure that the model or the data cannot show, the reason.
        bos: whether windows begin with a BOS token.
        trained: the length that the model was trained at, in tokens.
        left_out: weights that are removed only where they are named, and why.
        uniform: the loss of a uniform guess among the tokens that are not special, in nats;
            NaN without a tokenizer.
    """

    conditions: dict[str, Ablation]
    heads: dict[tuple[int, int], Ablation]
    sources: Condition
    layers: tuple[int, ...]
    measures: tuple[Measure, ...]
    probes: dict[str, Probe]
    skipped: dict[str, str]
    bos: bool
    trained: int
    left_out: dict[str, str]
    uniform: float

    @property
    def text(self) -> Probe:
        """The text windows."""
        return self.probes["text"]

    @property
    def segment(self) -> int:
        """The length of a segment that fits into a window twice, after BOS."""
        return (self.text.tokens.shape[1] - self.bos) // 2


def make_plan(session: Session[Settings]) -> BehaviourPlan:
    """Return the measures and sequences of a run.

    Raises:
        UserError: for a condition that the model does not have, too few documents, named measures
            that need a tokenizer where there is none, or measures none of which the model or the
            data can show.
    """
    settings, model, text = session.settings, session.loaded.model, session.sequences()
    tokenizer = session.loaded.tokenizer
    if text.kind in ("random", "vectors"):
        raise UserError("behaviour is measured on text, with a language model")
    drawn = [name for name in DRAWN if name in settings.measures]
    if tokenizer is None and drawn and settings.measures != MEASURES:
        raise UserError(
            f"--measures {' '.join(drawn)}: random tokens need a tokenizer, and the model has none"
        )
    has, left_out = components(model), irreplaceable(model)
    conditions = make_conditions(has, settings.removals, settings.ablations, left_out)
    settings.validate_removals(conditions)
    w_q = settings.ablations[0].without(["w_q"])
    validate_removable(model, [*conditions.values(), *[w_q] * settings.heads])
    layers = settings.layers_with_maps(session.loaded.info)  # refused before anything is run
    if text.n_documents < MIN_DOCUMENTS:
        raise UserError(
            f"{len(text)} sequences from {text.n_documents} documents: {MIN_DOCUMENTS} documents "
            "are needed; raise --n-seqs, or take other --data"
        )
    probes, skipped = make_probes(session, has)
    if not {*settings.measures} - {*skipped}:
        reasons = "; ".join(f"{name}: {skipped[name]}" for name in settings.measures)
        raise UserError(f"nothing to measure ({reasons})")
    return BehaviourPlan(
        conditions=conditions,
        heads={
            (block.index, head): replace(w_q, heads={block.index: [head]})
            for block in numbered_layers(model, layers)
            for head in range(block.n_heads if settings.heads else 0)
        },
        sources=Condition(name for name in SOURCES if name in has),
        layers=layers,
        measures=settings.measures,
        probes=probes,
        skipped=skipped,
        bos=text.bos,
        trained=settings.trained_len_of(session.loaded.info.n_ctx),
        left_out=left_out if "weights" in settings.removals else {},
        uniform=(
            nan if tokenizer is None else log(len(tokenizer) - len(set(tokenizer.all_special_ids)))
        ),
    )


def make_probes(
    session: Session[Settings], has: Sequence[str]
) -> tuple[dict[str, Probe], dict[str, str]]:
    """Return the sequences that the measures need, and which measures are skipped and why.

    Args:
        session: the run.
        has: the components that the model has.
    """
    settings, data = session.settings, session.sequences()
    skipped: dict[str, str] = {}
    start, prefix = int(data.bos), settings.prefix_len
    segment = (settings.seq_len - start) // 2
    text = probe_of(data, prefix)
    generator = torch.Generator().manual_seed(settings.seed)
    twice = repeated(text.tokens, segment, start)
    probes = {
        "text": text,
        "copy_text": replace(text, tokens=twice, prefix=start + segment),
        "order": replace(text, tokens=permuted(text.tokens, generator, start, prefix)),
    }
    if session.loaded.tokenizer is None:
        skipped |= dict.fromkeys(DRAWN, "random tokens need a tokenizer, and the model has none")
    else:
        probes |= random_probes(session, text, segment, start)
    if not data.bos:
        skipped["bos"] = "sequences begin without a BOS token"
    if "extrapolation" in settings.measures:
        try:
            probes["long"] = long_windows(session, has)
        except UserError as error:
            skipped["extrapolation"] = str(error)
    if settings.heads:
        layers = settings.layers_with_maps(session.loaded.info)
        try:
            validate_first_sequence(session.loaded.model, data.inputs, layers)
        except UserError as error:
            skipped["heads"] = str(error)
    taken = [about for about in QUANTITIES.values() if about.measure in settings.measures]
    wanted = {"text", *(about.probe for about in taken)}
    return {name: probe for name, probe in probes.items() if name in wanted}, skipped


def random_probes(
    session: Session[Settings], text: Probe, segment: int, start: int
) -> dict[str, Probe]:
    """Return random tokens twice, and windows of text with another first token than BOS or none.

    Args:
        session: the run.
        text: the windows of text.
        segment: the length of a segment that fits into a window twice.
        start: how many BOS tokens the windows begin with.
    """
    tokenizer, seed = session.loaded.tokenizer, session.settings.seed
    copies = random_twice(text.tokens, segment, start, tokenizer=tokenizer, seed=seed)
    documents = torch.arange(len(copies))
    probes = {"copy_random": Probe(tokens=copies, documents=documents, prefix=start + segment)}
    if start:
        rest = text.tokens[:, 1:]
        other_first = torch.cat([copies[:, -1:], rest], 1)
        probes["without_bos"] = replace(text, tokens=rest, prefix=text.prefix - 1)
        probes["other_first"] = replace(text, tokens=other_first)
    return probes


def probe_of(data: Sequences, prefix: int) -> Probe:
    """Return sequences with their documents; a sequence without a document is one."""
    documents = torch.arange(len(data)) if data.documents is None else data.documents
    return Probe(tokens=data.inputs, documents=documents, prefix=prefix)


def long_windows(session: Session[Settings], has: Sequence[str]) -> Probe:
    """Return windows beyond the trained context.

    Raises:
        UserError: saying why there are none.
    """
    settings, n_ctx = session.settings, session.loaded.info.n_ctx
    trained, length = settings.trained_len_of(n_ctx), settings.extrapolated_len(n_ctx)
    if "pos_embed" in has:
        raise UserError("positions are learned: there are none beyond the context")
    if length <= trained:
        raise UserError(
            f"the trained context of {trained} tokens is not shorter than --max-len "
            f"{settings.max_len}"
        )
    if session.inputs is not None:
        raise UserError(f"it takes windows of {length} tokens, and other sequences are given")
    n_positions = positions_of(session.loaded.model)
    if n_positions is not None and length > n_positions:
        raise UserError(
            f"the model has {n_positions} positions: load it with n_ctx={length}, or lower "
            "--max-len"
        )
    if settings.prefix_len > trained - trained // 4:
        raise UserError(
            f"the prefix of {settings.prefix_len} tokens reaches into the last quarter of the "
            f"trained context of {trained}"
        )
    try:
        long = session.sequences("long", settings=settings.long_windows(n_ctx))
    except UserError as error:
        raise UserError(f"no windows of {length} tokens: {error}") from error
    return probe_of(long, settings.prefix_len)


@dataclass(frozen=True, kw_only=True)
class MeasuredBehaviour:
    """The measurements of every condition.

    Attributes:
        losses: per condition (or single head, such as `L2H3`) and probe, nats.
        distances: per condition, of predicted and true index on held-out documents, in positions;
            the last axis is the fit on true and on shuffled targets.
        untrained: distances of the model with random weights, where only sources are removed.
        head_patterns: per layer, the RMS of each head's positional part p in the intact model,
            nats; empty if single heads are not wanted.
    """

    losses: dict[tuple[str, str], ProbeLosses]
    distances: dict[str, Distances] = field(default_factory=dict)
    untrained: dict[str, Distances] = field(default_factory=dict)
    head_patterns: dict[int, list[Interval]] = field(default_factory=dict)


def head_name(layer: int, head: int) -> str:
    """Return the name of a head, such as `L2H3`."""
    return f"L{layer}H{head}"
