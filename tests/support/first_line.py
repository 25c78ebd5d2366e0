"""The first lines of a run: sentences whose numbers are cells of the tables under them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nope_probe.reports.page import Headline

NUMBER = r"(?<![\w.-])[+-]?\d+(?:[.,]\d+)*%?"  # not the digits of a name, such as L1H3 or gpt-2


def headlines(lead: Headline | None) -> Iterator[Headline]:
    """Yield a headline and those after it."""
    while lead is not None:
        yield lead
        lead = lead.then


def assert_numbers_are_cells(lead: Headline) -> None:
    """Assert that a sentence of numbers is one, and that each number is in a cell of its table."""
    for of_table in headlines(lead):
        numbers = re.findall(NUMBER, of_table.sentence)
        if numbers:
            assert of_table.table is not None
            cells = " ".join(map(str, of_table.table.to_numpy().flatten()))
            assert {*numbers} <= {*re.findall(NUMBER, cells)}, of_table.sentence
            assert not re.search(r"[.!?] ", of_table.sentence), "one sentence"
