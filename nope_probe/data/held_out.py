"""The slice of a text source, by a hash, that is kept from training and studied."""

from __future__ import annotations

from hashlib import sha256

HELD_OUT_PERCENT = 13


def is_held_out(key: str) -> bool:
    """Return whether a text (or the name of a module) belongs to the held-out slice."""
    return int(sha256(key.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT
