"""The section of a report that holds an explorer."""

from __future__ import annotations

from collections.abc import Iterator

from nope_probe.figures.explorer import Explorer
from nope_probe.reports.page import Section


def explorer_section(explorer: Explorer | None) -> Iterator[Section]:
    """Yield a report's section with the explorer, if there is one."""
    if explorer is not None:
        yield Section(
            title="Try it: switch components off",
            html=explorer.frame(),
            caption="All maps and numbers were computed by the run and are in this page: the "
            "browser computes nothing and loads nothing.",
        )
