"""The plan of a run of `behaviour`: the conditions, the sequences, and the skipped measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from jaxtyping import Int
from torch import Tensor

from nope_probe.analyses.shapley import Condition, removal
from nope_probe.components import (
    SOURCES,
    Ablation,
    Component,
    is_rope,
    removal_order,
)
from nope_probe.data.sequences import Sequences, permuted
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.settings import QUANTITIES, Measure, Settings, make_conditions
from nope_probe.experiments.engine import validate_first_sequence
from nope_probe.experiments.removals import irreplaceable, validate_removable
from nope_probe.hooks.layers.model import numbered_layers, positions_of
from nope_probe.hooks.removing.targets import components
from nope_probe.runtime.session import Session

MIN_DOCUMENTS = 8  # four to fit on and four held out


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
class Plan:
    """A run's plan.

    Attributes:
        conditions: the removals by name; the intact model first.
        heads: removals of the W_Q of a single head, by layer and head, if wanted.
        sources: the mask and the position encoding of the model.
        layers: the numbers of the layers in which position and pattern are read.
        measures: the names of the measures.
        probes: the sequences by name.
        skipped: per measure that the model or the data cannot show, the reason.
        bos: whether windows begin with a BOS token.
        trained: the length that the model was trained at, in tokens.
        left_out: components that are not removed by default, and why.
        uniform: the loss of a uniform guess among the tokens that are not special, in nats.
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

    def measured(self, measure: Measure) -> bool:
        """Return whether a measure is asked for and can be shown."""
        return measure in self.measures and measure not in self.skipped

    def removes_mask(self, name: str) -> bool:
        """Return whether a condition removes the mask, so that prefixes are bidirectional."""
        return "mask" in self.conditions[name].remove

    def without_sources(self, ablation: Ablation) -> Ablation:
        """Return an ablation that removes the model's sources too."""
        removed = removal({*ablation.remove, *self.sources})
        return replace(ablation, remove=sorted(removed, key=removal_order))

    def removes_sources_alone(self, name: str) -> bool:
        """Return whether a condition removes nothing but sources, or bands of RoPE."""
        removed = self.conditions[name].remove
        return all(component in self.sources or is_rope(component) for component in removed)


def make_plan(session: Session[Settings]) -> Plan:
    """Return the measures and sequences of a run.

    Raises:
        UserError: for a condition that the model does not have, too few documents, or measures none
            of which the model or the data can show.
    """
    settings, model, text = session.settings, session.loaded.model, session.sequences()
    tokenizer = session.loaded.tokenizer
    if tokenizer is None or text.kind in ("random", "vectors"):
        raise UserError("behaviour is measured on text, with a language model and its tokenizer")
    has = components(model)
    left_out = irreplaceable(model)
    conditions = make_conditions(has, settings.remove, settings.substitutes, left_out)
    settings.validate_removals(conditions)
    removed = {name for condition in conditions.values() for name in condition.remove}
    validate_removable(model, removed | ({"w_q"} if settings.heads else set()))
    layers = settings.layers_of(session.loaded.info)  # refused before anything is run
    if text.n_documents < MIN_DOCUMENTS:
        raise UserError(
            f"{len(text)} sequences from {text.n_documents} documents: {MIN_DOCUMENTS} documents "
            "are needed; raise --n-seqs, or take other --data"
        )
    probes, skipped = make_probes(session, has)
    if not {*settings.measures} - {*skipped}:
        reasons = "; ".join(f"{name}: {skipped[name]}" for name in settings.measures)
        raise UserError(f"nothing to measure ({reasons})")
    w_q = settings.substitutes[0].without(["w_q"])
    return Plan(
        conditions=conditions,
        heads={
            (block.index, head): replace(w_q, heads={block.index: [head]})
            for block in numbered_layers(model, layers)
            for head in range(block.n_heads if settings.heads else 0)
        },
        sources=frozenset(name for name in SOURCES if name in has),
        layers=layers,
        measures=settings.measures,
        probes=probes,
        skipped=skipped,
        bos=text.bos,
        trained=settings.trained_len_of(session.loaded.info.n_ctx),
        left_out=left_out if settings.remove is None else {},
        uniform=log(len(tokenizer) - len(set(tokenizer.all_special_ids))),
    )


def make_probes(
    session: Session[Settings], has: Sequence[Component]
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
    random = session.sequences("random", settings=settings.random_segments(start, segment))
    random_tokens = torch.cat([data.inputs[:, :start], random.inputs[:, -segment:]], 1)
    text = probe_of(data, prefix)
    generator = torch.Generator().manual_seed(settings.seed)
    probes = {
        "text": text,
        "copy_text": replace(
            text, tokens=repeated(text.tokens, segment, start), prefix=start + segment
        ),
        "order": replace(text, tokens=permuted(text.tokens, generator, start, prefix)),
        "copy_random": replace(
            probe_of(random, start + segment), tokens=repeated(random_tokens, segment, start)
        ),
    }
    if data.bos:
        other_first = torch.cat([random.inputs[:, -1:], text.tokens[:, 1:]], 1)
        probes["without_bos"] = replace(text, tokens=text.tokens[:, 1:], prefix=prefix - 1)
        probes["other_first"] = replace(text, tokens=other_first)
    else:
        skipped["bos"] = "sequences begin without a BOS token"
    if "extrapolation" in settings.measures:
        try:
            probes["long"] = long_windows(session, has)
        except UserError as error:
            skipped["extrapolation"] = str(error)
    if "pattern" in settings.measures:
        layers = settings.layers_of(session.loaded.info)
        try:
            validate_first_sequence(session.loaded.model, data.inputs, layers)
        except UserError as error:
            skipped["pattern"] = str(error)
    taken = [about for about in QUANTITIES.values() if about.measure in settings.measures]
    wanted = {"text", *(about.probe for about in taken)}
    return {name: probe for name, probe in probes.items() if name in wanted}, skipped


def probe_of(data: Sequences, prefix: int) -> Probe:
    """Return sequences with their documents; a sequence drawn by itself is its own document."""
    documents = torch.arange(len(data)) if data.documents is None else data.documents
    return Probe(tokens=data.inputs, documents=documents, prefix=prefix)


def repeated(
    tokens: Int[Tensor, "seq pos"], length: int, start: int
) -> Int[Tensor, "seq start_and_twice"]:
    """Return each sequence's first tokens twice, after its BOS if it has one.

    Args:
        tokens: the sequences.
        length: of the segment that is repeated.
        start: how many BOS tokens they begin with.

    Example:
        >>> repeated(torch.tensor([[0, 5, 6, 7, 8]]), 2, start=1)
        tensor([[0, 5, 6, 5, 6]])
    """
    segment = tokens[:, start : start + length]
    return torch.cat([tokens[:, :start], segment, segment], 1)


def long_windows(session: Session[Settings], has: Sequence[Component]) -> Probe:
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
    if session.call.inputs is not None:
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
