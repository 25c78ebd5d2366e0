"""What a run measures: conditions, text windows and what is made of them, and what it skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from nope_probe.analyses.behaviour import by_document
from nope_probe.analyses.shapley import Condition
from nope_probe.components import Component
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.conditions import (
    Removal,
    head_conditions,
    make_conditions,
    sources_of,
)
from nope_probe.experiments.behaviour.settings import Measure, Settings
from nope_probe.experiments.engine import validate_first_sequence
from nope_probe.experiments.removals import validate_bands
from nope_probe.hooks.removing.targets import components
from nope_probe.runtime.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_DOCUMENTS = 8  # four to fit on and four held out
# The sequences that a measure needs beside the text windows.
PROBES = {
    "copy": ("copy_text", "copy_random"),
    "order": ("order",),
    "bos": ("without_bos", "other_first"),
    "extrapolation": ("long",),
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Sequences of equal length whose losses are measured.

    Attributes:
        tokens: the sequences.
        documents: the document of each.
        prefix: how many first positions see each other where the mask is removed.
    """

    tokens: Int[Tensor, "seq pos"]
    documents: Int[Tensor, " seq"]
    prefix: int

    @property
    def first_target(self) -> int:
        """The first target that no position of the prefix has in sight."""
        return self.prefix

    def by_document(self, values: Float[Tensor, "seq *rest"]) -> Float[Tensor, "_ *rest"]:
        """Return the mean over the sequences of each document."""
        return by_document(values, self.documents)

    def subset(self, which: Int[Tensor, " chosen"]) -> Probe:
        """Return some of the sequences."""
        return Probe(tokens=self.tokens[which], documents=self.documents[which], prefix=self.prefix)


def documents_of(sequences: Sequences) -> Int[Tensor, " seq"]:
    """Return the number of each sequence's document; one drawn by itself is its own."""
    if sequences.documents is None:
        return torch.arange(len(sequences))
    return sequences.documents


def segment_length(seq_len: int, bos: bool) -> int:
    """Return the length of a segment that fits into a sequence twice, after BOS."""
    return (seq_len - int(bos)) // 2


def repeated(tokens: Int[Tensor, "seq pos"], length: int, bos: bool) -> Int[Tensor, "seq twice"]:
    """Return each sequence's first tokens twice, after its BOS if it has one.

    Args:
        tokens: the sequences.
        length: of the segment that is repeated.
        bos: whether they begin with a BOS token.

    Example:
        >>> repeated(torch.tensor([[0, 5, 6, 7, 8]]), 2, bos=True)
        tensor([[0, 5, 6, 5, 6]])
    """
    start = int(bos)
    segment = tokens[:, start : start + length]
    return torch.cat([tokens[:, :start], segment, segment], 1)


def shuffled_prefix(
    tokens: Int[Tensor, "seq pos"], prefix: int, bos: bool, generator: Generator
) -> Int[Tensor, "seq pos"]:
    """Return the sequences with the tokens of their prefix, but for BOS, in random order."""
    start = int(bos)
    order = torch.rand(len(tokens), prefix - start, generator=generator).argsort(-1)
    shuffled = tokens[:, start:prefix].gather(1, order)
    return torch.cat([tokens[:, :start], shuffled, tokens[:, prefix:]], 1)


def text_probes(
    text: Probe, bos: bool, other_first: Int[Tensor, " seq"], seed: int
) -> dict[str, Probe]:
    """Return the probes that are made from text windows.

    Args:
        text: the windows.
        bos: whether they begin with a BOS token.
        other_first: the token that takes the place of BOS in `other_first`, for each window.
        seed: of the shuffled prefixes.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, documents, prefix = text.tokens, text.documents, text.prefix
    segment = segment_length(tokens.shape[1], bos)
    shuffled = shuffled_prefix(tokens, prefix, bos, generator)
    probes = {
        "text": text,
        "copy_text": Probe(
            tokens=repeated(tokens, segment, bos), documents=documents, prefix=int(bos) + segment
        ),
        "order": Probe(tokens=shuffled, documents=documents, prefix=prefix),
    }
    if bos:
        other = tokens.clone()
        other[:, 0] = other_first
        probes["without_bos"] = Probe(tokens=tokens[:, 1:], documents=documents, prefix=prefix - 1)
        probes["other_first"] = Probe(tokens=other, documents=documents, prefix=prefix)
    return probes


def token_arrays(probes: Mapping[str, Probe]) -> dict[str, Tensor]:
    """Return the tokens of all probes, as a run keeps them; the text windows as `tokens`.

    With them go the `documents` of the text windows, and the `long_documents` of the long ones.
    """
    arrays = {"tokens" if name == "text" else name: each.tokens for name, each in probes.items()}
    arrays["documents"] = probes["text"].documents
    if "long" in probes:
        arrays["long_documents"] = probes["long"].documents
    return arrays


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run measures.

    Attributes:
        conditions: what is removed, by name; the intact model first.
        heads: the conditions that remove a single head's W_Q, if these are wanted.
        sources: the mask and the position encoding of the model.
        measures: the names of the measures.
        probes: the sequences by name.
        skipped: per measure that the model or the data cannot show, the reason.
        bos: whether windows begin with a BOS token.
        trained: the length that the model was trained at, in tokens.
        uniform: the loss of a uniform guess among ordinary tokens, in nats.
    """

    conditions: dict[str, Removal]
    heads: dict[str, Removal] = field(default_factory=dict)
    sources: Condition
    measures: tuple[Measure, ...]
    probes: dict[str, Probe]
    skipped: dict[str, str] = field(default_factory=dict)
    bos: bool
    trained: int
    uniform: float

    @property
    def text(self) -> Probe:
        """The text windows."""
        return self.probes["text"]

    @property
    def segment(self) -> int:
        """The length of a copied segment."""
        return segment_length(self.text.tokens.shape[1], self.bos)

    def measured(self, measure: Measure) -> bool:
        """Return whether a measure is asked for and can be shown."""
        return measure in self.measures and measure not in self.skipped

    def removes_mask(self, name: str) -> bool:
        """Return whether a condition removes the mask, so that prefixes are bidirectional."""
        return self.conditions[name].mask


