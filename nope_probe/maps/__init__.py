"""Maps: their folds, how they are kept and stored, how they are pooled and centred."""

ALL_ROWS = 2048  # up to this number of positions, maps have the row of every query by default
DEFAULT_ROWS = 512  # above it, maps have this number of rows
MIN_FOLDS = 4  # folds of the data that an interval needs
PRODUCT_FOLDS = MIN_FOLDS + 1  # a square of products takes four folds, and intervals leave one out
MIN_KEYS = 8  # other keys that a query of a lead sees, and that a row needs to have an order


def default_rows(n: int) -> int:
    """Return how many rows maps of n positions have by default.

    Example:
        >>> default_rows(2048), default_rows(2049)
        (2048, 512)
    """
    return n if n <= ALL_ROWS else DEFAULT_ROWS
