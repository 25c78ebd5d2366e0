"""A claim of the paper, and whether a run reproduces it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper about a figure.

    Attributes:
        paper: the claim.
        reproduced: whether it holds in the run.
        evidence: the numbers of the run.
    """

    paper: str
    reproduced: bool
    evidence: str

    def __str__(self) -> str:
        verdict = "Reproduced" if self.reproduced else "Not reproduced"
        return f"the paper: {self.paper}. {verdict}: {self.evidence}."
