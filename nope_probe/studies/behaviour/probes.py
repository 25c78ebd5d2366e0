"""The sequences on which behaviour is measured, made of windows of text.

Windows are read as they are, with a segment twice, with a shuffled prefix, with another first token
or none, and beyond the trained length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from nope_probe.data.sequences import Sequences, random_twice, repeated
from nope_probe.data.windows import permuted
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import positions_of
from nope_probe.hooks.removing.components import components
from nope_probe.run.session import Session
from nope_probe.studies.behaviour.settings import QUANTITIES, Measure, Settings

DRAWN: tuple[Measure, ...] = ("copy", "bos")  # they take random tokens of the vocabulary


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


def make_probes(session: Session[Settings]) -> tuple[dict[str, Probe], dict[str, str]]:
    """Return the sequences that the measures need, and which measures are skipped and why."""
    settings, data, loaded = session.settings, session.sequences(), session.loaded
    skipped: dict[str, str] = {}
    start, prefix, twice = int(data.bos), settings.prefix_len, int(data.bos) + data.segment
    text, generator = probe_of(data, prefix), torch.Generator().manual_seed(settings.seed)
    probes = {
        "text": text,
        "copy_text": replace(text, tokens=repeated(data, data.segment), prefix=twice),
        "order": replace(text, tokens=permuted(text.tokens, generator, start, prefix)),
    }
    if loaded.tokenizer is None:
        skipped |= dict.fromkeys(DRAWN, "random tokens need a tokenizer, and the model has none")
    else:
        copies = random_twice(data, data.segment, loaded.tokenizer, settings.seed)
        drawn, rest = torch.arange(len(copies)), text.tokens[:, 1:]
        probes["copy_random"] = Probe(tokens=copies, documents=drawn, prefix=twice)
        if data.bos:
            other_first = torch.cat([copies[:, -1:], rest], 1)
            probes["without_bos"] = replace(text, tokens=rest, prefix=prefix - 1)
            probes["other_first"] = replace(text, tokens=other_first)
    if not data.bos:
        skipped["bos"] = "sequences begin without a BOS token"
    if "extrapolation" in settings.measures:
        try:
            probes["long"] = long_windows(session)
        except UserError as error:
            skipped["extrapolation"] = str(error)
    taken = [about for about in QUANTITIES.values() if about.measure in settings.measures]
    wanted = {"text", *(about.probe for about in taken)}
    return {name: probe for name, probe in probes.items() if name in wanted}, skipped


def probe_of(data: Sequences, prefix: int) -> Probe:
    """Return sequences with their documents; a sequence without a document is one."""
    documents = torch.arange(len(data)) if data.documents is None else data.documents
    return Probe(tokens=data.inputs, documents=documents, prefix=prefix)


def long_windows(session: Session[Settings]) -> Probe:
    """Return windows beyond the trained context.

    Raises:
        UserError: saying why there are none.
    """
    settings, n_ctx = session.settings, session.loaded.info.n_ctx
    trained, length = settings.trained_len_of(n_ctx), settings.extrapolated_len(n_ctx)
    if "pos_embed" in components(session.loaded.model):
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
