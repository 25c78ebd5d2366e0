"""Tables on the terminal that the commands behaviour and compare draw themselves."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from nope_probe.experiments.sections import columns_that_fit

__all__ = ["columns_that_fit", "narrow_table"]


def narrow_table(title: str) -> Table:
    """Return an empty table with little space between its columns: intervals are long."""
    return Table(
        title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False
    )
