"""What a run measures, on which sequences, and what it skips and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING

from nope_probe.analyses.shapley import Condition
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.conditions import Removal
from nope_probe.experiments.behaviour.measures import Measure
from nope_probe.experiments.behaviour.probes import Probe, segment_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_DOCUMENTS = 8  # four to fit on and four held out


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run measures.

    Attributes:
        conditions: what is removed, by name; the intact model first.
        sources: the mask and the position encoding of the model.
        measures: the names of the measures.
        probes: the sequences by name.
        skipped: per measure that the model or the data cannot show, the reason.
        bos: whether windows begin with a BOS token.
        trained: the length that the model was trained at, in tokens.
        uniform: the loss of a uniform guess among ordinary tokens, in nats.
    """

    conditions: dict[str, Removal]
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
