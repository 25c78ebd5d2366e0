"""The names of bands of rotary pairs; nothing here needs torch.

`rope` is all pairs; `rope_high` those whose wavelength 2 pi / theta is below the length of the
sequences, `rope_low` the rest; `rope[a:b]` the pairs a to b - 1, from 0, the fastest first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def share_pairs(one: str, other: str) -> bool:
    """Return whether two names of RoPE or its bands can stand for the same rotary pairs.

    Which pairs `rope_high` has depends on the model and the sequences' length, so it can share
    pairs with any `rope[a:b]`.

    Example:
        >>> share_pairs("rope[0:9]", "rope[7:16]"), share_pairs("rope[0:8]", "rope[8:16]")
        (True, False)
        >>> share_pairs("rope", "rope_high"), share_pairs("rope_high", "rope_low")
        (True, False)
    """
    if not (is_rope(one) and is_rope(other)) or {one, other} == {*ROPE_HALVES}:
        return False
    first, second = BAND.fullmatch(one), BAND.fullmatch(other)
    if first is None or second is None:
        return True
    return max(int(first[1]), int(second[1])) < min(int(first[2]), int(second[2]))


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


def with_bands(players: Sequence[str], bands: Sequence[str]) -> list[str]:
    """Return players with bands in place of RoPE.

    Example:
        >>> with_bands(["mask", "rope"], ["rope[0:2]", "rope[2:4]"])
        ['mask', 'rope[0:2]', 'rope[2:4]']
    """
    return [each for name in players for each in (bands if name == "rope" else [name])]
