"""Maps: what a map is, how its folds are kept and stored, how it is pooled and centred."""

ALL_ROWS = 2048  # up to so many positions, maps have the row of every query by default
DEFAULT_ROWS = 512  # above, those of so many queries


def default_rows(n: int) -> int:
    """Return how many rows maps of n positions have by default.

    Example:
        >>> default_rows(2048), default_rows(2049)
        (2048, 512)
    """
    return n if n <= ALL_ROWS else DEFAULT_ROWS
