"""The end of a process before its time, as the processes that share a run tell one another."""

from __future__ import annotations

from dataclasses import dataclass

from nope_probe.errors import MachineError, UserError


class PeerEndedError(MachineError):
    """Raised where another process that shares the run has ended, through no mistake of a user."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a process before its time.

    Attributes:
        rank: which process it was.
        code: its exit code.
        text: why, in one line.
        printed: whether the process prints the line itself.
    """

    rank: int
    code: int
    text: str
    printed: bool

    def error(self, rank: int) -> UserError:
        """Return the error that ends another process for it."""
        text = f"process {self.rank} ended{self.text and ': '}{self.text}"
        error = UserError(text) if self.code == UserError.exit_code else PeerEndedError(text)
        error.prints = not self.printed and rank == (1 if self.rank == 0 else 0)
        return error


def killed(rank: int) -> Failure:
    """Return the end of a process that could not tell why."""
    return Failure(rank=rank, code=MachineError.exit_code, text="", printed=False)


def brief(error: BaseException) -> str:
    """Return an error in one line of its kind and text."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200].rstrip(": ")
