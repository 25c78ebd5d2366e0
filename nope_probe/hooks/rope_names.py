"""The names of bands of rotary pairs; nothing here needs torch.

`rope` is all pairs; `rope_high` those whose wavelength 2 pi / theta is below the length of the
sequences, `rope_low` the rest; `rope[a:b]` the pairs a to b - 1, from 0, the fastest first.
"""

from __future__ import annotations

import re
from itertools import pairwise

ROPE_HALVES = ("rope_high", "rope_low")
BAND = re.compile(r"rope\[(\d+):(\d+)\]")


def is_rope(name: str) -> bool:
    """Return whether a name stands for RoPE or a band of it.

    Example:
        >>> is_rope("rope"), is_rope("rope_low"), is_rope("rope[0:4]"), is_rope("mask")
        (True, True, True, False)
    """
    return name in ("rope", *ROPE_HALVES) or BAND.fullmatch(name) is not None


def equal_bands(n_pairs: int, n_bands: int) -> tuple[str, ...]:
    """Return the names of bands that divide all pairs as equally as possible.

    Raises:
        ValueError: for more bands than pairs, or none.

    Example:
        >>> equal_bands(8, 3)
        ('rope[0:2]', 'rope[2:5]', 'rope[5:8]')
    """
    if not 1 <= n_bands <= n_pairs:
        raise ValueError(f"expected from 1 to {n_pairs} bands for {n_pairs} pairs, got {n_bands}")
    ends = [n_pairs * band // n_bands for band in range(n_bands + 1)]
    return tuple(f"rope[{a}:{b}]" for a, b in pairwise(ends))
