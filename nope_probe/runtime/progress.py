"""The progress bar of a run: its phase and condition, what is done, and an estimate of the rest."""

from __future__ import annotations

import sys

from tqdm import tqdm

_PHASES = {
    "gains": "calibration",
    "score": "scores",
    "shuffled": "shuffled tokens",
    "loss": "losses",
    "intact": "intact model",
    "ablated": "ablated model",
}
_WITH_ESTIMATE = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}, {remaining} left"


def open_bar(total: int, done: int, unit: str, *, hidden: bool) -> tqdm:
    """Return a progress bar on stderr; where the total is unknown, it counts.

    A run that has been started before says first at which percentage it resumes.

    Args:
        total: of all streams; 0 if that is not known.
        done: how many were done before.
        unit: what is counted.
        hidden: whether to show nothing.
    """
    if done and not hidden:
        at = f" at {100 * done / total:.0f}%" if total else ""
        sys.stderr.write(f"resuming{at}\n")
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        file=sys.stderr,
        dynamic_ncols=True,
        disable=hidden,
        bar_format=_WITH_ESTIMATE if total else None,
    )


def phase_of(key: str) -> str:
    """Return a stream's key in words: the phase of the run and, if it has one, the condition.

    Example:
        >>> phase_of("gains"), phase_of("score/mask+rope"), phase_of("score-zero/rope/L2")
        ('calibration', 'scores, condition mask+rope', 'scores (zero), condition rope, L2')
    """
    head, *condition = key.split("/")
    name, _, variant = head.partition("-")
    words = _PHASES.get(name, name) + (f" ({variant})" if variant else "")
    return f"{words}, condition {', '.join(condition)}" if condition else words
