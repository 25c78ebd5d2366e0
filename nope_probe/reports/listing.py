"""Lines of text and links on a page, as a table that becomes a list on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link to another page.

    Attributes:
        text: what is shown.
        href: the page, relative to the one that links to it.
    """

    text: str
    href: str


Cell = str | Link


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Lines of text and links.

    Attributes:
        columns: the heading of each column.
        rows: a cell for each column.
        labelled: whether a phone, which shows cells below each other, shows their columns' names.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    labelled: bool = False

    def html(self) -> str:
        """Return the listing as HTML.

        Example:
            >>> link = Link(text="Figure 2", href="figure2/report.html")
            >>> Listing(columns=["figure"], rows=[[link]]).html().split("<tbody>")[1]
            '<tr><td><a href="figure2/report.html">Figure 2</a></td></tr></tbody></table>'
        """
        head = "".join(f'<th scope="col">{escape(each)}</th>' for each in self.columns)
        rows = "".join(f"<tr>{self._cells(row)}</tr>" for row in self.rows)
        return f'<table class="listing"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'

    def _cells(self, row: Sequence[Cell]) -> str:
        """Return a row's cells; the first is its heading and has no label."""
        labels = ["", *self.columns[1:]] if self.labelled else [""] * len(row)
        return "".join(map(_cell, row, labels))


def _cell(cell: Cell, label: str) -> str:
    opened = f'<td data-label="{escape(label)}">' if label else "<td>"
    if isinstance(cell, Link):
        return f'{opened}<a href="{escape(cell.href)}">{escape(cell.text)}</a></td>'
    return f"{opened}{escape(cell)}</td>"
