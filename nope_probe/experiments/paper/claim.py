"""A claim of the paper, and whether it holds in a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that the paper shows in a figure.

    Attributes:
        paper: what it shows.
        seen: whether it is there.
        number: the evidence.
    """

    paper: str
    seen: bool
    number: str

    def __str__(self) -> str:
        return f"the paper: {self.paper}. {'Seen' if self.seen else 'Not seen'}: {self.number}."