def validate_documents(text: Sequences) -> None:
    """Check that there are enough documents for intervals, and to hold some out.

    Raises:
        UserError: saying how many there are.
    """
    n_documents = text.n_documents
    if n_documents < MIN_DOCUMENTS:
        raise UserError(
            f"{len(text)} sequences from {n_documents} documents: {MIN_DOCUMENTS} documents are "
            "needed; raise --n-seqs, or take other --data"
        )


def validate_measures(measures: Sequence[Measure], skipped: Mapping[str, str]) -> None:
    """Check that something is left to measure.

    Raises:
        UserError: saying for each measure why it is not.
    """
    if not {*measures} - {*skipped}:
        reasons = "; ".join(f"{name}: {skipped[name]}" for name in measures)
        raise UserError(f"nothing to measure ({reasons})")


def uniform_loss(tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the loss of a uniform guess among the tokens that are not special, in nats."""
    return log(len(tokenizer) - len(set(tokenizer.all_special_ids)))


def plan_of(session: Session[Settings]) -> Plan:
    """Return what to measure on which sequences.

    Raises:
        UserError: for a condition that the model does not have, too few documents, or measures none
            of which the model or the data can show.
    """
    settings, model = session.settings, session.loaded.model
    has = components(model)
    conditions = make_conditions(has, settings.remove, settings.replacement)
    settings.validate_removals(conditions)
    validate_bands(model, frozenset().union(*(c.components for c in conditions.values())))
    n_layers = settings.n_layers_of(session.loaded)  # refused before anything is run
    text = session.sequences()
    validate_documents(text)
    probes, skipped = make_probes(session, has)
    validate_measures(settings.measures, skipped)
    return Plan(
        conditions=conditions,
        heads=head_conditions(model, n_layers, settings.replacement[0]) if settings.heads else {},
        sources=sources_of(has),
        measures=settings.measures,
        probes=probes,
        skipped=skipped,
        bos=text.bos,
        trained=settings.trained_len_of(session.loaded.info.n_ctx),
        uniform=uniform_loss(session.loaded.tokenizer),
    )


def make_probes(
    session: Session[Settings], has: Sequence[Component]
) -> tuple[dict[str, Probe], dict[str, str]]:
    """Return the sequences that the measures need, and which measures are skipped and why.

    Args:
        session: the run.
        has: the components that the model has.
    """
    settings, text = session.settings, session.sequences()
    skipped: dict[str, str] = {}
    segment = segment_length(settings.seq_len, text.bos)
    length = int(text.bos) + segment
    random = session.sequences("random", settings=settings.random_segments(length))
    probes = text_probes(
        Probe(tokens=text.inputs, documents=documents_of(text), prefix=settings.prefix_len),
        text.bos,
        random.inputs[:, -1],
        settings.seed,
    )
    probes["copy_random"] = Probe(
        tokens=repeated(random.inputs, segment, text.bos),
        documents=documents_of(random),
        prefix=length,
    )
    if not text.bos:
        skipped["bos"] = "sequences begin without a BOS token"
    if "extrapolation" in settings.measures:
        _add_long_windows(session, has, probes, skipped)
    if "pattern" in settings.measures:
        _check_pattern(session, skipped)
    wanted = {"text"}.union(*(PROBES.get(measure, ()) for measure in settings.measures))
    return {name: each for name, each in probes.items() if name in wanted}, skipped


def _add_long_windows(
    session: Session[Settings],
    has: Sequence[Component],
    probes: dict[str, Probe],
    skipped: dict[str, str],
) -> None:
    """Add windows beyond the trained context, or the reason why there are none."""
    settings, n_ctx = session.settings, session.loaded.info.n_ctx
    trained, length = settings.trained_len_of(n_ctx), settings.extrapolated_len(n_ctx)
    if "pos_embed" in has:
        skipped["extrapolation"] = "positions are learned: there are none beyond the context"
    elif length <= trained:
        skipped["extrapolation"] = (
            f"the trained context of {trained} tokens is not shorter than --max-len "
            f"{settings.max_len}"
        )
    elif settings.prefix_len > trained - trained // 4:
        skipped["extrapolation"] = (
            f"the prefix of {settings.prefix_len} tokens reaches into the last quarter of the "
            f"trained context of {trained}"
        )
    else:
        try:
            long = session.sequences("long", settings=settings.long_windows(n_ctx))
        except UserError as error:
            skipped["extrapolation"] = f"no windows of {length} tokens: {error}"
            return
        probes["long"] = Probe(
            tokens=long.inputs, documents=documents_of(long), prefix=settings.prefix_len
        )


def _check_pattern(session: Session[Settings], skipped: dict[str, str]) -> None:
    """Find on one sequence whether all layers' patterns can be measured."""
    try:
        validate_first_sequence(
            session.loaded.model,
            session.sequences().inputs,
            session.settings.n_layers_of(session.loaded),
        )
    except UserError as error:
        skipped["pattern"] = str(error)
