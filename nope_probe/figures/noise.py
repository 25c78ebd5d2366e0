"""Colour limits and axis ranges wide enough that noise looks flat."""

from __future__ import annotations

# A map or curve that spans less than so many standard errors, or nats (float32 resolves scores no
# better), is noise; its colours or axis then span so many times as much.
NOISE_ERRORS, NOISE_NATS, FLAT = 8, 1e-5, 10
FLAT_WORDS = ": flat, below the noise"  # after a panel's title
PALE = 3  # standard errors of a cell: signed colours reach at least so far


def widened(low: float, high: float, floor: float = NOISE_NATS) -> tuple[float, float, bool]:
    """Return limits, far apart if they were nearer than `floor`, and whether they were.

    Example:
        >>> widened(1.0, 3.0, floor=1.0)
        (1.0, 3.0, False)
        >>> widened(2.0, 2.0, floor=1.0)
        (-3.0, 7.0, True)
    """
    if high - low >= floor:
        return low, high, False
    centre, half = (low + high) / 2, FLAT * floor / 2
    return centre - half, centre + half, True
