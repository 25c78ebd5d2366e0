"""The token sequences that each measure of behaviour is read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from nope_probe.analyses.behaviour import by_document
from nope_probe.data.sequences import Sequences


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
